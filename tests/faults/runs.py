"""Runs faults side by side: most of their time is waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from lmcache_stream.kvcache.mp import connect, context, lifetime, registry, session, transport

from .outcome import Fault, Observation, Transport, observe

SIDE_BY_SIDE = 12
CONNECT_TIMEOUT = 8.0
Case = tuple[Fault, Transport]


@contextmanager
def tuned() -> Iterator[None]:
    """Let the client look after silent servers sooner, and connect on a busy machine, too."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, seconds in (
            (connect, "CONNECT_TIMEOUT", CONNECT_TIMEOUT),
            (registry, "REGISTER_TIMEOUT", CONNECT_TIMEOUT),
            (lifetime, "LAST_TIMEOUT", CONNECT_TIMEOUT),
            (context, "LOOKUP_TIMEOUT", 3.0),
            (session, "PATIENCE", 0.3),
            (session, "LINGER", 1.0),
            (session, "REPEAT", 0.5),
            (session, "END_TIMEOUT", 0.5),
            (transport, "PATIENCE", 0.3),
        ):
            patch.setattr(module, name, seconds)
        yield


def run_all(cases: Iterable[Case]) -> dict[tuple[str, Transport], Observation | BaseException]:
    """What came of each fault over each transport: an observation, or the error of its check."""

    async def run() -> dict[tuple[str, Transport], Observation | BaseException]:
        free = asyncio.Semaphore(SIDE_BY_SIDE)

        async def one(fault: Fault, over: Transport) -> Observation:
            async with free, asyncio.timeout(120):
                return await observe(fault, over)

        todo = list(cases)
        results = await asyncio.gather(*(one(*case) for case in todo), return_exceptions=True)
        return {(fault.name, over): result for (fault, over), result in zip(todo, results, strict=True)}

    with tuned():
        return asyncio.run(run())
