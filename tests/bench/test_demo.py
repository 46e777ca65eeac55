from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from lmcache_stream.bench import demo
from lmcache_stream.errors import LMCacheError, UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from tests.bench.offloading import CHUNK, OffloadingEngine

WORDS = "The harbour of Vell has nine lamps, and Orla lights them. "


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"context": WORDS * 6, "question": "Who?", "answer": "Orla"}, {"prompt": WORDS * 8}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments: object) -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    demo.run(parser.parse_args([str(argument) for argument in arguments]))


def test_two_prompts_on_the_embedded_engine(
    tiny_model_path: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    run("--model", tiny_model_path, "--prompts", prompts, "--max-tokens", 4, "--json", out)
    report = json.loads(out.read_text())
    assert [answer["question"] for answer in report["answers"]] == ["Who?", (WORDS * 8).strip()]
    for answer in report["answers"]:
        assert answer["tokens_after"] == pytest.approx(answer["tokens_before"] / 2, abs=32)
    assert report["decode"]["metrics"]["results"]["output_tokens"] == 8
    printed = capsys.readouterr().out
    assert "of 1 with all of the KV" in printed


@pytest.mark.parametrize(
    ("editor", "kept"), [("quantize", 1.0), ("keydiff:keep=0.25,scope=head", 0.25), ("merge:keep=0.25", 0.25)]
)
def test_an_editor_with_its_own_parameters(
    editor: str, kept: float, tiny_model_path: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    run("--model", tiny_model_path, "--prompts", prompts, "--max-tokens", 2, "--json", out, "--editor", editor)
    for answer in json.loads(out.read_text())["answers"]:
        assert answer["tokens_after"] == pytest.approx(answer["tokens_before"] * kept, abs=16)


def test_no_line_is_wider_than_the_terminal(
    tiny_model_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    run("--model", tiny_model_path, "--prompts", prompts, "--max-tokens", 2)
    assert max(map(len, capsys.readouterr().out.splitlines())) == 60


class TestServers:
    @pytest.fixture
    def at(self, offloading_engine: OffloadingEngine, cache_server: FakeCacheServer, prompts: Path) -> list[Any]:
        urls = [
            "--base-url",
            offloading_engine.base_url,
            "--kv-url",
            cache_server.url,
            "--kv-http-url",
            cache_server.http_url,
        ]
        return [*urls, "--prompts", prompts, "--max-tokens", 4]

    def test_the_same_with_servers(self, at: list[Any], offloading_engine: OffloadingEngine, tmp_path: Path) -> None:
        run(*at, "--json", tmp_path / "out.json")
        report = json.loads((tmp_path / "out.json").read_text())
        assert report["decode"]["metrics"]["results"]["output_tokens"] == 8
        assert report["decode"]["metrics"]["cache"]["edit_shortfall"] == 0
        assert all(answer["tokens_after"] % CHUNK == 0 for answer in report["answers"])

    def test_a_cache_that_knows_several_models(
        self, at: list[Any], cache_server: FakeCacheServer, small_model: Path
    ) -> None:
        cache_server.serve("another/model", KVGeometry(num_layers=3, num_kv_heads=1, head_dim=8, block_size=CHUNK))
        with pytest.raises(LMCacheError, match="which model"):
            run(*at)
        run(*at, "--kv-model", small_model)

    def test_queries_are_not_offloaded(self, at: list[Any]) -> None:
        with pytest.raises(UsageError, match="snapkv needs the prompts' queries"):
            run(*at, "--editor", "snapkv")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--base-url", "http://127.0.0.1:9"], "go together"),
        (["--kv-model", "x"], "go together"),
        (
            ["--base-url", "http://h", "--kv-url", "tcp://u:p@h:1", "--kv-http-url", "http://h"],
            "--kv-url holds credentials",
        ),
        (["--model", "/none"], "is no folder"),
        (["--prompts", "/none"], "cannot read prompts from /none"),
        (["--json", "/none/x.json"], "--json takes a file"),
        (["--editor", "nothing"], "no editor is called 'nothing'"),
        (["--editor", "keydiff:scope"], "not of the form NAME:KEY=VALUE"),
        (["--editor", "keydiff:scop=head"], "keydiff has no parameter scop"),
    ],
)
def test_what_cannot_be_right_is_said_before_the_work(arguments: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(*arguments)


def test_prompts_shorter_than_a_chunk(tiny_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text('{"prompt": "short"}\n')
    with pytest.raises(UsageError, match=r"prompt 1 has .* tokens, and KV is cached in chunks"):
        run("--model", tiny_model_path, "--prompts", path)
