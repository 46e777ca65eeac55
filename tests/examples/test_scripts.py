from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

import lmcache_stream.bench.prompts
from lmcache_stream.bench.prompts import Prompt
from lmcache_stream.editors import registry
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from tests.bench.conftest import cache_server, offloading_engine, small_model  # noqa: F401  (fixtures)
from tests.bench.offloading import OffloadingEngine

TOKENS = re.compile(r"(\d+) of (\d+) tokens")
CONTEXT = "kora mila tenu. " * 60
PROMPTS = [{"context": CONTEXT, "question": f"lisa dogu {number}?"} for number in range(3)]


class Script:
    """Runs an example as `python NAME.py ...` does, in this process."""

    def __init__(self, folder: Path, model: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]):
        self._folder, self._model, self._patch, self._capture = folder, model, patch, capture

    def __call__(self, name: str, *arguments: str | Path) -> str:
        path = self._folder / f"{name}.py"
        self._patch.setattr(sys, "argv", [str(path), "--model", str(self._model), *map(str, arguments)])
        runpy.run_path(str(path), run_name="__main__")
        said = self._capture.readouterr()
        assert said.err == ""
        return said.out


@pytest.fixture
def script(
    examples: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Script:
    short = [Prompt(f"{CONTEXT}{number}?", f"{number}?") for number in range(6)]
    monkeypatch.setattr(lmcache_stream.bench.prompts, "shipped_prompts", lambda: short)
    monkeypatch.setattr(registry, "_EDITORS", dict(registry._EDITORS))
    return Script(examples, tiny_model_path, monkeypatch, capsys)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [*PROMPTS, {"prompt": "short"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.mark.parametrize("name", ["sync_example", "async_example"])
def test_token_dropping_prints_its_answer_and_the_three_tables(name: str, script: Script) -> None:
    said = script(f"token_dropping/{name}")
    positions = [said.index(part) for part in ("tokens of KV", "Prefill", "Modify", "Decode")]
    assert positions == sorted(positions)


def test_custom_editor_keeps_half_in_both_ways(script: Script) -> None:
    said = script("custom_editor")
    shares = [int(after) / int(before) for after, before in TOKENS.findall(said)]
    assert shares == pytest.approx([0.5, 0.5], abs=0.05)
    assert re.findall(r"^(value-norm|forget_the_end),", said, re.MULTILINE) == ["value-norm", "forget_the_end"]


def test_reasoning_budget_bounds_the_kv(script: Script) -> None:
    said = script("reasoning_budget", "--budget", "64", "--every", "48", "--max-tokens", "150")
    kept = re.findall(r"\[(\d+) tokens of KV, (\d+) kept\]", said)
    assert len(kept) == 3
    assert {after for _, after in kept} == {"64"}
    assert "150 tokens decoded" in said


def test_compare_editors_draws_each_and_their_attention(script: Script, tmp_path: Path) -> None:
    out = tmp_path / "kept.svg"
    said = script("compare_editors", "--editor", "knorm", "--editor", "snapkv", "--plot", out)
    assert re.findall(r"^([\w ]+): ", said, re.MULTILINE) == ["all KV", "knorm", "snapkv", "drawn"]
    assert out.read_text().count("<image") == 2


def test_batch_many_prompts_keeps_what_succeeds(script: Script, prompts: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "answers.jsonl", tmp_path / "batch.png"
    said = script("batch_many_prompts", "--prompts", prompts, "--out", out, "--max-tokens", "8", "--plot", plot)
    assert "3 of 4 prompts answered" in said
    *answered, failed = map(json.loads, out.read_text().splitlines())
    assert [line["question"] for line in answered] == [prompt["question"] for prompt in PROMPTS]
    assert all(0 < line["tokens_after"] < line["tokens_before"] for line in answered)
    assert "less than one chunk" in failed["error"]
    assert plot.stat().st_size > 10_000


def test_batch_many_prompts_runs_on_servers(
    script: Script,
    prompts: Path,
    tmp_path: Path,
    cache_server: FakeCacheServer,  # noqa: F811
    offloading_engine: OffloadingEngine,  # noqa: F811
) -> None:
    urls = ["--base-url", offloading_engine.base_url, "--kv-url", cache_server.url]
    urls += ["--kv-http-url", cache_server.http_url]
    said = script("batch_many_prompts", "--prompts", prompts, "--out", tmp_path / "out", "--max-tokens", "4", *urls)
    assert "3 of 4 prompts answered" in said


def test_addresses_go_together(script: Script) -> None:
    with pytest.raises(SystemExit, match="give all three, or none"):
        script("custom_editor", "--base-url", "http://127.0.0.1:9")


@pytest.mark.parametrize("name", ["batch_many_prompts", "compare_editors", "custom_editor"])
def test_what_was_asked_for_wrongly_ends_a_script_with_a_line(name: str, script: Script) -> None:
    with pytest.raises(SystemExit, match="keep"):
        script(name, "--keep", "7.5")
