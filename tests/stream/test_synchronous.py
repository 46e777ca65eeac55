"""The sync face."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import closing
from typing import Any

import pytest
import torch

from lmcache_stream.kvcache import connect
from lmcache_stream.stream import AsyncLMCacheStream, LMCacheStream, create_request, generate, get, update
from lmcache_stream.types import TokenEvent
from tests.engines import CountingEngine, kv_of
from tests.streams import PREFILL, drop_every_other, embedded_cache, keep


def test_the_documented_sync_flow() -> None:
    with embedded_cache() as (cache, url), closing(connect(url)) as ctx:
        engine = CountingEngine(cache)
        stream = create_request(ctx, engine, list(range(18)))
        generate(stream, PREFILL)
        kv = get(stream, timeout=1, poll_interval=0.1)
        assert torch.equal(kv, kv_of(list(range(16))))
        receipt = stream.modify_kv(drop_every_other)
        assert receipt.tokens_after == 8
        generate(stream, {"max_tokens": 3}, suffix_tokens=[9])
        assert engine.sent[-1][0] == [*range(0, 16, 2), 16, 17, 1000, 9]
        update(stream, kv, list(range(16)))
        assert stream.tokens == list(range(16))
        assert [event.token_id for event in stream.events({"max_tokens": 2})] == [1004, 1005]
        fork = stream.fork()
        assert (fork.tokens, fork.ctx) == (stream.tokens, ctx)
        assert fork.stream_id() != stream.stream_id()
        assert stream.finish_reason() == "length"
        assert not stream.done
        with pytest.raises(TypeError, match="LMCacheStream takes one from connect"):
            AsyncLMCacheStream(ctx, engine, [1])  # type: ignore[arg-type]


class Recorder:
    """Takes the place of a stream's async twin and keeps what it is asked."""

    def __init__(self, twin: AsyncLMCacheStream) -> None:
        self.twin = twin
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        async def operation(*args: Any, **options: Any) -> AsyncLMCacheStream:
            self.calls.append((name, args, options))
            return self.twin

        async def events(*args: Any, **options: Any) -> AsyncIterator[TokenEvent]:
            self.calls.append((name, args, options))
            yield TokenEvent(7, "a")

        return events if name == "events" else operation


NO_EDITS: dict[str, Any] = {"edit_every": None, "editor": None, "timeout": None}
EDITS: dict[str, Any] = {"edit_every": 3, "editor": keep, "timeout": 4}
ONCE_COVERED: dict[str, Any] = {"allow_partial": False, "decode_saved": False}
HANDED_ON: dict[str, tuple[Callable[[LMCacheStream], Any], tuple[str, tuple[Any, ...], dict[str, Any]]]] = {
    "generate": (lambda stream: stream.generate(PREFILL), ("generate", (PREFILL, ()), NO_EDITS)),
    "generate with all": (
        lambda stream: stream.generate(PREFILL, [5], **EDITS),
        ("generate", (PREFILL, [5]), EDITS),
    ),
    "events": (lambda stream: list(stream.events(PREFILL)), ("events", (PREFILL, ()), NO_EDITS)),
    "events with all": (
        lambda stream: list(stream.events(PREFILL, [5], **EDITS)),
        ("events", (PREFILL, [5]), EDITS),
    ),
    "retrieve_kv": (lambda stream: stream.retrieve_kv(), ("retrieve_kv", (30, 0.2), ONCE_COVERED)),
    "retrieve_kv with all": (
        lambda stream: stream.retrieve_kv(1, 2, allow_partial=True, decode_saved=True),
        ("retrieve_kv", (1, 2), {"allow_partial": True, "decode_saved": True}),
    ),
    "update_kv": (lambda stream: stream.update_kv("kv", [1]), ("update_kv", ("kv", [1]), {"timeout": None})),  # type: ignore[arg-type]
    "update_kv with all": (
        lambda stream: stream.update_kv("kv", [1], timeout=4),  # type: ignore[arg-type]
        ("update_kv", ("kv", [1]), {"timeout": 4}),
    ),
    "modify_kv": (
        lambda stream: stream.modify_kv(keep),
        ("modify_kv", (keep,), {"timeout": 30, "poll_interval": 0.2, **ONCE_COVERED}),
    ),
    "modify_kv with all": (
        lambda stream: stream.modify_kv(keep, timeout=1, poll_interval=2, allow_partial=True, decode_saved=True),
        ("modify_kv", (keep,), {"timeout": 1, "poll_interval": 2, "allow_partial": True, "decode_saved": True}),
    ),
    "fork": (lambda stream: stream.fork(), ("fork", (), {"timeout": None})),
    "fork with all": (lambda stream: stream.fork(timeout=4), ("fork", (), {"timeout": 4})),
    "the function generate": (
        lambda stream: generate(stream, PREFILL, [5]),
        ("generate", (PREFILL, [5]), NO_EDITS),
    ),
    "the function get": (lambda stream: get(stream), ("retrieve_kv", (30, 0.2), ONCE_COVERED)),
    "the function get with all": (lambda stream: get(stream, 1, 2), ("retrieve_kv", (1, 2), ONCE_COVERED)),
    "the function update": (
        lambda stream: update(stream, "kv", [1]),  # type: ignore[arg-type]
        ("update_kv", ("kv", [1]), {"timeout": None}),
    ),
}


@pytest.mark.parametrize("case", HANDED_ON)
def test_the_sync_face_hands_on_what_it_is_given(case: str) -> None:
    call, handed_on = HANDED_ON[case]
    with embedded_cache() as (cache, url), connect(url) as ctx:
        stream = create_request(ctx, CountingEngine(cache), [1, 2])
        recorder = Recorder(stream.async_stream)
        stream._async_stream = recorder  # type: ignore[assignment]
        call(stream)
        assert recorder.calls == [handed_on]


def test_create_request_passes_the_callers_salt_on() -> None:
    with embedded_cache() as (cache, url), connect(url) as ctx:
        assert create_request(ctx, CountingEngine(cache), [1]).cache_salt == ""
        assert create_request(ctx, CountingEngine(cache), [1], "mine").cache_salt == "mine"
        stream = LMCacheStream(ctx, CountingEngine(cache), [1], salt_edits=False, on_shortfall="report")
        assert (stream.async_stream._salt_edits, stream.async_stream._on_shortfall) == (False, "report")


def test_a_sync_fn_may_use_the_sync_face_itself() -> None:
    with embedded_cache() as (cache, url), connect(url) as ctx:
        stream = LMCacheStream(ctx, CountingEngine(cache), list(range(16)))
        stream.generate(PREFILL)

        def fn(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
            assert ctx.lookup(tokens) == 16
            return kv, tokens

        stream.modify_kv(fn)


def test_leaving_sync_events_early_keeps_what_arrived() -> None:
    with embedded_cache() as (cache, url), connect(url) as ctx:
        engine = CountingEngine(cache)
        stream = LMCacheStream(ctx, engine, list(range(10)))
        for event in stream.events({"max_tokens": 30}):
            assert event.token_id == 1000
            break
        arrived = stream.output_tokens()
        assert arrived == list(range(1000, 1000 + len(arrived)))
        stream.generate({"max_tokens": 1})
        assert engine.sent[-1][0] == [*range(10), *arrived]
