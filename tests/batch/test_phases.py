from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator, Generator, Mapping
from typing import Any

import pytest
import torch

from lmcache_stream.batch import AsyncBatchedStream, LMCacheBatchedStream
from lmcache_stream.errors import (
    CoverageTimeout,
    LMCacheBatchedStreamError,
    LMCacheStreamError,
    StreamTimeout,
    UsageError,
)
from lmcache_stream.kvcache import AsyncKVCacheContext, connect
from lmcache_stream.kvcache.memory import EmbeddedCache
from lmcache_stream.progress import PhaseProgress
from lmcache_stream.stream import AsyncLMCacheStream, LMCacheStream
from lmcache_stream.types import Completion, TokenEvent
from tests.engines import AsyncCountingEngine, CountingEngine

PREFILL: dict[str, Any] = {"temperature": 0}


def fill(batch: AsyncBatchedStream, ctx: AsyncKVCacheContext, engine: CountingEngine, count: int) -> list[str]:
    batch.extend(AsyncLMCacheStream(ctx, engine, [*range(index, index + 18)]) for index in range(count))
    return [stream.stream_id() for stream in batch]


def half(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return kv[:, :, ::2], tokens[::2]


def section(metrics: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = metrics.to_dict()["metrics"][name]
    return found


async def test_the_documented_phases(ctx: AsyncKVCacheContext, cache: EmbeddedCache) -> None:
    engine = AsyncCountingEngine(cache)
    batch = AsyncBatchedStream(progress=False)
    ids = fill(batch, ctx, engine, 5)

    prefill = await batch.prefill({"temperature": 1.0, "max_tokens": 77, "min_tokens": 8})
    assert [sent[1] for sent in engine.sent] == [{"temperature": 1.0, "max_tokens": 1}] * 5
    assert section(prefill, "config") == {"num_streams": 5}
    results = section(prefill, "results")
    assert results["input_tokens"] == 90
    assert results["input_tput"] == pytest.approx(90 / results["duration"])

    modify = await batch.modify(half)
    assert section(modify, "results").keys() == {"duration"}
    assert set(batch.receipts) == set(ids)

    decode = await batch.decode({"max_tokens": 3})
    results = section(decode, "results")
    assert results["output_tokens"] == 15
    assert results["output_tput"] == pytest.approx(15 / results["duration"])
    assert set(batch.perf_metrics) == set(ids)
    for index, stream in enumerate(batch):
        assert stream.decoded_tokens() == 4
        assert stream.tokens[:8] == list(range(index, index + 16, 2))


async def test_a_subset_is_counted_and_run_alone(ctx: AsyncKVCacheContext, cache: EmbeddedCache) -> None:
    engine = AsyncCountingEngine(cache)
    batch = AsyncBatchedStream(progress=False)
    ids = fill(batch, ctx, engine, 5)
    report = await batch.prefill(PREFILL, stream_ids=ids[:2])
    assert section(report, "config")["num_streams"] == 2
    assert section(report, "results")["input_tokens"] == 36
    assert len(engine.sent) == 2
    assert set(batch.perf_metrics) == set(ids[:2])


async def test_lower_level_pieces(ctx: AsyncKVCacheContext, cache: EmbeddedCache) -> None:
    batch = AsyncBatchedStream(progress=False)
    ids = fill(batch, ctx, AsyncCountingEngine(cache), 3)
    assert await batch.run_streams({"max_tokens": 1}) > 0
    assert await batch.modify_stream(half, ids[:1]) > 0
    assert set(batch.receipts) == {ids[0]}
    report = batch.get_perf_metrics(2.0, "json", 80, "decode", ids[1:])
    assert section(report, "results") == {"duration": 2.0, "output_tokens": 2, "output_tput": 1.0}
    assert section(report, "config") == {"num_streams": 2}
    with pytest.raises(LMCacheBatchedStreamError, match="mode"):
        batch.get_perf_metrics(1.0, "json", 80, "modify")


async def test_an_empty_batch_takes_no_time() -> None:
    batch = AsyncBatchedStream(progress=False)
    assert await batch.run_streams({}) == 0.0
    assert section(await batch.prefill({}), "results") == {"duration": 0.0, "input_tokens": 0, "input_tput": 0.0}
    assert section(await batch.modify(half), "results") == {"duration": 0.0}


async def test_unknown_and_doubled_streams(ctx: AsyncKVCacheContext, cache: EmbeddedCache) -> None:
    engine = AsyncCountingEngine(cache)
    batch = AsyncBatchedStream(progress=False)
    ids = fill(batch, ctx, engine, 1)
    assert batch.get_stream(ids[0]).stream_id() == ids[0]
    assert ids[0] in batch
    assert len(batch) == 1
    with pytest.raises(LMCacheBatchedStreamError, match="already"):
        batch.add(batch.get_stream(ids[0]))
    for call in (
        lambda: batch.prefill(PREFILL, stream_ids=["nope"]),
        lambda: batch.run_streams(PREFILL, ["nope"]),
        lambda: batch.modify(half, stream_ids=[ids[0], "nope"]),
    ):
        with pytest.raises(LMCacheBatchedStreamError, match="no stream 'nope'"):
            await call()
    with pytest.raises(LMCacheBatchedStreamError, match="no stream 'nope'"):
        batch.get_stream("nope")
    with pytest.raises(UsageError, match="sequence of ids"):
        await batch.prefill(PREFILL, stream_ids=ids[0])
    assert engine.sent == []


async def test_a_bad_format_is_refused_before_any_work(ctx: AsyncKVCacheContext, cache: EmbeddedCache) -> None:
    engine = AsyncCountingEngine(cache)
    batch = AsyncBatchedStream(progress=False)
    fill(batch, ctx, engine, 1)
    with pytest.raises(UsageError, match="fmt"):
        await batch.prefill(PREFILL, fmt="yaml")
    with pytest.raises(UsageError, match="fmt"):
        await batch.modify(half, "yaml")
    with pytest.raises(UsageError, match="fmt"):
        await batch.decode(PREFILL, "yaml")
    with pytest.raises(UsageError, match="mapping"):
        await batch.prefill(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="an edit is an Editor"):
        await batch.modify(None)  # type: ignore[arg-type]
    assert engine.sent == []


class Picky(AsyncCountingEngine):
    """Fails for prompts that begin with 2."""

    async def __call__(  # type: ignore[override]
        self, ids: list[int], params: Mapping[str, Any], salt: str, /
    ) -> AsyncIterator[TokenEvent | Completion]:
        if ids[0] == 2:
            raise RuntimeError("not this one")
        async for item in super().__call__(ids, params, salt):
            yield item


async def test_what_succeeded_keeps_its_metrics(ctx: AsyncKVCacheContext, cache: EmbeddedCache) -> None:
    batch = AsyncBatchedStream(progress=False)
    ids = fill(batch, ctx, Picky(cache), 4)
    with pytest.raises(LMCacheBatchedStreamError, match="1 streams failed") as caught:
        await batch.prefill(PREFILL)
    assert list(caught.value.failures) == [ids[2]]
    assert isinstance(caught.value.failures[ids[2]], LMCacheStreamError)
    assert caught.value.metrics is not None
    assert section(caught.value.metrics, "results")["input_tokens"] == 54
    assert section(caught.value.metrics, "config")["num_streams"] == 4
    assert set(batch.perf_metrics) == {*ids} - {ids[2]}
    with pytest.raises(LMCacheBatchedStreamError):
        await batch.run_streams({"max_tokens": 1})


async def test_failures_can_be_collected(ctx: AsyncKVCacheContext, cache: EmbeddedCache) -> None:
    batch = AsyncBatchedStream(progress=False, on_error="collect")
    ids = fill(batch, ctx, Picky(cache), 4)
    report = await batch.prefill(PREFILL)
    failures = section(report, "failures")
    assert failures["count"] == 1
    assert "not this one" in failures[ids[2]]

    def fail(kv: torch.Tensor, tokens: list[int]) -> Any:
        raise KeyError("mine")

    good = [stream_id for stream_id in ids if stream_id != ids[2]]
    report = await batch.modify(fail, stream_ids=good)
    assert section(report, "failures")["count"] == 3
    assert batch.receipts == {}
    assert {type(error) for error in batch.failures.values()} == {KeyError}


class Gauge:
    """How many streams are inside at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.all_in = asyncio.Event()
        self.wait_for = 0

    async def __aenter__(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now >= self.wait_for:
            self.all_in.set()

    async def __aexit__(self, *_: object) -> None:
        self.now -= 1

    async def edit(self, kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        async with self:
            await self.all_in.wait()
            return kv, tokens


class Gauged(AsyncCountingEngine):
    def __init__(self, cache: EmbeddedCache, gauge: Gauge) -> None:
        super().__init__(cache)
        self.gauge = gauge

    async def __call__(  # type: ignore[override]
        self, ids: list[int], params: Mapping[str, Any], salt: str, /
    ) -> AsyncIterator[TokenEvent | Completion]:
        async with self.gauge:
            await self.gauge.all_in.wait()
            async for item in super().__call__(ids, params, salt):
                yield item


async def test_phases_are_bounded_as_documented(ctx: AsyncKVCacheContext, cache: EmbeddedCache) -> None:
    gauge = Gauge()

    batch = AsyncBatchedStream(progress=False)
    fill(batch, ctx, Gauged(cache, gauge), 20)
    gauge.wait_for = 20
    await batch.prefill(PREFILL)
    assert gauge.most == 20

    for bound, expected in ((None, 4), (7, 7)):
        gauge.most, gauge.wait_for = 0, expected
        gauge.all_in.clear()
        await batch.modify(gauge.edit, max_concurrency=bound)
        assert gauge.most == expected

    gauge.most, gauge.wait_for = 0, 3
    gauge.all_in.clear()
    await batch.decode({"max_tokens": 2}, max_concurrency=3)
    assert gauge.most == 3
    with pytest.raises(UsageError, match="max_concurrency"):
        await batch.prefill(PREFILL, max_concurrency=-1)


async def test_decoding_with_edits_edits_every_stream_but_few_at_once(
    ctx: AsyncKVCacheContext, cache: EmbeddedCache
) -> None:
    gauge = Gauge()
    gauge.wait_for = 4

    async def gauged_half(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        async with gauge:
            await gauge.all_in.wait()
            return half(kv, tokens)

    batch = AsyncBatchedStream(progress=False)
    ids = fill(batch, ctx, AsyncCountingEngine(cache), 9)
    report = await batch.decode({"max_tokens": 10}, edit_every=4, editor=gauged_half)
    assert gauge.most == 4
    assert section(report, "results")["output_tokens"] == 90
    assert set(batch.receipts) == set(ids)
    with pytest.raises(UsageError, match="edit_every"):
        await batch.decode({"max_tokens": 10}, edit_every=4)


async def test_cancelling_a_phase_cancels_every_stream(ctx: AsyncKVCacheContext, cache: EmbeddedCache) -> None:
    started, ended = 0, 0
    all_started = asyncio.Event()

    async def stalling(ids: list[int], params: Mapping[str, Any], salt: str) -> AsyncIterator[TokenEvent | Completion]:
        nonlocal started, ended
        started += 1
        if started == 6:
            all_started.set()
        try:
            yield TokenEvent(5)
            await asyncio.Event().wait()
        finally:
            ended += 1

    batch = AsyncBatchedStream(progress=False)
    batch.extend(AsyncLMCacheStream(ctx, stalling, [index]) for index in range(6))
    task = asyncio.create_task(batch.decode({"max_tokens": 3}))
    await all_started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (started, ended) == (6, 6)
    await asyncio.sleep(0)
    for stream in batch:
        assert stream.output_tokens() in ([], [5])


async def test_progress_tells_every_stream(ctx: AsyncKVCacheContext, cache: EmbeddedCache) -> None:
    seen: list[PhaseProgress] = []
    batch = AsyncBatchedStream(progress=seen.append, on_error="collect")
    fill(batch, ctx, Picky(cache), 4)
    await batch.prefill(PREFILL)
    assert [at.done for at in seen] == [1, 2, 3, 4]
    assert seen[-1] == PhaseProgress("prefill", 4, 4, 1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_a_progress_callback_that_fails_costs_no_result(
    ctx: AsyncKVCacheContext, cache: EmbeddedCache, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(at: PhaseProgress) -> None:
        raise KeyError("mine")

    batch = AsyncBatchedStream(progress=fail)
    ids = fill(batch, ctx, AsyncCountingEngine(cache), 3)
    await batch.prefill(PREFILL)
    assert set(batch.perf_metrics) == set(ids)
    assert [record.message for record in caplog.records] == [
        "the progress callback failed and is not called again in this phase"
    ]


async def test_the_batchs_own_bound_holds_in_every_phase(ctx: AsyncKVCacheContext, cache: EmbeddedCache) -> None:
    gauge = Gauge()
    gauge.wait_for = 2

    batch = AsyncBatchedStream(progress=False, max_concurrency=2)
    fill(batch, ctx, Gauged(cache, gauge), 8)
    await batch.prefill(PREFILL)
    assert gauge.most == 2
    gauge.most = 0
    gauge.all_in.clear()
    await batch.modify(gauge.edit)
    assert gauge.most == 2
    gauge.most = 0
    gauge.all_in.clear()
    await batch.decode({"max_tokens": 2})
    assert gauge.most == 2
    with pytest.raises(UsageError, match="max_concurrency"):
        await batch.prefill(PREFILL, max_concurrency=0)


async def test_timeouts_reach_every_stream(ctx: AsyncKVCacheContext, cache: EmbeddedCache) -> None:
    async def stalling(ids: list[int], params: Any, salt: str) -> AsyncIterator[TokenEvent | Completion]:
        await asyncio.Event().wait()
        yield TokenEvent(1)

    batch = AsyncBatchedStream(progress=False, on_error="collect")
    batch.add(AsyncLMCacheStream(ctx, stalling, list(range(8))))
    await batch.prefill(PREFILL, timeout=0.02)
    assert {type(error) for error in batch.failures.values()} == {StreamTimeout}
    await batch.decode(PREFILL, timeout=0.02)
    assert {type(error) for error in batch.failures.values()} == {StreamTimeout}
    await batch.modify(half, timeout=0.02)
    assert {type(error) for error in batch.failures.values()} == {CoverageTimeout}


async def test_a_cancelled_phase_keeps_what_succeeded(ctx: AsyncKVCacheContext, cache: EmbeddedCache) -> None:
    waiting = asyncio.Event()

    async def stalling(ids: list[int], params: Any, salt: str) -> AsyncIterator[TokenEvent | Completion]:
        yield TokenEvent(5)
        if ids[0]:
            waiting.set()
            await asyncio.Event().wait()

    batch = AsyncBatchedStream(progress=False, max_concurrency=1)
    batch.extend(AsyncLMCacheStream(ctx, stalling, [index]) for index in range(2))
    first, _ = (stream.stream_id() for stream in batch)
    task = asyncio.create_task(batch.decode({"max_tokens": 1}))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(batch.perf_metrics) == [first]


async def test_a_bar_goes_to_standard_error_where_that_is_a_terminal(
    ctx: AsyncKVCacheContext, cache: EmbeddedCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for progress, stream, shown in ((None, io.StringIO(), False), (False, Terminal(), False), (None, Terminal(), True)):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", stream)
            batch = AsyncBatchedStream(progress=progress)  # type: ignore[arg-type]
            fill(batch, ctx, AsyncCountingEngine(cache), 2)
            await batch.prefill(PREFILL)
        assert ("prefill" in stream.getvalue()) is shown
    assert capsys.readouterr().out == ""


def test_options_that_cannot_be_right() -> None:
    for face in (AsyncBatchedStream, LMCacheBatchedStream):
        with pytest.raises(UsageError, match="max_concurrency"):
            face(max_concurrency=0)
        with pytest.raises(UsageError, match="on_error"):
            face(on_error="ignore")  # type: ignore[arg-type]


# The sync face


def test_the_documented_sync_batch(cache: EmbeddedCache) -> None:
    barrier = threading.Barrier(6)
    threads: set[int] = set()

    class Blocking(CountingEngine):
        def __call__(
            self, ids: list[int], params: Mapping[str, Any], salt: str, /
        ) -> Generator[TokenEvent | Completion, None, None]:
            barrier.wait(30)
            threads.add(threading.get_ident())
            return super().__call__(ids, params, salt)

    with connect(f"memory://{cache.name}") as ctx:
        batch = LMCacheBatchedStream(progress=False)
        for index in range(6):
            batch.add(LMCacheStream(ctx, Blocking(cache), list(range(index, index + 18))))
        assert section(batch.prefill({"temperature": 1.0}), "config") == {"num_streams": 6}
        assert len(threads) == 6
        batch.modify(half)
        results = batch.decode({"max_tokens": 2}, fmt="json")
        out = io.StringIO()
        results.emit(out)
        assert json.loads(out.getvalue()) == results.to_dict()
        assert batch.run_streams({"max_tokens": 1}) > 0
        assert batch.modify_stream(half) > 0
        report = batch.get_perf_metrics(1.0, "terminal", 80, "prefill")
        assert section(report, "config") == {"num_streams": 6}
        assert len(batch.perf_metrics) == len(batch.receipts) == 6
        assert batch.failures == {}
        stream = next(iter(batch))
        assert batch.get_stream(stream.stream_id()) is stream
        assert stream.decoded_tokens() == 4


async def test_the_faces_are_not_mixed(ctx: AsyncKVCacheContext, cache: EmbeddedCache) -> None:
    engine = AsyncCountingEngine(cache)
    with pytest.raises(TypeError, match="async batches take async streams"):
        LMCacheBatchedStream().add(AsyncLMCacheStream(ctx, engine, [1]))  # type: ignore[arg-type]
