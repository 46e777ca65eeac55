"""A call that failed or was cancelled keeps no KV alive, not even until the garbage collector comes round."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from lmcache_stream.batch import AsyncBatchedStream
from lmcache_stream.editors.base import Edit, EditInput, Editor
from lmcache_stream.errors import LMCacheBatchedStreamError, LMCacheStreamError
from lmcache_stream.kvcache import connect
from lmcache_stream.kvcache.mp.wire import (
    COMMIT_RETRIEVE,
    COMMIT_STORE,
    LOOKUP,
    PREPARE_RETRIEVE,
    PREPARE_STORE,
    Operation,
)
from lmcache_stream.stream import LMCacheStream
from lmcache_stream.testing.cache_faults import FaultKind
from tests.cancellation.places import ServerCache, place_at
from tests.engines import CountingEngine
from tests.streams import PREFILL, drop_every_other, embedded_cache


class BadEditor(Editor):
    name = "bad"

    def edit(self, x: EditInput) -> Edit:
        raise ValueError(f"no {x.kv.shape}")


def bad(kv: torch.Tensor, tokens: list[int]) -> Any:
    raise ValueError(f"no {kv.shape}")


async def bad_after_a_while(kv: torch.Tensor, tokens: list[int]) -> Any:
    await asyncio.sleep(0)
    raise ValueError(f"no {kv.shape}")


def misshapen(kv: torch.Tensor, tokens: list[int]) -> Any:
    return kv[:, :, :-1], tokens


@contextmanager
def no_kv_for_the_collector() -> Iterator[None]:
    """Nothing that the garbage collector would find afterwards is KV."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        assert [thing.shape for thing in gc.garbage if issubclass(type(thing), torch.Tensor)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


FUNCTIONS = [bad, bad_after_a_while, BadEditor(), misshapen]


@pytest.mark.parametrize("fn", FUNCTIONS, ids=["function", "coroutine", "editor", "result"])
@pytest.mark.parametrize("backend", ["memory", "shared memory", "pickle"])
async def test_after_an_edit_that_failed(backend: str, fn: Any) -> None:
    async with place_at(backend, "async") as place:
        stream = await place.prefilled()
        with no_kv_for_the_collector(), suppress(ValueError):
            await stream.modify_kv(fn)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=["function", "coroutine", "editor", "result"])
def test_after_an_edit_that_failed_in_synchronous_code(fn: Any) -> None:
    with embedded_cache() as (cache, url), connect(url) as ctx:
        stream = LMCacheStream(ctx, CountingEngine(cache), list(range(16)))
        stream.generate(PREFILL)
        with no_kv_for_the_collector(), suppress(ValueError):
            stream.modify_kv(fn)


@pytest.mark.parametrize(
    ("backend", "operation", "kind"),
    [
        *(
            (backend, operation, kind)
            for backend in ("shared memory", "grpc")
            for operation, kind in (
                (PREPARE_RETRIEVE, "shape"),
                (COMMIT_RETRIEVE, "wrong-type"),
                (PREPARE_STORE, "no-room"),
                (COMMIT_STORE, "wrong-type"),
            )
        ),
        ("pickle", PREPARE_RETRIEVE, "shape"),
        ("pickle", COMMIT_STORE, "wrong-type"),
    ],
)
async def test_after_a_call_that_failed(backend: str, operation: Operation[Any], kind: FaultKind) -> None:
    async with place_at(backend, "async") as place:
        assert isinstance(place.cache, ServerCache)
        stream = await place.prefilled()
        place.cache.server.fault(operation, kind)
        with no_kv_for_the_collector(), suppress(LMCacheStreamError):
            await stream.modify_kv(drop_every_other, timeout=1.0)


@pytest.mark.parametrize("backend", ["memory", "shared memory", "pickle", "grpc"])
async def test_after_an_edit_that_was_cancelled(backend: str) -> None:
    begun = asyncio.Event()

    async def wait(kv: torch.Tensor, tokens: list[int]) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with place_at(backend, "async") as place:
        stream = await place.prefilled()
        with no_kv_for_the_collector():
            task = asyncio.create_task(stream.modify_kv(wait))
            await begun.wait()
            task.cancel()
            await asyncio.wait([task])
            del task


@pytest.mark.parametrize("operation", [LOOKUP, PREPARE_RETRIEVE, PREPARE_STORE, COMMIT_STORE])
async def test_after_a_call_that_was_cancelled(operation: Operation[Any]) -> None:
    async with place_at("shared memory", "async") as place:
        assert isinstance(place.cache, ServerCache)
        stream = await place.prefilled()
        fault = place.cache.server.fault(operation, "hold")
        with no_kv_for_the_collector():
            task = asyncio.create_task(stream.modify_kv(drop_every_other))
            await asyncio.to_thread(fault.struck.wait)
            task.cancel()
            fault.release()
            await asyncio.wait([task])
            del task


async def test_after_a_batch_that_failed() -> None:
    async with place_at("memory", "async") as place:
        batch = AsyncBatchedStream(progress=False)
        batch.extend([await place.prefilled("one"), await place.prefilled("two")])
        with no_kv_for_the_collector(), suppress(LMCacheBatchedStreamError):
            await batch.modify(bad)
