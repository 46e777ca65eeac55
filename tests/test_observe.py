from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lmcache_stream import observe
from lmcache_stream.batch import AsyncBatchedStream
from lmcache_stream.completions import CompletionsClient
from lmcache_stream.errors import CacheError, LMCacheStreamError
from lmcache_stream.kvcache import aconnect
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.stream import AsyncLMCacheStream
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from lmcache_stream.testing.fake_engine import FakeEngine

from .engines import GEOMETRY, MODEL, AsyncCountingEngine
from .streams import embedded_cache

SALT = "tenant-salt"
PROMPT = list(range(18))


class Observed:
    """What OpenTelemetry was told."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider([self._reader], shutdown_on_exit=False)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def parent(self, span: ReadableSpan) -> str | None:
        of = span.parent
        return None if of is None else {one.context.span_id: one.name for one in self.spans if one.context}[of.span_id]

    def points(self, name: str) -> list[Any]:
        data = self._reader.get_metrics_data()
        found = [] if data is None else data.resource_metrics
        return [
            point
            for resource in found
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Observed]:
    observed = Observed()
    monkeypatch.setattr(observe, "_telemetry", observe.Telemetry(observed.tracers, observed.meters))
    yield observed
    observed.tracers.shutdown()
    observed.meters.shutdown()


@pytest.fixture
def unobserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_telemetry", None)
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)


class Setup:
    def __init__(self, ctx: Any, engine: AsyncCountingEngine) -> None:
        self.ctx, self.engine = ctx, engine

    def stream(self) -> AsyncLMCacheStream:
        return AsyncLMCacheStream(self.ctx, self.engine, PROMPT, SALT)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    with embedded_cache() as (cache, url):
        async with aconnect(url) as ctx:
            yield Setup(ctx, AsyncCountingEngine(cache))


@pytest.fixture
def server() -> Iterator[FakeCacheServer]:
    with FakeCacheServer(chunk_size=4) as server:
        server.serve(MODEL, GEOMETRY)
        yield server


@pytest.fixture
async def mp(server: FakeCacheServer) -> AsyncIterator[MPKVCacheContext]:
    async with await open_context(server.url, http_url=server.http_url, model_name=MODEL, geometry=GEOMETRY) as ctx:
        yield ctx


def halve(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return kv[:, :, ::2], tokens[::2]


async def test_the_phases_of_a_batch(setup: Setup, observed: Observed) -> None:
    batch = AsyncBatchedStream(progress=False)
    batch.extend(setup.stream() for _ in range(2))
    await batch.prefill({"temperature": 0})
    await batch.modify(halve)
    await batch.decode({"max_tokens": 5})

    for name, phase in (("prefill", "prefill"), ("modify", "modify"), ("decode", "decode")):
        span = observed.one(name)
        assert span.attributes is not None
        assert span.attributes["lmcache_stream.phase"] == phase
        assert span.attributes["lmcache_stream.streams"] == 2
        assert span.attributes["lmcache_stream.failures"] == 0
    requests = observed.named(f"text_completion {MODEL}")
    assert [observed.parent(span) for span in requests] == ["prefill"] * 2 + ["decode"] * 2
    assert {span.kind for span in requests} == {trace.SpanKind.CLIENT}
    told: dict[str, Any] = dict(requests[-1].attributes or {})
    assert told.pop("gen_ai.response.time_to_first_chunk") > 0
    assert told.pop("lmcache_stream.stream_id") in {stream.stream_id() for stream in batch}
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 11,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "lmcache_stream.phase": "decode",
    }
    edits = observed.named("modify_kv")
    assert [observed.parent(span) for span in edits] == ["modify"] * 2
    for step in ("wait", "retrieve", "edit", "store"):
        assert [observed.parent(span) for span in observed.named(step)] == ["modify_kv"] * 2
    assert dict(edits[0].attributes or {})["lmcache_stream.modify.tokens_after"] == 8
    assert {observed.parent(span) for span in observed.named("transfer")} >= {"store"}


async def test_metrics(setup: Setup, observed: Observed) -> None:
    stream = setup.stream()
    await stream.generate({"max_tokens": 1})
    await stream.modify_kv(halve)
    await stream.generate({"max_tokens": 5})
    of = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "vllm", "gen_ai.request.model": MODEL}
    usage = {
        (point.attributes["lmcache_stream.phase"], point.attributes["gen_ai.token.type"]): point.sum
        for point in observed.points("gen_ai.client.token.usage")
    }
    assert usage == {
        ("prefill", "input"): 18,
        ("prefill", "output"): 1,
        ("decode", "input"): 11,
        ("decode", "output"): 5,
    }
    for name in ("gen_ai.client.operation.duration", "gen_ai.client.operation.time_to_first_chunk"):
        points = observed.points(name)
        assert [point.count for point in points] == [1, 1]
        assert [dict(point.attributes) for point in points] == [
            of | {"lmcache_stream.phase": "prefill"},
            of | {"lmcache_stream.phase": "decode"},
        ]
    steps = {point.attributes.get("lmcache_stream.step") for point in observed.points("lmcache_stream.modify.duration")}
    assert steps == {None, "wait", "retrieve", "edit", "store"}
    (moved,) = observed.points("lmcache_stream.modify.io")
    assert moved.sum == stream.last_receipt.bytes_moved if stream.last_receipt else False
    assert observed.points("lmcache_stream.transfer.duration")


async def test_fetching_and_storing_by_hand(setup: Setup, observed: Observed) -> None:
    stream = setup.stream()
    await stream.generate({"max_tokens": 1})
    kv = await stream.retrieve_kv()
    await stream.update_kv(kv, stream.tokens[: kv.shape[2]])
    for name in ("retrieve_kv", "update_kv"):
        assert dict(observed.one(name).attributes or {}) == {"lmcache_stream.stream_id": stream.stream_id()}


@pytest.mark.parametrize("tokens", [3, 300])
async def test_there_is_no_span_for_a_token(setup: Setup, observed: Observed, tokens: int) -> None:
    await setup.stream().generate({"max_tokens": tokens})
    assert [span.name for span in observed.spans] == [f"text_completion {MODEL}"]


async def test_a_failure_is_told_without_its_words(setup: Setup, observed: Observed) -> None:
    stream = AsyncLMCacheStream(setup.ctx, AsyncCountingEngine(setup.engine.cache, fail_after=1), PROMPT)
    with pytest.raises(LMCacheStreamError):
        await stream.generate({"max_tokens": 5})
    span = observed.one(f"text_completion {MODEL}")
    assert dict(span.attributes or {})["error.type"] == "LMCacheStreamError"
    assert dict(span.attributes or {})["gen_ai.usage.output_tokens"] == 1
    assert span.status.status_code is trace.StatusCode.ERROR
    (point,) = observed.points("gen_ai.client.operation.duration")
    assert point.attributes["error.type"] == "LMCacheStreamError"
    assert "fell over" not in "".join(one.to_json() for one in observed.spans)


async def test_a_consumer_of_events_is_in_its_own_span(
    setup: Setup, observed: Observed, caplog: pytest.LogCaptureFixture
) -> None:
    async def close(events: Any) -> None:
        await events.aclose()

    with observed.tracers.get_tracer("user").start_as_current_span("mine") as mine:
        for leave_early in (False, True):
            async with aclosing(setup.stream().events({"max_tokens": 5})) as events:
                async for _ in events:
                    assert trace.get_current_span() is mine
                    assert observe.stream_id.get() is None
                    if leave_early:
                        break
                await asyncio.create_task(close(events))
    requests = observed.named(f"text_completion {MODEL}")
    assert [observed.parent(span) for span in requests] == ["mine"] * 2
    assert [dict(span.attributes or {}).get("error.type") for span in requests] == [None, None]
    assert [dict(span.attributes or {})["gen_ai.usage.output_tokens"] for span in requests] == [5, 1]
    assert not caplog.records


async def test_remote_calls(mp: MPKVCacheContext, server: FakeCacheServer, observed: Observed) -> None:
    ids, kv = list(range(8)), torch.randn(2, 2, 8, 8)
    with observed.tracers.get_tracer("user").start_as_current_span("mine"):
        await mp.put(kv, ids, SALT)
        await mp.retrieve(ids, SALT)
        server.fault(wire.GET_CHUNK_SIZE, "lose")
        with pytest.raises(CacheError):
            await mp._transport.call(wire.GET_CHUNK_SIZE, timeout=0.2)
    calls = [span for span in observed.spans if span.name.startswith("lmcache/")]
    names = [span.name.removeprefix("lmcache/") for span in calls]
    for name in ("prepare_store", "commit_store", "lookup", "prepare_retrieve", "commit_retrieve", "end_session"):
        assert name in names
    assert {observed.parent(span) for span in calls} == {"mine"}
    port = int(server.url.rpartition(":")[2])
    told = [dict(span.attributes or {}) for span in calls]
    assert {(one["server.address"], one["server.port"]) for one in told} == {("127.0.0.1", port)}
    assert {one["rpc.method"] for one in told} == {span.name for span in calls}
    (failed,) = [one for one in told if "error.type" in one]
    assert failed["rpc.method"] == "lmcache/get_chunk_size"
    assert failed["error.type"] in ("CacheTimeout", "CacheConnectionError")  # a busy machine may miss the sign of life
    assert {point.attributes["rpc.method"] for point in observed.points("rpc.client.call.duration")} == {
        span.name for span in calls
    }


async def test_nothing_tells_what_was_said_or_by_whom(setup: Setup, mp: MPKVCacheContext, observed: Observed) -> None:
    stream = setup.stream()
    await stream.generate({"max_tokens": 1})
    await stream.modify_kv(halve)
    await mp.put(torch.randn(2, 2, 8, 8), list(range(8)), SALT)
    told = "".join(span.to_json() for span in observed.spans)
    assert SALT not in told
    assert str(PROMPT[:3])[1:-1] not in told


async def test_an_engine_can_go_on_with_the_trace(observed: Observed) -> None:
    async with FakeEngine(model="tiny") as engine, CompletionsClient(engine.base_url, model="tiny") as client:
        async for _ in client([1], {}):
            pass
        with observed.tracers.get_tracer("user").start_as_current_span("mine") as mine:
            async for _ in client([1], {}):
                pass
    without, with_ = engine.requests
    assert "traceparent" not in without.headers
    assert f"{mine.get_span_context().trace_id:032x}" in with_.headers["traceparent"]


async def test_without_opentelemetry_nothing_is_made(
    setup: Setup, mp: MPKVCacheContext, unobserved: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(observe, "Telemetry", lambda *_: made.append("telemetry"))
    assert observe.span("anything") is observe.OFF
    assert observe.rpc("lookup", "tcp://host:1", logging.getLogger("lmcache_stream.quiet")) is observe.OFF
    assert observe.transfer(divmod) is observe.OFF
    assert not observe.OFF
    stream = setup.stream()
    await stream.generate({"max_tokens": 1})
    await stream.modify_kv(halve)
    await mp.put(torch.randn(2, 2, 8, 8), list(range(8)), SALT)
    assert not made
    assert not [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]


async def test_it_is_found_where_the_program_has_imported_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_telemetry", None)
    assert isinstance(observe.telemetry(), observe.Telemetry)
    with observe.span("of nobody"):  # no provider is set up: nothing is recorded, and nothing fails
        pass


async def test_logs_name_the_stream(
    mp: MPKVCacheContext, setup: Setup, caplog: pytest.LogCaptureFixture, unobserved: None
) -> None:
    caplog.set_level("DEBUG", "lmcache_stream")
    stream = AsyncLMCacheStream(mp, AsyncCountingEngine(setup.engine.cache, offload=False), PROMPT, SALT)
    await stream.generate({"max_tokens": 2})
    await mp.put(torch.randn(2, 2, 16, 8), PROMPT[:16], SALT)
    await stream.modify_kv(lambda kv, tokens: None)
    lines = [(record.name, record.getMessage()) for record in caplog.records]
    assert {name.split(".")[0] for name, _ in lines} == {"lmcache_stream"}
    assert {record.levelname for record in caplog.records} <= {"DEBUG"}
    of = f"stream {stream.stream_id()}: "
    calls = [message for name, message in lines if name == "lmcache_stream.kvcache.mp.transport"]
    assert any(message.startswith(f"{of}prepare_retrieve: ") for message in calls)
    assert any(message.startswith("prepare_store: ") for message in calls)
    told = [message for name, message in lines if name == "lmcache_stream.stream"]
    assert told[0] == f"{of}decode: 18 tokens sent, 0 of them cached, 2 came, length"
    assert told[1].startswith(f"{of}modified: {{'tokens_before': 16")
    assert SALT not in caplog.text


def test_warnings_are_seen_where_nobody_set_logging_up() -> None:
    """Python itself prints them then, unless a handler of the library's own takes them."""
    assert logging.getLogger("lmcache_stream").handlers == []
