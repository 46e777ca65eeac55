from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache_stream.testing import FakeEngine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def vs_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("vs_threads")


def run(*arguments: object) -> tuple[str, dict[str, Any]]:
    command = [sys.executable, str(BENCHMARKS / "vs_threads.py"), "--repeats", "1", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


def test_every_client_gets_every_token(tmp_path: Path) -> None:
    out, summary = run(
        "--streams", 1, "--streams", 3, "--tokens", 4, "--paced-tokens", 2, "--json", tmp_path / "out.json"
    )
    assert set(summary) == {"fast", "paced"}
    assert set(summary["fast"]["requests"]) == {"1", "3"}
    assert summary["fast"]["requests"]["3"]["wall_x_ours"] > 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["fast"] == summary["fast"]
    assert {(row["mode"], row["streams"]) for row in written["rows"]} == {
        (mode, streams) for mode in ("fast", "paced") for streams in (1, 3)
    }
    assert written["machine"]["cores"] >= 1
    assert "ours" in out
    if importlib.util.find_spec("httpx") is None:
        assert "httpx, threads: left out, httpx is not installed" in out


def test_a_running_engine() -> None:
    with FakeEngine(model="m") as engine:
        out, summary = run("--streams", 2, "--tokens", 3, "--base-url", engine.base_url)
        asked = [request.json for request in engine.completions]
    assert set(summary) == {"real"}
    assert f"the engine at {engine.base_url} serves m" in out
    assert {(one["model"], one["max_tokens"]) for one in asked} == {("m", 3)}
    assert len(asked) == 2 * (1 + len(summary["real"]))


def test_tokens_of_an_event(vs_threads: Any) -> None:
    line = b'data: {"choices": [{"text": "ab", "token_ids": [5, 6]}]}'
    assert [event.token_id for event in vs_threads.events_of(line)] == [5, 6]
    assert list(vs_threads.events_of(b"data: [DONE]")) == []
    assert list(vs_threads.events_of(b"")) == []
