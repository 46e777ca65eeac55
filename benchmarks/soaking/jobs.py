"""One stream's life in a soak: prefill, modify, decode; every token and every state is held against what it must be."""

from __future__ import annotations

import abc
import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from lmcache_stream.errors import EditNotUsed, LMCacheStreamError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from lmcache_stream.editors import Editor
    from lmcache_stream.kvcache import AsyncKVCacheContext
    from lmcache_stream.stream import AsyncLMCacheStream, ModifyReceipt
    from lmcache_stream.stream.edits import ModifyFn
    from soaking.tally import Tally

__all__ = ["Job", "Patience", "Step", "World", "live"]

ATTEMPTS = 3
CANCELLED_SHARE = 0.12


@dataclass(frozen=True)
class Patience:
    """Seconds that a request and an edit may take, and before which mean a call is cancelled."""

    request: float
    edit: float
    cancel_after: float


@dataclass(frozen=True)
class Step:
    """One call of a stream.

    Args:
        kind: "prefill" and "decode" are `generate`, "events" is the same token by token.
        tokens: To generate.
        leave_after: Tokens after which "events" are left; None: they are not.
        editor: Of "modify".
    """

    kind: Literal["prefill", "decode", "events", "modify"]
    tokens: int = 0
    leave_after: int | None = None
    editor: ModifyFn | Editor | None = None


class Job(abc.ABC):
    """A stream with what is expected of it.

    Attributes:
        stream: The stream.
        lost: Whether it cannot be told any more what it should bring.
    """

    stream: AsyncLMCacheStream
    lost: bool = False

    @abc.abstractmethod
    def steps(self) -> Iterator[Step]:
        """The calls, one after another; the next is asked for when the last has succeeded or been given up."""

    def left_of(self, step: Step) -> int:
        """Tokens that a request still has to bring, when it is tried again."""
        return step.tokens

    @abc.abstractmethod
    def before(self, step: Step) -> None:
        """Remember how the stream is."""

    @abc.abstractmethod
    def requested(self, step: Step, failure: BaseException | None, tally: Tally) -> None:
        """Hold what a request brought against what it must bring."""

    @abc.abstractmethod
    def edited(self, step: Step, receipt: ModifyReceipt | None, tally: Tally) -> None:
        """Hold the stream after an edit against what it must be; None: the edit failed."""


class World(abc.ABC):
    """Servers, how they are troubled, and jobs that use them.

    Attributes:
        streams: At once.
        storm_s: Seconds with faults in each round.
        calm_s: Seconds without.
        calm: Whether no fault is about.
    """

    name: str
    ctx: AsyncKVCacheContext
    streams: int
    storm_s: float
    calm_s: float
    calm: bool = True

    @abc.abstractmethod
    async def __aenter__(self) -> Self: ...

    @abc.abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abc.abstractmethod
    def job(self, chance: random.Random) -> Job:
        """A new stream."""

    @abc.abstractmethod
    async def storm(self, until: Callable[[], bool]) -> None:
        """Make trouble until it is time to end."""

    @abc.abstractmethod
    async def settle(self) -> None:
        """End all trouble and wait until the servers are well."""

    @abc.abstractmethod
    async def held(self) -> dict[str, int]:
        """What the servers hold for clients."""

    async def of_clients(self, held: dict[str, int]) -> dict[str, int]:
        """How much of what is still held is not an engine's."""
        return held

    @abc.abstractmethod
    def owns(self, segment: str) -> bool:
        """Whether a name in `/dev/shm` is of this world."""

    @abc.abstractmethod
    def patience(self) -> Patience:
        """How long calls may take now."""

    def describe(self) -> dict[str, Any]:
        """What ran, as JSON values."""
        return {}


async def live(world: World, tally: Tally, chance: random.Random, until: Callable[[], bool]) -> None:
    """Run one job after another until it is time to end."""
    while not until():
        tally.streams += 1
        await _run(world, world.job(chance), tally, chance, until)


async def _run(world: World, job: Job, tally: Tally, chance: random.Random, until: Callable[[], bool]) -> None:
    for step in job.steps():
        for _ in range(ATTEMPTS):
            if until():
                return
            if step.kind != "modify":
                step = replace(step, tokens=job.left_of(step))
                if step.tokens < 1:
                    break
            outcome = await _attempt(world, job, step, tally, chance)
            if outcome == "lost":
                return
            if outcome == "done":
                break
        else:
            if chance.random() < 0.5:
                return


async def _attempt(
    world: World, job: Job, step: Step, tally: Tally, chance: random.Random
) -> Literal["done", "again", "lost"]:
    calm, patience = world.calm, world.patience()
    job.before(step)
    tally.operations[step.kind] += 1
    receipts: list[ModifyReceipt] = []
    call = asyncio.ensure_future(_call(job.stream, step, patience, receipts))
    cancelled = not calm and chance.random() < CANCELLED_SHARE
    failure: BaseException | None = None
    try:
        if cancelled:
            await asyncio.wait({call}, timeout=chance.expovariate(1 / patience.cancel_after))
            cancelled = call.cancel()
            tally.faults["a call cancelled"] += cancelled
        await asyncio.wait({call})
    finally:
        call.cancel()
    if call.cancelled():
        failure = asyncio.CancelledError()
        if not cancelled:
            tally.unexpected["CancelledError"] += 1
    else:
        failure = call.exception()
    if failure is not None and not call.cancelled():
        calm = calm and world.calm
        tally.error(failure, expected=not calm and isinstance(failure, LMCacheStreamError), during=step.kind)
    if step.kind == "modify":
        job.edited(step, receipts[0] if failure is None else None, tally)
    else:
        job.requested(step, failure, tally)
    if job.lost or isinstance(failure, EditNotUsed):
        return "lost"
    return "done" if failure is None else "again"


async def _call(stream: AsyncLMCacheStream, step: Step, patience: Patience, receipts: list[ModifyReceipt]) -> None:
    if step.kind == "modify":
        assert step.editor is not None
        receipts.append(await stream.modify_kv(step.editor, timeout=patience.edit, poll_interval=0.05))
        return
    params = {"max_tokens": step.tokens, "temperature": 0, "ignore_eos": True}
    if step.kind != "events":
        await stream.generate(params, timeout=patience.request)
        return
    events = stream.events(params, timeout=patience.request)
    came = 0
    try:
        async for _ in events:
            came += 1
            if came == step.leave_after:
                break
    finally:
        await events.aclose()


async def in_turn(
    actions: Sequence[Callable[[], Awaitable[None]]],
    chance: random.Random,
    every: float,
    until: Callable[[], bool],
) -> None:
    """One action after another, drawn at random, with pauses of `every` seconds in the mean."""
    while not until():
        await asyncio.sleep(min(4 * every, chance.expovariate(1 / every)))
        await chance.choice(actions)()
