"""Streams over a real socket against an engine with faults to order."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lmcache_stream.completions import CompletionsClient
from lmcache_stream.errors import EngineError, LMCacheStreamError
from lmcache_stream.kvcache import AsyncKVCacheContext, aconnect
from lmcache_stream.stream import AsyncLMCacheStream
from lmcache_stream.testing import End, FakeEngine, Reply
from tests.cancelling import cancelled_at_each_await
from tests.engines import GEOMETRY

PROMPT = list(range(10))


@pytest.fixture
async def ctx() -> AsyncIterator[AsyncKVCacheContext]:
    async with aconnect(f"memory://{uuid.uuid4().hex}?chunk_size=4", geometry=GEOMETRY) as opened:
        yield opened


def sent(engine: FakeEngine) -> list[list[int]]:
    return [request.json["prompt"] for request in engine.completions]


FAULTS: dict[str, tuple[Reply, int]] = {
    "refused": (Reply(status=500, body=b'{"error": {"message": "no"}}'), 0),
    "error at once": (Reply(error_after=0), 0),
    "error inside the stream": (Reply(error_after=3), 3),
    "cut": (Reply(end_after=3, end=End.CUT), 3),
    "reset": (Reply(end_after=3, end=End.RESET, pace=0), 3),
    "no end": (Reply(tokens=3, finish_reason=None, done=False), 3),
    "garbage": (Reply(body=b"data: {]\n\n"), 0),
    "no ids": (Reply(ids=False), 0),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_failing_engine_leaves_a_stream_that_sends_each_token_once(ctx: AsyncKVCacheContext, name: str) -> None:
    reply, arrives = FAULTS[name]
    async with FakeEngine() as engine, CompletionsClient(engine.base_url, retries=0) as client:
        stream = AsyncLMCacheStream(ctx, client, PROMPT)
        engine.script(reply)
        with pytest.raises(LMCacheStreamError) as caught:
            await stream.generate({"max_tokens": 6}, [50])
        assert isinstance(caught.value.__cause__, EngineError)
        assert caught.value.arrived == arrives
        assert caught.value.suffix_consumed is (arrives > 0)
        assert stream.output_tokens() == list(range(arrives))
        assert stream.tokens == ([*PROMPT, 50, *range(arrives)] if arrives else PROMPT)
        await stream.generate({"max_tokens": 2}, [] if arrives else [50])
        assert sent(engine)[-1] == [*PROMPT, 50, *range(arrives)]
        await engine.until(lambda: engine.connections <= 1)


async def test_generate_cancelled_at_every_await_of_a_real_client(ctx: AsyncKVCacheContext) -> None:
    async with FakeEngine(default=Reply(pace=0)) as engine, CompletionsClient(engine.base_url) as client:
        stream = AsyncLMCacheStream(ctx, client, PROMPT)
        expected = PROMPT
        runs = 0
        async for _, cancelled in cancelled_at_each_await(lambda: stream.generate({"max_tokens": 6}, [50])):
            runs += 1
            generated = stream.tokens[len(expected) + 1 :]
            if stream.tokens != expected:
                assert sent(engine)[-1] == [*expected, 50]
                assert stream.tokens == [*expected, 50, *generated]
                assert generated == list(range(6))[: len(generated)]
            assert cancelled or len(generated) == 6
            expected = stream.tokens
        assert runs > 3
        await engine.until(lambda: engine.connections <= 1)
        assert stream.output_tokens() == [token for token in stream.tokens[len(PROMPT) :] if token != 50]


async def test_leaving_events_early_disconnects_from_the_engine(ctx: AsyncKVCacheContext) -> None:
    async with FakeEngine() as engine, CompletionsClient(engine.base_url) as client:
        stream = AsyncLMCacheStream(ctx, client, PROMPT)
        engine.script(Reply(end_after=3, end=End.STALL))
        async for event in stream.events({"max_tokens": 6}):
            if event.token_id == 1:
                break
        await engine.disconnected()
        assert stream.output_tokens() == [0, 1]
        await stream.generate({"max_tokens": 1})
        assert sent(engine)[-1] == [*PROMPT, 0, 1]


async def test_many_streams_share_one_client(ctx: AsyncKVCacheContext) -> None:
    async with FakeEngine() as engine, CompletionsClient(engine.base_url) as client:
        streams = [AsyncLMCacheStream(ctx, client, PROMPT) for _ in range(150)]
        await asyncio.gather(*(stream.generate({"max_tokens": 20}) for stream in streams))
        for stream in streams:
            assert stream.output_tokens() == list(range(20))
            assert stream.finish_reason() == "length"


async def test_what_is_sent(ctx: AsyncKVCacheContext) -> None:
    async with FakeEngine() as engine, CompletionsClient(engine.base_url) as client:
        stream = AsyncLMCacheStream(ctx, client, PROMPT, cache_salt="tenant")
        params: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "logit_bias": {"5": 1.5}}
        await stream.generate(params)
        body = engine.completions[-1].json
        assert body["cache_salt"] == "tenant"
        assert {key: body[key] for key in params} == params
        assert body["stream"] is body["return_token_ids"] is True
