"""`bench serve` against a cache server and an engine on real sockets."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lmcache_stream.errors import UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from tests.bench.offloading import CHUNK, OffloadingEngine
from tests.bench.test_serve import bench, counts, runs, totals

PROMPTS = 6
PROGRAM = """
import json, sys
from lmcache_stream.bench.serve import bench_serve
bench_serve(environ={}, **json.loads(sys.argv[1]))
"""


@pytest.fixture
def at(offloading_engine: OffloadingEngine, cache_server: FakeCacheServer) -> dict[str, Any]:
    return {
        "base_url": offloading_engine.base_url,
        "kv_url": cache_server.url,
        "kv_http_url": cache_server.http_url,
        "num_prompts": PROMPTS,
        "random_input_len": 70,
        "random_output_len": 12,
        "random_range_ratio": 0.3,
        "max_concurrency": 2,
        "modify_concurrency": 1,
        "temperature": 0.0,
        "editor": ["keydiff"],
        "keep": 32,
        "compare_baseline": True,
        "save_detailed": True,
    }


def killed_at(entries: int, options: dict[str, Any], journal: Path) -> int:
    """Run in a process that is killed once the journal has so many entries; how many it has then."""
    said = journal.with_name("stderr")
    with said.open("w") as file:
        victim = subprocess.Popen([sys.executable, "-c", PROGRAM, json.dumps(options)], stderr=file)
    try:
        waiting = threading.Event()
        while lines(journal) < 1 + entries and victim.poll() is None:
            waiting.wait(0.002)
        assert victim.poll() is None, f"the run ended before it could be killed: {said.read_text()}"
    finally:
        victim.kill()
        victim.wait()
    return lines(journal) - 1


def lines(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


@pytest.mark.parametrize(
    ("rounds", "moments"), [({}, (2, 9, 15, 24)), ({"edit_every": 4}, (8, 23))], ids=["one edit", "edits on the way"]
)
def test_killed_again_and_again_the_totals_are_those_of_an_unbroken_run(
    rounds: dict[str, int], moments: tuple[int, ...], at: dict[str, Any], cache_server: FakeCacheServer, tmp_path: Path
) -> None:
    at |= rounds
    whole = bench(**at)
    assert (whole["completed"], whole["failed"]) == (PROMPTS, 0), whole["errors"]
    assert whole["lmcache_stream"]["edit_taken_ratio"] == 1.0
    journal = tmp_path / "x.journal.jsonl"
    fresh = {"save_result": True, "result_dir": str(tmp_path), "result_filename": "x.json"}
    for entries in moments:
        there = killed_at(entries, {**at, **(fresh if not lines(journal) else {"resume": str(journal)})}, journal)
        assert entries <= there
    result = bench(**at, resume=journal)
    assert totals(result) == totals(whole)
    assert list(map(counts, runs(result))) == list(map(counts, runs(whole)))
    assert result["lmcache_stream"]["resumed"] > 0
    assert cache_server.wrong_publications == 0


def test_nothing_is_done_twice(at: dict[str, Any], offloading_engine: OffloadingEngine, tmp_path: Path) -> None:
    whole = bench(**at, save_result=True, result_dir=tmp_path, result_filename="x.json")
    asked = len(offloading_engine.completions)
    result = bench(**at, resume=tmp_path / "x.journal.jsonl")
    assert totals(result) == totals(whole)
    assert len(offloading_engine.completions) - asked == 1  # the probe
    assert result["lmcache_stream"]["repeated"] == 0


def test_a_cache_that_lost_everything(
    at: dict[str, Any], cache_server: FakeCacheServer, offloading_engine: OffloadingEngine, tmp_path: Path
) -> None:
    whole = bench(**at, save_result=True, result_dir=tmp_path, result_filename="x.json")
    journal = tmp_path / "x.journal.jsonl"
    content = journal.read_bytes().splitlines(keepends=True)
    edited = next(number for number, line in enumerate(content) if b'"kind":"edit"' in line)
    journal.write_bytes(b"".join(content[: edited + 2]))
    cache_server.evict(cache_server.chunks)
    result = bench(**at, resume=journal)
    assert totals(result) == totals(whole)
    assert result["lmcache_stream"]["repeated"] > 0


def test_every_edit_that_the_engine_did_not_take_is_counted_once(
    at: dict[str, Any], offloading_engine: OffloadingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    at |= {"edit_every": 4, "random_range_ratio": 0.0}
    covered = offloading_engine._covered
    assert runs(bench(**at))[0]["edit_taken_ratio"] == 1.0
    monkeypatch.setattr(offloading_engine, "_covered", lambda ids, salt: 0 if "~" in salt else covered(ids, salt))
    ours = runs(bench(**at))[0]
    # One edit of each prompt, and after 4 and 8 of its 12 tokens: 32 tokens each, none of which was taken.
    assert ours["edits_while_decoding"]["completed"] == PROMPTS * 2
    stored = PROMPTS * 32 + CHUNK * ours["edits_while_decoding"]["chunks_stored"]
    assert ours["phases"]["decode"]["edit_shortfall"] == stored
    assert ours["edit_taken_ratio"] == 0.0


class TestModelName:
    def test_a_cache_that_knows_several_models_is_told_which(
        self, at: dict[str, Any], cache_server: FakeCacheServer, small_model: Path, tmp_path: Path
    ) -> None:
        cache_server.serve("another/model", KVGeometry(num_layers=3, num_kv_heads=1, head_dim=8, block_size=CHUNK))
        with pytest.raises(UsageError, match=r"which model.*'another/model'; give --kv-model"):
            bench(**at)
        with pytest.raises(UsageError, match="no engine has registered the model 'a third'"):
            bench(**at, kv_model="a third")
        assert bench(**at, kv_model=str(small_model))["completed"] == PROMPTS
