from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from lmcache_stream.console import JsonOutput, add_json_file, add_json_flag
from lmcache_stream.errors import UsageError


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_json_file(parser)
    return parser.parse_args(words)


def test_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    output = parse("--json").json
    with output.alone():
        sys.stdout.write("words\n")
        output.write({"café": 1})
    sys.stdout.write("more\n")
    printed = capsys.readouterr()
    document, _, more = printed.out.rpartition("}\n")
    assert json.loads(document + "}") == {"café": 1}
    assert document.isascii()  # whatever the terminal's encoding
    assert (printed.err, more) == ("words\n", "more\n")


def test_beside_the_words_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = parse("--json", str(tmp_path / "out.json")).json
    output.check()
    with output.alone():
        sys.stdout.write("words\n")
        output.write({"café": 1})
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == {"café": 1}
    assert capsys.readouterr().out == "words\n"


def test_a_file_that_cannot_be_written_is_found_first(tmp_path: Path) -> None:
    for target in (tmp_path, tmp_path / "missing" / "out.json"):
        with pytest.raises(UsageError, match="a file in a folder that exists"):
            JsonOutput(str(target)).check()


def test_a_plain_flag_takes_no_file() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    add_json_flag(parser)
    options = parser.parse_args(["--json", "a"])
    assert options.name == "a"
    assert options.json.path is None
    assert parser.parse_args(["a"]).json is None
