from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_stream import cli
from lmcache_stream.bench.prompts import Prompt, read_prompts, shipped_prompts
from lmcache_stream.errors import UsageError

WORDS = "Each of the seven lanterns in the hall is lit at dusk by a different hand. " * 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lmcache_stream.testing.tiny import tiny_model

    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"context": WORDS, "question": "How many lanterns are there?", "answer": "seven"},
        {"prompt": WORDS + "\nThe lanterns are lit"},
    ]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    return path


def fails(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """Exit status and standard error of a command that prints nothing on standard output."""
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    printed = capsys.readouterr()
    assert printed.out == ""
    return status, printed.err


class TestCommandLine:
    @pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
    def test_help(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 0
        assert "demo" in capsys.readouterr().out

    def test_help_names_every_option(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            cli.main(["demo", "--help"])
        shown = capsys.readouterr().out
        for option in ("--prompts", "--keep", "--editor", "--max-tokens", "--json", "--model"):
            assert option in shown

    def test_help_does_not_wait_for_the_commands(self) -> None:
        program = """
import sys
from lmcache_stream import cli
try:
    cli.main(["--help"])
except SystemExit:
    print(sorted({"transformers", "lmcache_stream.engine", "lmcache_stream.bench.demo"} & set(sys.modules)))
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.splitlines()[-1] == "[]"

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as end:
            cli.main(["--version"])
        assert end.value.code == 0
        assert capsys.readouterr().out.startswith("lmcache-stream ")

    @pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--nonsense"]])
    def test_nonsense_is_answered_with_one_line(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        status, said = fails(capsys, *arguments)
        assert status == 2
        assert said.count("\n") == 1
        assert "--help tells what it takes" in said

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("--keep", "0"),
            ("--keep", "1.5"),
            ("--keep", "-3"),
            ("--keep", "half"),
            ("--keep", "nan"),
            ("--max-tokens", "0"),
            ("--max-tokens", "many"),
            ("--max-tokens", "1.5"),
        ],
    )
    def test_a_number_that_cannot_be_right(self, option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
        status, said = fails(capsys, "demo", f"{option}={value}")
        assert status == 2
        assert f"argument {option}: '{value}' is" in said

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["--prompts", "missing.jsonl"], "missing.jsonl"),
            (["--json", "missing/out.json"], "a file in a folder that exists"),
            (["--json", "."], "a file in a folder that exists"),
            (["--model", "missing"], "is no folder"),
            (["--editor", "nonsense"], "streaming-llm"),
        ],
    )
    def test_wrong_options_are_one_line_before_any_work(
        self,
        arguments: list[str],
        reason: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        status, said = fails(capsys, "demo", *arguments)
        assert status == 2
        assert said.startswith("lmcache-stream: ")
        assert said.count("\n") == 1
        assert reason in said

    def test_a_folder_that_is_no_model_is_one_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        status, said = fails(capsys, "demo", "--model", tmp_path)
        assert status in (1, 2)
        assert said.count("\n") == 1
        assert "Traceback" not in said

    def test_ctrl_c_ends_it_with_130(self, model: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "lmcache_stream.cli", "demo", "--model", model, "--max-tokens", "3000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("Prompts to "):
                break
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130
        assert said.splitlines()[-1] == "lmcache-stream: interrupted"
        assert "Traceback" not in said


class TestDemo:
    def test_tables_answers_and_json(
        self, model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out.json"
        status = cli.main(
            ["demo", "--model", str(model), "--prompts", str(prompts), "--json", str(out), "--max-tokens", "8"]
        )
        printed = capsys.readouterr().out
        assert status == 0, printed
        positions = [printed.index(title) for title in ("Prefill", "Modify", "Decode", "Answers")]
        assert positions == sorted(positions)
        assert "of 1 with all of the KV" in printed

        report = json.loads(out.read_text())
        assert list(report) == ["prefill", "modify", "decode", "answers"]
        results = {phase: report[phase]["metrics"]["results"] for phase in ("prefill", "modify", "decode")}
        assert list(results["prefill"]) == ["duration", "input_tokens", "input_tput"]
        assert list(results["modify"]) == ["duration"]
        assert list(results["decode"]) == ["duration", "output_tokens", "output_tput"]
        assert {report[phase]["metrics"]["config"]["num_streams"] for phase in results} == {2}
        assert [answer["question"] for answer in report["answers"]] == [
            "How many lanterns are there?",
            "The lanterns are lit",
        ]
        for answer in report["answers"]:
            assert list(answer) == ["question", "full", "edited", "tokens_before", "tokens_after"]
            assert answer["tokens_before"] % 32 == answer["tokens_after"] % 32 == 0
            assert abs(answer["tokens_after"] - answer["tokens_before"] / 2) <= 16
            assert answer["full"]
            assert answer["full"] != answer["edited"]

    def test_keeping_everything_changes_no_answer(self, model: Path, prompts: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.json"
        options = ["--keep", "1.0", "--editor", "random", "--max-tokens", "16"]
        assert cli.main(["demo", "--model", str(model), "--prompts", str(prompts), "--json", str(out), *options]) == 0
        for answer in json.loads(out.read_text())["answers"]:
            assert answer["full"] == answer["edited"]
            assert answer["tokens_before"] == answer["tokens_after"]

    def test_a_prompt_that_fills_no_chunk_fails_in_one_line(
        self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        short = tmp_path / "short.jsonl"
        short.write_text('{"prompt": "Hello"}')
        status = cli.main(["demo", "--model", str(model), "--prompts", str(short)])
        said = capsys.readouterr().err.splitlines()
        assert status == 2
        assert "prompt 1 has" in said[-1]
        assert "take longer prompts" in said[-1]
        assert sum(line.startswith("lmcache-stream: ") for line in said) == 1

    @pytest.mark.model
    @pytest.mark.timeout(600)
    def test_the_shipped_prompts_with_their_model(self, tmp_path: Path) -> None:
        out = tmp_path / "out.json"
        assert cli.main(["demo", "--json", str(out), "--max-tokens", "24"]) == 0
        report = json.loads(out.read_text())
        answers = report["answers"]
        right = [
            prompt.is_answered_by(answer["full"]) for prompt, answer in zip(shipped_prompts(), answers, strict=True)
        ]
        assert sum(map(bool, right)) >= 5
        assert report["prefill"]["metrics"]["results"]["input_tokens"] >= 6 * 600
        for answer in answers:
            assert answer["tokens_before"] >= 600
            assert abs(answer["tokens_after"] - answer["tokens_before"] / 2) <= 16


class TestPrompts:
    def test_shipped_ones_end_with_a_question_whose_answer_is_in_the_text_once(self) -> None:
        prompts = shipped_prompts()
        assert len(prompts) == 6
        for prompt in prompts:
            assert prompt.text.endswith("\n\n" + prompt.question)
            assert prompt.question.endswith("?")
            assert prompt.answer is not None
            assert prompt.text.count(prompt.answer) == 1
            assert prompt.is_answered_by(f"It is {prompt.answer.upper()}.")
            assert not prompt.is_answered_by("I do not know.")

    def test_reads_both_forms(self, prompts: Path) -> None:
        asked, raw = read_prompts(prompts)
        assert asked == Prompt(f"{WORDS}\n\nHow many lanterns are there?", "How many lanterns are there?", "seven")
        assert raw == Prompt(f"{WORDS}\nThe lanterns are lit", "The lanterns are lit", chat=False)
        assert raw.is_answered_by("anything") is None

    def test_a_byte_order_mark_is_no_part_of_the_first_line(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n')
        assert read_prompts(path) == [Prompt("a", "a", chat=False)]

    @pytest.mark.parametrize(
        "line",
        [
            b"{",
            b"[]",
            b'"text"',
            b"{}",
            b'{"context": "a"}',
            b'{"question": "a"}',
            b'{"prompt": ""}',
            b'{"prompt": 1}',
            b'{"prompt": "a", "context": "b"}',
            b'{"prompt": "a", "promt": "b"}',
            b'{"prompt": "\xff"}',
        ],
    )
    def test_a_bad_line_is_named(self, line: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_bytes(b'{"prompt": "good"}\n\n' + line + b"\n")
        with pytest.raises(UsageError, match=r"bad\.jsonl, line 3: "):
            read_prompts(path)
        status, said = fails(capsys, "demo", "--prompts", path)
        assert status == 2
        assert "line 3" in said

    def test_an_empty_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.jsonl"
        path.write_text("\n\n")
        with pytest.raises(UsageError, match="no prompts"):
            read_prompts(path)
