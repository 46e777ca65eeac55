"""Faults, what is expected of them, and running one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lmcache_stream import (
    AsyncKVCacheContext,
    LMCacheBatchedStreamError,
    LMCacheError,
    LMCacheStreamError,
)

from .stack import DECODED, Stack, opened

Transport = Literal["shared memory", "pickle"]
Phase = Literal["connect", "prefill", "modify", "decode"]
Side = Literal["engine", "cache", "network", "two at once", "batch"]
Order = Callable[[Stack], "Awaitable[object] | object"]

PHASES = ("prefill", "modify", "decode")
BOTH: tuple[Transport, ...] = ("shared memory", "pickle")
SHARED: tuple[Transport, ...] = ("shared memory",)
PICKLE: tuple[Transport, ...] = ("pickle",)


@dataclass(frozen=True)
class Survives:
    """Nothing is to be seen of the fault."""

    def described(self) -> str:
        return "survived"


@dataclass(frozen=True)
class Raises:
    """The call fails.

    Args:
        error: What it raises.
        words: Of its message; several: one of them, as chance has it.
        cause: What chained it; None: nothing.
        arrived: Tokens that came before, and are kept; 0: nothing has changed.
    """

    error: type[BaseException]
    words: str | tuple[str, ...] = ""
    cause: type[BaseException] | None = None
    arrived: int = 0

    def described(self) -> str:
        chain = self.error.__name__ + (f" ← {self.cause.__name__}" if self.cause else "")
        several = (self.words,) if isinstance(self.words, str) else self.words
        words = f": {' or '.join(f'“{one}”' for one in several)}" if self.words else ""
        return f"{chain}{words}; {f'{self.arrived} tokens kept' if self.arrived else 'nothing changed'}"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing, or two at once, that goes wrong in one phase.

    Args:
        name: What goes wrong.
        side: Where.
        phase: When.
        order: Orders it, before the phase.
        expect: What the user sees.
        lift: Ends it, where it does not end by itself.
        meanwhile: Runs beside the phase; what it awaits last has happened before the phase ends.
        patience: Seconds that a call to the cache gives up after in the phase; None: it is patient.
        coverage: Seconds that an edit waits for the prompt's KV.
        timeout: Seconds of a generate in the phase.
        client: Options of the completions client.
        leaves: What the server still holds in the end, that nobody could let go of.
        registered: Whether the client stays registered, since what it may have reserved must not be published.
        restarted: The edit is gone with it: the stream begins anew from its prompt.
        proxied: Whether all connections go through proxies, as they do for faults of the network.
        befalls: Streams of a batch that fail.
        transports: Where it can happen.
    """

    name: str
    side: Side
    phase: Phase
    order: Order
    expect: Survives | Raises
    lift: Order | None = None
    meanwhile: Callable[[Stack, asyncio.Task[None]], Awaitable[None]] | None = None
    patience: float | None = None
    coverage: float | None = None
    timeout: float | None = None
    client: Mapping[str, Any] = field(default_factory=dict)
    leaves: Mapping[str, int] = field(default_factory=dict)
    registered: bool = False
    restarted: bool = False
    proxied: bool = False
    befalls: int = 1
    transports: tuple[Transport, ...] = BOTH

    @property
    def afterwards(self) -> str:
        """What must be so in the end, in words."""
        went_on = ""
        if isinstance(self.expect, Raises):
            went_on = BEGUN_ANEW if self.restarted else GONE_ON if self.expect.arrived else REPEATED
        return ended(went_on, self.leaves, int(self.registered))


REPEATED, GONE_ON, BEGUN_ANEW = "repeated", "gone on with", "begun anew"


def ended(went_on: str, held: Mapping[str, int], clients: int) -> str:
    """How a stream went on, and what the server holds in the end, in words."""
    kept = [f"{count} {name}" for name, count in held.items()] + ["the client's registration"] * clients
    return ", ".join(filter(None, [went_on, f"server keeps {', '.join(kept)}" if kept else "server holds nothing"]))


@dataclass(frozen=True)
class Observation:
    """What came of a fault."""

    outcome: str
    afterwards: str


async def observe(fault: Fault, transport: Transport) -> Observation:
    """Run prefill, modify and decode with `fault` in its phase, to the right end, and tell what was seen.

    Raises:
        AssertionError: Something was not as it must be.
    """
    seen: list[tuple[str, str]] = []

    async def connect(stack: Stack, connecting: Callable[[], Awaitable[AsyncKVCacheContext]]) -> AsyncKVCacheContext:
        if fault.phase != "connect":
            return await connecting()
        await _done(fault.order, stack)
        try:
            ctx = await connecting()
        except LMCacheError as error:
            seen.append((_judged(fault, error), REPEATED))
            await _done(fault.lift, stack)
            return await connecting()
        seen.append((Survives().described(), ""))
        return ctx

    async with opened(
        shared_memory=transport == "shared memory",
        batch=fault.side == "batch",
        proxied=fault.proxied or fault.side == "network",
        client=fault.client,
        connect=connect,
        stays_registered=fault.registered,
    ) as stack:
        for phase in PHASES:
            if phase == fault.phase:
                seen.append(await _under_fault(fault, stack))
            else:
                await stack.run(phase)
        stack.check_streams()
        await stack.until_let_go(fault.leaves)
        await stack.struck()
        assert stack.server.wrong_publications == 0
        assert stack.server.wrong_unlocks == 0
    assert stack.server.held == fault.leaves
    ((outcome, went_on),) = seen
    return Observation(outcome, ended(went_on, stack.server.held, len(stack.server.clients)))


async def _under_fault(fault: Fault, stack: Stack) -> tuple[str, str]:
    await _done(fault.order, stack)
    before = stack.snapshots()
    error = await _attempt(fault, stack)
    if error is None:
        await _done(fault.lift, stack)
        return Survives().described(), ""
    outcome = _judged(fault, error)
    failed = list(error.failures) if isinstance(error, LMCacheBatchedStreamError) else None
    arrived = fault.expect.arrived if isinstance(fault.expect, Raises) else 0
    for stream, was, now in zip(stack.streams, before, stack.snapshots(), strict=True):
        if failed is not None and stream.stream_id() not in failed:
            assert now != was, "a stream that did not fail did nothing"
        elif not arrived:
            assert now == was, f"{was} became {now}"
        else:
            assert len(now[2]) == len(was[2]) + arrived
    await _done(fault.lift, stack)
    if fault.restarted:
        stack.make_streams()
        for phase in PHASES[: PHASES.index(fault.phase) + 1]:
            await stack.run(phase)
        return outcome, BEGUN_ANEW
    if not arrived:
        await stack.run(fault.phase, failed)
        return outcome, REPEATED
    for stream in stack.streams:
        if arrived < DECODED and (failed is None or stream.stream_id() in failed):
            await stream.generate({"max_tokens": DECODED - arrived})
    return outcome, GONE_ON


async def _attempt(fault: Fault, stack: Stack) -> BaseException | None:
    patient = stack.ctx.timeout, stack.coverage_timeout
    stack.ctx.timeout = fault.patience or patient[0]
    stack.coverage_timeout = fault.coverage or fault.patience or patient[1]
    stack.call_timeout = fault.timeout
    task = asyncio.create_task(stack.run(fault.phase))
    try:
        if fault.meanwhile is not None:
            await fault.meanwhile(stack, task)
        await task
    except (LMCacheError, asyncio.CancelledError) as error:
        return error
    finally:
        stack.ctx.timeout, stack.coverage_timeout = patient
        stack.call_timeout = None
    return None


def _judged(fault: Fault, error: BaseException) -> str:
    """The outcome in words, from what was raised; an `AssertionError` shows it where it is another one."""
    if isinstance(error, LMCacheBatchedStreamError):
        described = {_described(fault, failure) for failure in error.failures.values()}
        assert len(error.failures) == fault.befalls
        (outcome,) = described
        return outcome
    return _described(fault, error)


def _described(fault: Fault, error: BaseException) -> str:
    expected = fault.expect
    words = expected.words if isinstance(expected, Raises) else ""
    one_of = (words,) if isinstance(words, str) else words
    assert any(one in str(error) for one in one_of), f"{type(error).__name__}: {error}"
    cause = None if error.__cause__ is None else type(error.__cause__)
    if isinstance(expected, Raises) and (expected.cause is None or isinstance(error.__cause__, expected.cause)):
        cause = expected.cause
    seen = Raises(type(error), words, cause, error.arrived if isinstance(error, LMCacheStreamError) else 0)
    assert seen == expected, f"{seen.described()}: {error!r} ← {error.__cause__!r}"
    if isinstance(error, LMCacheStreamError) and fault.phase != "modify":
        assert error.suffix_consumed is (error.arrived > 0)
    return seen.described()


async def _done(order: Order | None, stack: Stack) -> None:
    if order is not None:
        result = order(stack)
        if inspect.isawaitable(result):
            await result
