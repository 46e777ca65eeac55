"""The embedded engine's coroutines, cancelled at every point."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lmcache_stream.completions import CompletionsClient
from lmcache_stream.engine import EmbeddedEngine
from lmcache_stream.errors import UsageError
from lmcache_stream.kvcache.memory import EmbeddedCache
from tests.cancelling import WatchedRun, tasks_watched

from .traces import Traces

STARTS = [EmbeddedEngine.start, EmbeddedEngine.__aenter__]
ENDS: list[Callable[[EmbeddedEngine], Awaitable[Any]]] = [
    EmbeddedEngine.aclose,
    lambda engine: engine.__aexit__(None, None, None),
]


async def works(engine: EmbeddedEngine) -> bool:
    async with CompletionsClient(engine.base_url) as client:
        items = [item async for item in client([1, 2, 3], {"max_tokens": 2, "ignore_eos": True})]
        return len(items) == 3


@pytest.mark.parametrize("insist", [False, True], ids=["once", "again_and_again"])
@pytest.mark.parametrize("end", [False, True], ids=["start", "end"])
async def test_cancelled_at_every_point(tiny_model: tuple[Any, Any], end: bool, insist: bool) -> None:
    model, tokenizer = tiny_model

    async def run(call: Callable[[EmbeddedEngine], Awaitable[Any]], at: int | None) -> tuple[WatchedRun, bool]:
        name = uuid.uuid4().hex
        engine = EmbeddedEngine(model, tokenizer=tokenizer, cache=f"memory://{name}", served_model_name="tiny")
        if end:
            await engine.start()
            assert await works(engine)
        watched = WatchedRun(at, insist=insist)
        cancelled = await watched(lambda: call(engine))
        if not end:
            if cancelled:
                with pytest.raises(UsageError, match="not running"):
                    assert engine.base_url
                await engine.start()
            assert await works(engine)
        await engine.aclose()
        assert name not in EmbeddedCache._by_name
        return watched, cancelled

    with tasks_watched():
        for call in ENDS if end else STARTS:
            await run(call, None)
            standing = Traces.now()
            for at in range(200):
                watched, cancelled = await run(call, at)
                await standing.gone(watched.tasks)
                if not cancelled:
                    assert watched.points < at
                    break
            else:
                raise AssertionError("more than 200 points")
