from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_stream import __version__, catalogue, cli
from lmcache_stream.bench.prompts import Prompt, read_prompts, shipped_prompts
from lmcache_stream.errors import CacheError, UsageError

COMMANDS = [
    "",
    "demo",
    "up",
    "doctor",
    "bench",
    "bench serve",
    "bench quality",
    "bench compare",
    "editors",
    "completion",
]
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
    @pytest.mark.parametrize("words", COMMANDS)
    @pytest.mark.parametrize("columns", [60, 100])
    def test_help_fits_the_terminal_and_names_every_option(
        self, words: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as end:
            cli.main([*words.split(), "--help"])
        assert end.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        examples = [line for line in lines if line.startswith("  ") and "lmcache-stream " in line]
        assert max(len(line) for line in lines if line not in examples) <= columns - 2
        parser = cli._parser(words.split())
        for word in words.split():
            (choices,) = (
                action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)
            )
            parser = choices[word]
        assert parser.description or not words
        for action in parser._actions:
            assert action.help or isinstance(action, argparse._SubParsersAction), action
            for option in action.option_strings:
                assert any(option in line for line in lines), option

    def test_help_says_what_the_exit_status_means(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            cli.main(["--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert "0 done; 1 something failed, or was found to be wrong; 2 called wrongly; 130 ended by Ctrl-C" in shown

    def test_help_does_not_wait_for_the_commands(self) -> None:
        program = """
import sys
from lmcache_stream import cli
try:
    cli.main(["--help"])
except SystemExit:
    print(sorted({"torch", "rich", "transformers", "lmcache_stream.bench.demo"} & set(sys.modules)))
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.splitlines()[-1] == "[]"

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as end:
            cli.main(["--version"])
        assert end.value.code == 0
        assert capsys.readouterr().out == f"lmcache-stream {__version__}\n"

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["demo", "--nonsense"], "demo: there is no --nonsense here; lmcache-stream demo --help tells"),
            (["demo", "--max-token=4", "--jsn"], "demo: there is no --jsn here, is it --json?"),
            (["bench", "serve", "--base_url", "x"], "bench serve: there is no --base_url here, is it --base-url?"),
            (["--versoin"], "lmcache-stream: the following arguments are required: COMMAND"),
            (["doctor"], "doctor: the following arguments are required: --base-url"),
            (["doctor", "--base-url=localhost:8000", "--kv-url=tcp://a:1", "--kv-http-url=http://a:1"], "--base-url "),
            (["completion", "csh"], "invalid choice: 'csh'"),
        ],
    )
    def test_a_wrong_flag_says_which_one_is_meant(
        self, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("LMCACHE_STREAM_BASE_URL", raising=False)
        monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
        status, err = fails(capsys, *arguments)
        assert status == 2
        assert said in err
        assert err.count("\n") == 1

    @pytest.mark.parametrize(
        ("error", "status", "said"),
        [
            (KeyboardInterrupt(), 130, "interrupted"),
            (UsageError("take\n another"), 2, "take another"),
            (CacheError("it is gone"), 1, "it is gone"),
            (PermissionError(13, "Permission denied", "out.json"), 1, "Permission denied: 'out.json'"),
            (ModuleNotFoundError("No module named 'uvloop'", name="uvloop"), 1, "install what uvloop is part of"),
            (ImportError("cannot import name 'x'", name="lmcache_stream.x"), 1, "pip install --force-reinstall"),
        ],
    )
    def test_an_error_is_one_line_with_its_status(
        self,
        error: BaseException,
        status: int,
        said: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def fail(_options: argparse.Namespace) -> None:
            raise error

        monkeypatch.setattr(catalogue, "run", fail)
        ended, err = fails(capsys, "editors")
        assert ended == status
        assert said in err
        assert err.startswith("lmcache-stream: ")
        assert err.count("\n") == 1

    def test_a_reader_that_has_seen_enough_ends_it_without_a_word(self) -> None:
        read, write = os.pipe()
        os.close(read)
        program = [sys.executable, "-m", "lmcache_stream.cli", "completion", "bash"]
        done = subprocess.run(program, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
        os.close(write)
        assert (done.returncode, done.stderr) == (1, "")

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
        assert status == 2
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


class TestCompletion:
    def test_bash_completes_commands_options_and_names_of_editors(self, tmp_path: Path) -> None:
        script = tmp_path / "completion"
        with script.open("w") as out:
            subprocess.run(
                [sys.executable, "-m", "lmcache_stream.cli", "completion", "bash"], stdout=out, check=True, timeout=120
            )
        asked = """
            source "$0"
            _shtab() {
              COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_lmcache_stream; echo ${COMPREPLY[@]}
            }
            _shtab lmcache-stream ""
            _shtab lmcache-stream bench serve --edi
            _shtab lmcache-stream editors snap
            """
        found = subprocess.run(["bash", "-c", asked, script], capture_output=True, text=True, check=True, timeout=20)
        commands, options, editors = found.stdout.splitlines()
        assert set(commands.split()) == set(cli.COMMANDS)
        assert set(options.split()) == {"--editor", "--edit-every"}
        assert editors == "snapkv"

    @pytest.mark.parametrize(("shell", "begins"), [("zsh", "#compdef lmcache-stream"), ("fish", "# AUTOMATICALLY")])
    def test_other_shells(self, shell: str, begins: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["completion", shell]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(begins)
        for word in ("doctor", "compare-baseline", "streaming-llm"):
            assert word in printed


class TestJson:
    """With `--json`, standard output has one JSON object and nothing else."""

    def test_demo(self, model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["demo", "--model", str(model), "--prompts", str(prompts), "--max-tokens", "2", "--json"]) == 0
        printed = capsys.readouterr()
        assert len(json.loads(printed.out)["answers"]) == 2
        assert "With all of its KV" in printed.err

    def test_bench_serve_and_compare(self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        few = ("--num-prompts", "2", "--random-input-len", "64", "--random-output-len", "4", "--disable-tqdm")
        assert cli.main(["bench", "serve", "--model", str(model), *few, "--json"]) == 0
        printed = capsys.readouterr()
        assert json.loads(printed.out)["completed"] == 2
        assert "Serving benchmark" in printed.err
        result = tmp_path / "result.json"
        result.write_text(printed.out)
        assert cli.main(["bench", "compare", str(result), str(result), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert {row["label"]: row["ratio"] for row in rows}["Generated tokens"] == 1.0

    def test_an_error_leaves_standard_output_empty(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert fails(capsys, "demo", "--editor", "nonsense", "--json")[0] == 2


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
