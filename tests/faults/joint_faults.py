"""Two things that go wrong at once, and what befalls one stream of a batch."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from lmcache_stream import (
    CacheConnectionError,
    CacheError,
    CacheTimeout,
    CoverageTimeout,
    EditNotUsed,
    EngineConnectionError,
    EngineResponseError,
    EngineStreamError,
    LMCacheStreamError,
    StoreError,
)
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.testing import End, Reply

from .cache_faults import NOBODY, PATIENCE, cancel_when_struck, evict_all, kill, release, restart, strikes
from .engine_faults import IMPATIENT, ONCE, comes_up, goes_down, replies, restarts
from .network_faults import drop_idle, heal
from .outcome import PICKLE, SHARED, Fault, Order, Raises, Survives
from .stack import MODEL, Stack, says


def both(*orders: Order) -> Order:
    async def order(stack: Stack) -> None:
        for one in orders:
            result = one(stack)
            if inspect.isawaitable(result):
                await result

    return order


def joint(name: str, phase: Any, expect: Raises | Survives, *orders: Order, **more: Any) -> Fault:
    return Fault(name=name, side="two at once", phase=phase, order=both(*orders), expect=expect, **more)


def batch(name: str, phase: Any, expect: Raises | Survives, order: Order, **more: Any) -> Fault:
    return Fault(name=name, side="batch", phase=phase, order=order, expect=expect, **more)


def offload_the_prompts(stack: Stack) -> None:
    for prompt in stack.prompts:
        stack.server.offload(MODEL, prompt)


def forget(stack: Stack) -> None:
    stack.server.forget()


def slow_cache(stack: Stack) -> None:
    stack.cache_proxy.up.delay = stack.cache_proxy.down.delay = 0.03


async def drop_cache(stack: Stack) -> None:
    await drop_idle(stack.cache_proxy)


def restart_when_stalled(stack: Stack, task: asyncio.Task[None]) -> Any:
    async def wait_and_restart() -> None:
        while len(stack.streams[0].output_tokens()) < 4:  # noqa: ASYNC110  (nothing tells)
            await asyncio.sleep(0.005)
        await asyncio.to_thread(stack.server.restart)

    return wait_and_restart()


def evict_first_prompt(stack: Stack) -> None:
    stack.server.evict(5)


JOINT_FAULTS = [
    joint(
        "engine busy, and cuts the connection when it is asked again",
        "prefill",
        Raises(LMCacheStreamError, "the connection was closed", EngineConnectionError),
        replies(Reply(status=503, body=b"busy"), Reply(raw=b"")),
    ),
    joint(
        "connection closed, then the stream cut",
        "decode",
        Raises(LMCacheStreamError, "broke off", EngineStreamError, 3),
        replies(Reply(raw=b""), says(end_after=3, end=End.CUT)),
    ),
    joint(
        "stream stalls while the cache server restarts",
        "decode",
        Raises(LMCacheStreamError, "nothing came", EngineStreamError, 3),
        replies(says(end_after=3, end=End.STALL)),
        meanwhile=restart_when_stalled,
        client={"idle_timeout": 2.0, "retries": 0},
        restarted=True,
    ),
    joint(
        "both servers restart before the decode",
        "decode",
        Raises(EditNotUsed, "the cache holds 0 of the edit's 16"),
        restarts,
        restart,
        restarted=True,
    ),
    joint(
        "engine down and edit evicted",
        "decode",
        Raises(EditNotUsed, "the cache holds 0 of the edit's 16"),
        goes_down,
        evict_all,
        lift=comes_up,
        restarted=True,
    ),
    joint(
        "engine restarts while a lookup is lost",
        "modify",
        Raises(LMCacheStreamError, "did not answer lookup", CacheTimeout),
        restarts,
        strikes(wire.LOOKUP, "lose"),
        patience=PATIENCE,
    ),
    joint(
        "client forgotten, and the places to read told twice",
        "modify",
        Survives(),
        forget,
        strikes(wire.PREPARE_RETRIEVE, "duplicate", after=1),
        transports=SHARED,
    ),
    joint(
        "client forgotten at the read and again at the write",
        "modify",
        Survives(),
        strikes(wire.PREPARE_RETRIEVE, "forget"),
        strikes(wire.PREPARE_STORE, "forget"),
    ),
    joint(
        "late lookups, and every answer to a wait told twice",
        "modify",
        Survives(),
        strikes(wire.LOOKUP, "hold", times=2, seconds=0.1),
        strikes(wire.WAIT_PREFETCH_STATUS, "duplicate", times=2),
    ),
    joint(
        "prompt evicted before the read, and the end of the session lost",
        "modify",
        Raises(LMCacheStreamError, "lost chunks between", CacheError),
        strikes(wire.PREPARE_RETRIEVE, "evict"),
        strikes(wire.END_SESSION, "lose", after=1),
        lift=offload_the_prompts,
    ),
    joint(
        "no room, and the next lookup not worked on",
        "modify",
        Raises(LMCacheStreamError, "did not answer lookup", CacheTimeout),
        strikes(wire.PREPARE_STORE, "no-room"),
        strikes(wire.LOOKUP, "ignore", after=2),
        patience=PATIENCE,
        transports=SHARED,
    ),
    joint(
        "answer to the commit lost, and so is that to its repetition",
        "modify",
        Raises(LMCacheStreamError, "did not answer commit_store", CacheTimeout),
        strikes(wire.COMMIT_STORE, "lose", times=2),
        registered=True,
        transports=SHARED,
    ),
    joint(
        "cancelled while the places to write to are late, and forgotten",
        "modify",
        Raises(asyncio.CancelledError),
        strikes(wire.PREPARE_STORE, "hold"),
        meanwhile=cancel_when_struck,
        lift=forget,
    ),
    joint(
        "cancelled while the read is late on a slow line",
        "modify",
        Raises(asyncio.CancelledError),
        slow_cache,
        strikes(wire.PREPARE_RETRIEVE, "hold"),
        meanwhile=cancel_when_struck,
        lift=heal,
        proxied=True,
    ),
    joint(
        "connections to the cache dropped, and the client forgotten",
        "modify",
        Survives(),
        drop_cache,
        forget,
        proxied=True,
    ),
]

BATCH_FAULTS = [
    batch(
        "one of three refused",
        "prefill",
        Raises(LMCacheStreamError, "HTTP 400: no", EngineResponseError),
        replies(Reply(status=400, body=b'{"error":{"message":"no"}}')),
    ),
    batch(
        "one of three streams cut",
        "decode",
        Raises(LMCacheStreamError, "broke off", EngineStreamError, 3),
        replies(says(end_after=3, end=End.CUT)),
        client=ONCE,
    ),
    batch(
        "one of three streams stalls",
        "decode",
        Raises(LMCacheStreamError, "nothing came", EngineStreamError, 3),
        replies(says(end_after=3, end=End.STALL)),
        client=IMPATIENT,
    ),
    batch(
        "engine down for all three",
        "decode",
        Raises(LMCacheStreamError, "gave no answer", EngineConnectionError),
        goes_down,
        lift=comes_up,
        befalls=3,
    ),
    batch("engine restarts under three streams", "decode", Survives(), restarts),
    batch(
        "prompt of one of three evicted",
        "modify",
        Raises(CoverageTimeout, "covers 0 of 40"),
        evict_first_prompt,
        coverage=0.3,
        lift=offload_the_prompts,
    ),
    batch(
        "no room for one of three edits",
        "modify",
        Raises(StoreError, "it has no room"),
        strikes(wire.PREPARE_STORE, "no-room"),
        transports=SHARED,
    ),
    batch(
        "no room for one of three pickled edits",
        "modify",
        Raises(StoreError, "it has no room"),
        strikes(wire.COMMIT_STORE, "no-room"),
        transports=PICKLE,
    ),
    batch(
        "places to write to late for one of three",
        "modify",
        Raises(LMCacheStreamError, "did not answer prepare_store", CacheTimeout),
        strikes(wire.PREPARE_STORE, "hold"),
        patience=PATIENCE,
        lift=release,
    ),
    batch("client forgotten under three edits", "modify", Survives(), forget),
    batch(
        "cache server gone under three edits",
        "modify",
        Raises(LMCacheStreamError, NOBODY, CacheConnectionError),
        kill,
        lift=both(restart, offload_the_prompts),
        befalls=3,
    ),
]
