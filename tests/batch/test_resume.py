"""Batches that go on from their journal."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_stream.batch import AsyncBatchedStream, LMCacheBatchedStream
from lmcache_stream.batch.entries import Change
from lmcache_stream.editors import StreamingLLM
from lmcache_stream.errors import LMCacheBatchedStreamError, LMCacheStreamError, UsageError
from lmcache_stream.journal import Journal
from lmcache_stream.kvcache import AsyncKVCacheContext, aconnect, connect
from lmcache_stream.kvcache.memory import EmbeddedCache
from lmcache_stream.metrics import Metrics
from lmcache_stream.progress import PhaseProgress
from lmcache_stream.stream import AsyncLMCacheStream, LMCacheStream
from lmcache_stream.stream.state import StreamState
from lmcache_stream.testing import FakeEngine, RecordedRequest, Reply
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from tests.batch import job
from tests.engines import GEOMETRY, MODEL, AsyncCountingEngine, CountingEngine

PREFILL: dict[str, Any] = {"temperature": 0}
DECODE: dict[str, Any] = {"max_tokens": 3}


def answer(asked: Mapping[str, Any]) -> list[int]:
    """Tokens that depend on the whole prompt."""
    return [(sum(asked["prompt"]) + 7 * index) % 1000 for index in range(asked["max_tokens"])]


# Processes that end early


def done(journal: Path) -> list[dict[str, Any]]:
    """The operations in a journal, without a torn last line."""
    if not journal.exists():
        return []
    entries = [json.loads(line) for line in journal.read_text().rpartition("\n")[0].splitlines()[1:]]
    return [entry for entry in entries if entry["kind"] == "done"]


def finished(journal: Path) -> set[tuple[int, int]]:
    """Stream and step of everything that a journal says has succeeded."""
    return {(entry["stream"], entry["step"]) for entry in done(journal) if not entry.get("error")}


def step_of(request: RecordedRequest, edited: Mapping[tuple[int, ...], int]) -> tuple[int, int]:
    """Which stream's which step a request is of."""
    prompt = tuple(request.json["prompt"])
    if prompt in edited:
        return edited[prompt], 2
    return job.prompts().index(list(prompt)), 0


@pytest.mark.timeout(600)
async def test_a_program_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    chance = random.Random(7)
    journal, out = tmp_path / "batch.jsonl", tmp_path / "out.json"
    before: set[tuple[int, int]] = set()
    with FakeCacheServer(chunk_size=job.CHUNK) as server:
        server.serve(job.MODEL, job.GEOMETRY)
        reply = Reply(tokens=answer, pace=0.005)
        async with FakeEngine(model=job.MODEL, default=reply, cache=server) as engine:
            urls = (engine.base_url, server.url, server.http_url)
            unbroken = await job.run_job(*urls, None)
            assert unbroken.pop("restored") == [0, 0, 0]
            edited = {tuple(ids[: -job.OUTPUT]): index for index, ids in enumerate(unbroken["sequences"])}

            command = (sys.executable, "-m", "tests.batch.job", *urls, os.fspath(journal), os.fspath(out))
            for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None):
                before = finished(journal)
                engine.requests.clear()
                process = await asyncio.create_subprocess_exec(
                    *command,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stderr=asyncio.subprocess.DEVNULL,
                    cwd=Path(__file__).parents[2],
                )
                if number is not None:
                    at = chance.randint(3, 5)
                    await engine.until(lambda at=at: len(engine.completions) >= at, timeout=120)  # type: ignore[misc]
                    process.send_signal(number)
                status = await process.wait()
                assert out.exists() == (status == 0) == (number is None)
                assert not {step_of(request, edited) for request in engine.completions} & before
            found = json.loads(out.read_text())
            restored = found.pop("restored")
            assert found == unbroken
            assert restored == [len([stream for stream, step in before if step == phase]) for phase in range(3)]
            assert 0 < sum(restored) < 3 * job.STREAMS


# In one process


class Failing(AsyncCountingEngine):
    """Fails for the prompts whose first id is in `failing`."""

    failing: frozenset[int] = frozenset()

    async def __call__(self, ids: list[int], params: Mapping[str, Any], salt: str, /) -> AsyncIterator[Any]:  # type: ignore[override]
        if ids[0] in self.failing:
            raise RuntimeError("no")
        async for item in super().__call__(ids, params, salt):
            yield item


def half(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return kv[:, :, ::2], tokens[::2]


def batch_of(
    journal: Path, ctx: AsyncKVCacheContext, engine: CountingEngine, count: int = 4, first: int = 0, **options: Any
) -> AsyncBatchedStream:
    batch = AsyncBatchedStream(journal=journal, **{"progress": False, **options})
    batch.extend(AsyncLMCacheStream(ctx, engine, [*range(index, index + 18)]) for index in range(first, first + count))
    return batch


def results(report: Metrics) -> dict[str, Any]:
    metrics: Any = report.to_dict()["metrics"]
    found: dict[str, Any] = metrics["results"]
    return found


def look(batch: AsyncBatchedStream) -> list[Any]:
    """What can be seen of every stream, less what is of one run only."""
    return [
        (
            stream.tokens,
            stream.suffix_tokens(),
            stream.cache_salt,
            stream.output_tokens(),
            stream.output_text(),
            stream.decoded_tokens(),
            stream.is_done(),
            stream.finish_reason(),
        )
        for stream in batch
    ]


async def test_what_is_through_is_restored_and_sent_to_nobody(
    ctx: AsyncKVCacheContext, cache: EmbeddedCache, tmp_path: Path
) -> None:
    engine = AsyncCountingEngine(cache)
    first = batch_of(tmp_path / "j", ctx, engine)
    await first.prefill(PREFILL)
    metrics = [first.perf_metrics[stream.stream_id()] for stream in first]
    await first.modify(half)
    receipts = [first.receipts[stream.stream_id()] for stream in first]
    report = await first.decode(DECODE)
    assert first.restored == frozenset()

    engine.sent.clear()
    second = batch_of(tmp_path / "j", ctx, engine)
    ids = [stream.stream_id() for stream in second]
    await second.prefill(PREFILL)
    assert second.restored == set(ids)
    assert list(second.perf_metrics) == ids
    for earlier, now in zip(metrics, second.perf_metrics.values(), strict=True):
        assert (now.input_tokens, now.output_tokens) == (earlier.input_tokens, earlier.output_tokens)
        assert now.duration == pytest.approx(earlier.duration)
        assert now.times == pytest.approx(earlier.times)
        assert now.ttft == pytest.approx(earlier.ttft)
    await second.modify(half)
    assert list(second.receipts.values()) == receipts
    again = await second.decode(DECODE)
    assert engine.sent == []
    assert look(second) == look(first)
    before, after = results(report), results(again)
    assert after["output_tokens"] == before["output_tokens"] == 12
    assert after["duration"] == pytest.approx(before["duration"], rel=0.5)

    await second.modify(half)
    await second.decode(DECODE)
    assert second.restored == frozenset()
    assert len(engine.sent) == 4


async def test_a_failed_stream_is_tried_again_and_the_others_are_not(
    ctx: AsyncKVCacheContext, cache: EmbeddedCache, tmp_path: Path
) -> None:
    engine = Failing(cache)
    engine.failing = frozenset({1, 3})
    first = batch_of(tmp_path / "j", ctx, engine)
    with pytest.raises(LMCacheBatchedStreamError, match="2 streams failed"):
        await first.prefill(PREFILL)

    engine.failing = frozenset()
    engine.sent.clear()
    seen: list[PhaseProgress] = []
    second = batch_of(tmp_path / "j", ctx, engine, progress=seen.append)
    await second.prefill(PREFILL)
    assert sorted(ids[0] for ids, _, _ in engine.sent) == [1, 3]
    assert [(at.done, at.failed) for at in seen] == [(2, 0), (3, 0), (4, 0)]
    assert len(second.restored) == 2
    await second.modify(half)
    assert all(receipt.stored for receipt in second.receipts.values())


async def test_a_failure_that_a_later_phase_followed_is_told_again(
    ctx: AsyncKVCacheContext, cache: EmbeddedCache, tmp_path: Path
) -> None:
    engine = Failing(cache)
    for attempt in range(2):
        engine.failing = frozenset({1})
        batch = batch_of(tmp_path / "j", ctx, engine, on_error="collect")
        await batch.prefill(PREFILL)
        failed = batch.get_stream(next(iter(batch.failures)))
        assert list(batch.failures) == [[stream.stream_id() for stream in batch][1]]
        engine.failing = frozenset()
        await batch.decode(DECODE)
        assert batch.failures == {}
        assert len(failed.output_tokens()) == 3
        assert len(batch.restored) == 4 * attempt


async def test_what_failed_may_be_tried_with_other_parameters(
    ctx: AsyncKVCacheContext, cache: EmbeddedCache, tmp_path: Path
) -> None:
    engine = Failing(cache)
    engine.failing = frozenset(range(4))
    first = batch_of(tmp_path / "j", ctx, engine, on_error="collect")
    await first.decode(DECODE)
    assert len(first.failures) == 4
    engine.failing = frozenset()
    second = batch_of(tmp_path / "j", ctx, engine)
    await second.decode({"max_tokens": 5})
    assert [len(stream.output_tokens()) for stream in second] == [5] * 4


def test_all_of_a_streams_state_is_kept() -> None:
    kept = {*Change.__struct_fields__, "last_metrics", "last_receipt"} - {"keep", "then"}
    derived = {"tokens": "keep", "text_parts": "text", "decoded": "generated", "original_salt": "prompt"}
    assert {derived.get(each.name, each.name) for each in fields(StreamState)} <= kept | {"keep", "prompt"}


async def test_one_that_was_cancelled_in_a_phase_does_it_again(
    ctx: AsyncKVCacheContext, cache: EmbeddedCache, tmp_path: Path
) -> None:
    waiting, go = asyncio.Event(), asyncio.Event()

    class Stalling(AsyncCountingEngine):
        async def __call__(self, ids: list[int], params: Mapping[str, Any], salt: str, /) -> AsyncIterator[Any]:  # type: ignore[override]
            async for item in super().__call__(ids, params, salt):
                yield item
                if params["max_tokens"] == 3 and ids[0] == 2:
                    waiting.set()
                    await go.wait()

    engine = Stalling(cache)
    first = batch_of(tmp_path / "j", ctx, engine, max_concurrency=1)
    await first.prefill(PREFILL)
    await first.modify(half)
    task = asyncio.create_task(first.decode(DECODE))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [len(stream.output_tokens()) for stream in first] == [4, 4, 2, 1]

    go.set()
    engine.sent.clear()
    second = batch_of(tmp_path / "j", ctx, engine, max_concurrency=1)
    await second.prefill(PREFILL)
    await second.modify(half)
    await second.decode(DECODE)
    assert len(second.restored) == 2
    assert [len(stream.output_tokens()) for stream in second] == [4, 4, 4, 4]
    assert [ids[0] for ids, _, _ in engine.sent] == [2, 3]


async def test_what_the_cache_has_lost_is_done_again(tmp_path: Path) -> None:
    sent = []
    outputs = []
    for attempt in range(2):
        cache = EmbeddedCache.open(f"memory://{uuid.uuid4().hex}?chunk_size=4")
        cache.register_model(MODEL, GEOMETRY)
        engine = Failing(cache)
        async with aconnect(f"memory://{cache.name}") as ctx:
            batch = batch_of(tmp_path / "j", ctx, engine, on_error="collect")
            await batch.prefill(PREFILL)
            await batch.modify(half)
            if attempt == 0:
                engine.failing = frozenset({2})
            await batch.decode(DECODE)
            assert len(batch.failures) == (attempt == 0)
            outputs.append([len(stream.output_tokens()) for stream in batch])
        cache.unregister_model(MODEL)
        cache.close()
        sent.append([ids[0] for ids, _, _ in engine.sent])
    assert outputs == [[4, 4, 1, 4], [4, 4, 4, 4]]
    assert sent[1] == [2, 2]
    assert [entry["step"] for entry in done(tmp_path / "j")][-3:] == [0, 1, 2]


async def test_edits_while_decoding_are_restored(
    ctx: AsyncKVCacheContext, cache: EmbeddedCache, tmp_path: Path
) -> None:
    engine = AsyncCountingEngine(cache)
    seen = []
    for _ in range(2):
        batch = batch_of(tmp_path / "j", ctx, engine)
        await batch.decode({"max_tokens": 10}, edit_every=4, editor=half)
        assert len(batch.receipts) == 4
        seen.append(look(batch))
    assert seen[0] == seen[1]
    assert len(engine.sent) == 4 * 5


async def test_more_prompts_and_phases_may_follow(
    ctx: AsyncKVCacheContext, cache: EmbeddedCache, tmp_path: Path
) -> None:
    engine = AsyncCountingEngine(cache)
    await batch_of(tmp_path / "j", ctx, engine, 2).prefill(PREFILL)
    engine.sent.clear()
    batch = batch_of(tmp_path / "j", ctx, engine, 3)
    await batch.prefill(PREFILL)
    assert [ids[0] for ids, _, _ in engine.sent] == [2]
    await batch.decode(DECODE)
    third = batch_of(tmp_path / "j", ctx, engine, 3)
    await third.prefill(PREFILL)
    await third.decode(DECODE)
    assert len(third.restored) == 3


async def test_streams_may_take_part_in_different_phases(
    ctx: AsyncKVCacheContext, cache: EmbeddedCache, tmp_path: Path
) -> None:
    engine = AsyncCountingEngine(cache)
    seen = []
    for _ in range(2):
        batch = batch_of(tmp_path / "j", ctx, engine)
        ids = [stream.stream_id() for stream in batch]
        await asyncio.gather(
            batch.decode({"max_tokens": 2}, stream_ids=ids[:2]), batch.decode({"max_tokens": 5}, stream_ids=ids[2:])
        )
        await batch.decode(DECODE, stream_ids=ids[1:3])
        seen.append([len(stream.output_tokens()) for stream in batch])
    assert seen == [[2, 5, 8, 5]] * 2
    assert len(engine.sent) == 6


async def test_other_prompts_phases_and_files_are_refused(
    ctx: AsyncKVCacheContext, cache: EmbeddedCache, tmp_path: Path
) -> None:
    engine = AsyncCountingEngine(cache)
    path = tmp_path / "j"
    await batch_of(path, ctx, engine).prefill(PREFILL)
    engine.sent.clear()
    content = path.read_bytes()
    with pytest.raises(UsageError, match=r"stream 0 .* another prompt or salt than in .*j: add the same prompts"):
        await batch_of(path, ctx, engine, first=1).prefill(PREFILL)
    with pytest.raises(UsageError, match=r'operation 0 of stream 0 .* was \{"generate":.* and now it is \{"generate":'):
        await batch_of(path, ctx, engine).prefill({"temperature": 1})
    with pytest.raises(UsageError, match=r'now it is \{"modify":"StreamingLLM'):
        await batch_of(path, ctx, engine).modify(StreamingLLM(keep=4))
    assert engine.sent == []
    assert len(done(path)) == 4
    assert path.read_bytes().startswith(content)
    path.write_text("something else\n")
    with pytest.raises(UsageError, match="no journal"):
        await batch_of(path, ctx, engine).prefill(PREFILL)
    path.unlink()
    path.write_text('{"journal":1,"of":"something else"}\n')
    with pytest.raises(UsageError, match="no journal of a batch"):
        await batch_of(path, ctx, engine).prefill(PREFILL)
    assert engine.sent == []


async def test_only_one_at_a_time_runs_a_phase(ctx: AsyncKVCacheContext, cache: EmbeddedCache, tmp_path: Path) -> None:
    engine = AsyncCountingEngine(cache)
    path = tmp_path / "j"
    first = batch_of(path, ctx, engine)
    other, _ = await asyncio.to_thread(Journal.open, path, {"of": "batch"})
    with pytest.raises(UsageError, match="another process"):
        await first.prefill(PREFILL)
    await asyncio.to_thread(other.close)
    await first.prefill(PREFILL)
    second = batch_of(path, ctx, engine)
    await second.prefill(PREFILL)
    with pytest.raises(UsageError, match="somebody else has written"):
        await first.decode(DECODE)


async def test_cancelled_at_any_time_it_is_let_go_of(
    ctx: AsyncKVCacheContext, cache: EmbeddedCache, tmp_path: Path
) -> None:
    engine = AsyncCountingEngine(cache)
    for turns in itertools.count():
        batch = batch_of(tmp_path / "j", ctx, engine)
        task = asyncio.create_task(batch.prefill(PREFILL))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        journal, _ = await asyncio.to_thread(Journal.open, tmp_path / "j", {"of": "batch"})
        await asyncio.to_thread(journal.close)
        if not task.cancelled():
            break
    again = batch_of(tmp_path / "j", ctx, engine)
    await again.prefill(PREFILL)
    assert len(again.restored) == 4


@pytest.mark.parametrize("torn", [b"", b'{"journal":1,"o', b"line"])
async def test_torn_lines_cost_one_operation_at_most(
    torn: bytes, ctx: AsyncKVCacheContext, cache: EmbeddedCache, tmp_path: Path
) -> None:
    engine = AsyncCountingEngine(cache)
    path = tmp_path / "j"
    if torn != b"line":
        path.write_bytes(torn)
        await batch_of(path, ctx, engine).prefill(PREFILL)
        assert len(engine.sent) == 4
        return
    await batch_of(path, ctx, engine).prefill(PREFILL)
    path.write_bytes(path.read_bytes()[:-5])
    batch = batch_of(path, ctx, engine)
    await batch.prefill(PREFILL)
    assert len(batch.restored) == 3
    assert len(engine.sent) == 5


async def test_it_holds_no_kv_and_little_else(ctx: AsyncKVCacheContext, cache: EmbeddedCache, tmp_path: Path) -> None:
    engine = AsyncCountingEngine(cache)
    batch = AsyncBatchedStream(journal=tmp_path / "j", progress=False)
    batch.extend(AsyncLMCacheStream(ctx, engine, [number] * 1000) for number in range(3))
    await batch.prefill(PREFILL)
    after_prefill = (tmp_path / "j").stat().st_size
    assert after_prefill < 3 * 1000
    await batch.modify(lambda kv, tokens: (kv[:, :, :100], tokens[:100]))
    await batch.decode({"max_tokens": 100})
    assert (tmp_path / "j").stat().st_size < 3 * (2000 + 100 * 60)


async def test_a_journal_that_cannot_be_written_is_an_error_that_costs_no_result(
    ctx: AsyncKVCacheContext, cache: EmbeddedCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AsyncCountingEngine(cache)
    batch = batch_of(tmp_path / "j", ctx, engine)
    await batch.prefill(PREFILL)

    def full(self: Journal, entry: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", full)
        with pytest.raises(OSError, match="No space"):
            await batch.prefill(PREFILL)
    assert len(batch.perf_metrics) == 4
    again = batch_of(tmp_path / "j", ctx, engine)
    await again.prefill(PREFILL)
    assert len(again.restored) == 4


async def test_what_the_cache_has_lost_and_cannot_be_done_again_is_a_failure(
    ctx: AsyncKVCacheContext, cache: EmbeddedCache, tmp_path: Path
) -> None:
    engine = Failing(cache)
    first = batch_of(tmp_path / "j", ctx, engine, 1)
    await first.prefill(PREFILL)
    await first.modify(half)
    cache.clear()
    engine.failing = frozenset({0})
    second = batch_of(tmp_path / "j", ctx, engine, 1)
    await second.prefill(PREFILL)
    await second.modify(half)
    with pytest.raises(LMCacheBatchedStreamError) as caught:
        await second.decode(DECODE)
    assert isinstance(next(iter(caught.value.failures.values())), LMCacheStreamError)

    engine.failing = frozenset()
    engine.sent.clear()
    third = batch_of(tmp_path / "j", ctx, engine, 1)
    await third.prefill(PREFILL)
    await third.modify(half)
    assert engine.sent == []
    await third.decode(DECODE)
    assert [len(ids) for ids, _, _ in engine.sent] == [18, 11]


def test_the_sync_face_goes_on_as_well(cache: EmbeddedCache, tmp_path: Path) -> None:
    engine = CountingEngine(cache)
    seen = []
    with connect(f"memory://{cache.name}") as ctx:
        for attempt in range(2):
            batch = LMCacheBatchedStream(progress=False, journal=tmp_path / "j")
            batch.extend(LMCacheStream(ctx, engine, [*range(index, index + 18)]) for index in range(3))
            batch.prefill(PREFILL)
            batch.modify(half)
            batch.decode(DECODE)
            assert len(batch.restored) == 3 * attempt
            seen.append([(stream.tokens, stream.output_text(), stream.done) for stream in batch])
    assert seen[0] == seen[1]
    assert len(engine.sent) == 6
