from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, TypeAlias

import pytest

from lmcache_stream import portal
from lmcache_stream.serving import doctor
from lmcache_stream.serving.doctor.diagnosis import CHECKS
from lmcache_stream.testing import FakeEngine, Reply
from tests.serving.doctor.stack import stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = "sk-very-secret-1234"

Doctor: TypeAlias = "Callable[..., tuple[int, str]]"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Doctor:
    def call(*arguments: str) -> tuple[int, str]:
        parser = argparse.ArgumentParser()
        doctor.add_arguments(parser)
        status = doctor.run(parser.parse_args(arguments))
        printed = capsys.readouterr()
        assert printed.err == ""
        return status, printed.out

    return call


@pytest.fixture
def arguments(model: str) -> Iterator[list[str]]:
    """A whole stack behind the command, on the background loop."""
    held = stack(model)
    options, _ = portal.run(held.__aenter__)
    yield ["--base-url", options.base_url, "--kv-url", options.kv_url, "--kv-http-url", options.kv_http_url]
    portal.run(held.__aexit__, None, None, None)


def test_prints_a_table_and_exits_with_0(command: Doctor, arguments: list[str]) -> None:
    status, out = command(*arguments, "--timeout", "20")
    assert status == 0
    for check in CHECKS:
        assert f" {check.name} " in out
    assert f"{len(CHECKS)} pass\n" in out


def test_prints_one_json_document(command: Doctor, arguments: list[str]) -> None:
    status, out = command(*arguments, "--json", "--no-probe")
    said = json.loads(out)
    assert status == 0
    assert said["ok"] is True
    assert said["base_url"] == arguments[1]
    assert [finding["name"] for finding in said["findings"]] == [check.name for check in CHECKS]
    assert {finding["status"] for finding in said["findings"]} == {"pass", "skip"}


def test_a_failure_is_told_in_words_on_a_narrow_terminal(
    command: Doctor, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    status, out = command(*arguments, "--kv-model", "nobody/" + "x" * 100)
    assert status == 1
    assert max(map(len, out.splitlines())) <= 60
    assert "\x1b" not in out
    words = " ".join(out.replace("│", " ").split())
    assert "registration fail no engine has registered" in words
    assert "To change: give --kv-model" in words
    assert "geometry skip needs: registration" in words
    assert " 1 fail" in out.splitlines()[-1]
    status, out = command(*arguments, "--kv-model", "nobody", "--json")
    assert status == 1
    assert json.loads(out)["ok"] is False


def test_takes_urls_from_the_environment(
    command: Doctor, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("LMCACHE_STREAM_BASE_URL", "LMCACHE_STREAM_KV_URL", "LMCACHE_STREAM_KV_HTTP_URL")
    for name, value in zip(names, arguments[1::2], strict=True):
        monkeypatch.setenv(name, value)
    status, out = command("--json", "--no-probe")
    assert status == 0
    assert json.loads(out)["kv_url"] == arguments[3]


def test_wants_all_three_urls(command: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command("--base-url", "http://localhost:8000")
    assert "--kv-url" in capsys.readouterr().err


@pytest.mark.parametrize("json_", [True, False])
def test_never_prints_the_key(
    command: Doctor, arguments: list[str], json_: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with FakeEngine() as engine:
        echo = f"Bearer {KEY} is no key of ours".encode()
        engine.script(Reply(status=500, body=echo), path="/health")
        engine.script(Reply(status=401, body=echo), path="/v1/models")
        for _ in range(2):
            given = [*arguments, "--base-url", engine.base_url, "--api-key", KEY]
            status, out = command(*given, *(["--json"] if json_ else []))
            assert status == 1
            assert KEY not in out
            assert "*** is no key of ours" in out
        assert {request.headers.get("authorization") for request in engine.requests} == {f"Bearer {KEY}"}


def test_the_key_is_not_given_to_the_cache_server(command: Doctor, arguments: list[str]) -> None:
    with FakeEngine() as other:
        command(*arguments, "--kv-http-url", other.base_url, "--api-key", KEY, "--json")
        assert other.requests
        assert not any(KEY in str(request.headers) for request in other.requests)
