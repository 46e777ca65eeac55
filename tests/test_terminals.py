"""What the commands print on terminals that are narrow, dumb, or are to stay without colours."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lmcache_stream import cli
from lmcache_stream.editors import names
from lmcache_stream.metrics import Metrics
from tests.test_cli import COMMANDS

RESULT = Path(__file__).parent / "data" / "vllm-bench-serve.json"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
NOBODY = ("--base-url", "http://127.0.0.1:1", "--kv-url", "tcp://127.0.0.1:1", "--kv-http-url", "http://127.0.0.1:1")
LONG = "a-result-whose-name-is-longer-than-a-narrow-terminal-is-wide-by-some-letters.json"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def results(tmp_path: Path) -> list[str]:
    """Two result files, one with a long name."""
    paths = [tmp_path / "first.json", tmp_path / LONG]
    for path in paths:
        path.write_bytes(RESULT.read_bytes())
    return [str(path) for path in paths]


@pytest.fixture(autouse=True)
def a_common_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def printed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """Exit status of a command, and what it prints on a terminal: standard output and standard error."""
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    try:
        status = cli.main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    return status, out.getvalue(), err.getvalue()


def joined(table: str) -> str:
    """The words of a table, those of folded cells put together."""
    return re.sub(r"[\s│]", "", ESCAPE.sub("", table))


HELP = [[*words.split(), "--help"] for words in COMMANDS]
OTHERS = [["editors"], ["editors", "snapkv"], ["editors", "--json"], ["completion", "bash"], ["--version"]]


@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("TERM", "dumb")], ids="=".join)
class TestWithoutEscapes:
    @pytest.mark.parametrize("arguments", [*HELP, *OTHERS], ids=" ".join)
    def test_what_needs_no_server(
        self, variable: tuple[str, str], arguments: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(*variable)
        status, out, err = printed(monkeypatch, *arguments)
        assert (status, err) == (0, "")
        assert out
        assert "\x1b" not in out

    def test_doctor(self, variable: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(*variable)
        status, out, err = printed(monkeypatch, "doctor", *NOBODY)
        assert status == 1
        assert "To change: start vLLM" in out
        assert "\x1b" not in out
        assert variable[0] == "NO_COLOR" or "\x1b" not in err  # a line that is written over needs them

    def test_compare(self, variable: tuple[str, str], results: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(*variable)
        status, out, err = printed(monkeypatch, "bench", "compare", *results)
        assert (status, err) == (0, "")
        assert "TTFT mean (ms)" in out
        assert "\x1b" not in out

    def test_bench_serve(
        self, variable: tuple[str, str], tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(*variable)
        few = ("--num-prompts", "1", "--random-input-len", "40", "--random-output-len", "2", "--disable-tqdm")
        status, out, _ = printed(monkeypatch, "bench", "serve", "--model", str(tiny_model_path), *few)
        assert status == 0
        assert "Serving benchmark" in out
        assert "\x1b" not in out

    def test_a_report(self, variable: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(*variable)
        out = Terminal()
        report = Metrics("Title", width=50)
        report.add_section("a", "A").add("key", "Label", 1)
        report.emit(out)
        assert "\x1b" not in out.getvalue()
        assert {len(line) for line in out.getvalue().splitlines()[1:]} == {50}

    def test_an_error(self, variable: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(*variable)
        status, out, err = printed(monkeypatch, "demo", "--editor", "nonsense")
        assert (status, out) == (2, "")
        assert "\x1b" not in err


class TestNarrow:
    """No line is wider than the terminal, and what does not fit is folded, not cut."""

    @pytest.fixture(autouse=True)
    def narrow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "60")

    def fits(self, out: str) -> None:
        assert max(len(line) for line in ESCAPE.sub("", out).splitlines()) <= 60
        assert "…" not in out

    def test_editors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        status, out, _ = printed(monkeypatch, "editors")
        assert status == 0
        assert "\x1b" in out
        self.fits(out)
        assert set(names()) <= set(ESCAPE.sub("", out).split())

    @pytest.mark.parametrize("name", names())
    def test_an_editor(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        status, out, _ = printed(monkeypatch, "editors", name)
        assert status == 0
        self.fits(out)

    def test_doctor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        long = "http://127.0.0.1:1/behind/a/proxy/whose/path/is/longer/than/the/terminal/is/wide"
        status, out, _ = printed(monkeypatch, "doctor", *NOBODY, "--kv-http-url", long)
        assert status == 1
        self.fits(out)
        assert long in joined(out)

    def test_compare(self, results: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        status, out, _ = printed(monkeypatch, "bench", "compare", *results)
        assert status == 0
        self.fits(out)
        assert f"B{LONG}" in joined(out)
        assert "TTFT mean" in out
        assert re.search(r"│ +1\.000 │\n.*\d to +\d", out)

    def test_compare_with_large_figures(self, results: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        result = json.loads(RESULT.read_text())
        Path(results[0]).write_text(json.dumps({**result, "total_input_tokens": 1_234_567_890}))
        status, out, _ = printed(monkeypatch, "bench", "compare", *results)
        assert status == 0
        self.fits(out)
        assert "1,234,567,890" in out


@pytest.mark.timeout(60)
def test_a_real_dumb_terminal() -> None:
    ours, theirs = pty.openpty()
    chunks: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 4096):
                chunks.append(data)
        except OSError:  # how the end of a terminal reads
            pass

    reading = threading.Thread(target=read)
    reading.start()
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": "60"}
    program = [sys.executable, "-m", "lmcache_stream.cli", "doctor", *NOBODY]
    done = subprocess.run(
        program, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment, timeout=50, check=False
    )
    os.close(theirs)
    reading.join()
    os.close(ours)
    out = b"".join(chunks).decode().replace("\r\n", "\n")
    assert done.returncode == 1
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 60
    assert "start vLLM" in out
