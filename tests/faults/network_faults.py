"""What a network can do wrong, between the client and both servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from lmcache_stream import (
    CacheConnectionError,
    EngineConnectionError,
    EngineStreamError,
    LMCacheStreamError,
)
from lmcache_stream.testing import TcpProxy

from .cache_faults import BROKE, NOBODY, PATIENCE
from .engine_faults import IMPATIENT, ONCE
from .outcome import PICKLE, Fault, Order, Phase, Raises, Survives
from .stack import Stack

Link = Callable[[Stack], TcpProxy]


def to_engine(stack: Stack) -> TcpProxy:
    return stack.engine_proxy


def to_cache(stack: Stack) -> TcpProxy:
    return stack.cache_proxy


def to_http(stack: Stack) -> TcpProxy:
    return stack.http_proxy


def heal(stack: Stack) -> None:
    for link in (to_engine, to_cache, to_http):
        link(stack).heal()


def network(
    name: str, phase: Phase, link: Link, order: Callable[[TcpProxy], Any], expect: Raises | Survives, **more: Any
) -> Fault:
    ordered: Order = lambda stack: order(link(stack))  # noqa: E731
    return Fault(name=name, side="network", phase=phase, order=ordered, lift=heal, expect=expect, **more)


def slow(proxy: TcpProxy) -> None:
    proxy.up.delay = proxy.down.delay = 0.03


def narrow(proxy: TcpProxy) -> None:
    proxy.up.rate = proxy.down.rate = 20_000.0


async def drop_idle(proxy: TcpProxy, *, reset: bool = False) -> None:
    """Drop what is connected; the client has seen it when it has come back."""
    before = proxy.connections
    await proxy.drop(reset=reset)
    for _ in range(3000):
        if proxy.connections >= before:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the client did not come back within 30 s")


async def refuse(proxy: TcpProxy) -> None:
    proxy.refusing = True
    await proxy.drop(reset=True)


def engine_fails(cause: type[Exception], words: str, arrived: int = 0) -> Raises:
    return Raises(LMCacheStreamError, words, cause, arrived)


GONE_WORDS = (NOBODY, "is gone: neither")
CUT_OFF = Raises(LMCacheStreamError, (*GONE_WORDS, BROKE), CacheConnectionError)
"""A request that was on its way when the connection went is told so."""

LOST = Raises(LMCacheStreamError, BROKE, CacheConnectionError)
GONE = Raises(LMCacheStreamError, "is gone: neither", CacheConnectionError)

NETWORK_FAULTS = [
    network("engine far away", "decode", to_engine, slow, Survives()),
    network("engine behind a narrow line", "decode", to_engine, narrow, Survives()),
    network("idle connection to the engine dropped", "decode", to_engine, lambda link: link.drop(), Survives()),
    network("request cut half way", "decode", to_engine, lambda link: link.up.cut(100), Survives()),
    network("head of the answer cut half way", "decode", to_engine, lambda link: link.down.cut(20), Survives()),
    network(
        "answer cut in the middle of an event",
        "decode",
        to_engine,
        lambda link: link.down.cut(1000),
        engine_fails(EngineStreamError, "broke off", 3),
        client=ONCE,
    ),
    network(
        "answer reset in the middle of an event",
        "decode",
        to_engine,
        lambda link: link.down.cut(100, reset=True),
        engine_fails(EngineStreamError, "broke off"),
        client=ONCE,
    ),
    network(
        "engine's connections refused",
        "prefill",
        to_engine,
        refuse,
        engine_fails(EngineConnectionError, "gave no answer"),
    ),
    network(
        "nothing gets to the engine",
        "decode",
        to_engine,
        lambda link: link.up.hold(),
        engine_fails(EngineConnectionError, "nothing came for 2 s"),
        client=IMPATIENT,
    ),
    network(
        "nothing comes back from the engine",
        "decode",
        to_engine,
        lambda link: link.down.hold(),
        engine_fails(EngineConnectionError, "nothing came for 2 s"),
        client=IMPATIENT,
    ),
    network("cache server far away", "modify", to_cache, slow, Survives()),
    network("cache server behind a narrow line", "modify", to_cache, narrow, Survives()),
    network("idle connections to the cache dropped", "modify", to_cache, drop_idle, Survives()),
    network(
        "idle connections to the cache reset",
        "decode",
        to_cache,
        lambda link: drop_idle(link, reset=True),
        Survives(),
    ),
    network("request to the cache cut half way", "modify", to_cache, lambda link: link.up.cut(100), LOST),
    network("answer of the cache cut half way", "modify", to_cache, lambda link: link.down.cut(5), LOST),
    network("answer of the cache reset half way", "modify", to_cache, lambda link: link.down.cut(5, reset=True), LOST),
    network(
        "pickled chunks cut half way",
        "modify",
        to_cache,
        lambda link: link.down.cut(2000),
        LOST,
        transports=PICKLE,
    ),
    network("connection cut at the lookup of the edit", "decode", to_cache, lambda link: link.down.cut(5), LOST),
    network("nothing gets to the cache", "modify", to_cache, lambda link: link.up.hold(), GONE, patience=PATIENCE),
    network(
        "nothing comes back from the cache", "modify", to_cache, lambda link: link.down.hold(), GONE, patience=PATIENCE
    ),
    network("cache's connections refused", "modify", to_cache, refuse, CUT_OFF, patience=PATIENCE),
    network("status of the cache does not come", "modify", to_http, lambda link: link.down.hold(), Survives()),
    network("status of the cache cut half way", "modify", to_http, lambda link: link.down.cut(20, times=9), Survives()),
    network(
        "/config cut half way",
        "connect",
        to_http,
        lambda link: link.down.cut(20, times=9),
        Raises(CacheConnectionError, "cannot reach"),
    ),
    network(
        "/config does not come",
        "connect",
        to_http,
        lambda link: link.down.hold(),
        Raises(CacheConnectionError, "did not answer in time"),
    ),
    network(
        "cache server does not answer the first question",
        "connect",
        to_cache,
        lambda link: link.down.hold(),
        Raises(CacheConnectionError, GONE_WORDS),
    ),
]
