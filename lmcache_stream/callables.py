"""Runs what users hand in, sync or async, without letting it block the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final, TypeVar

import anyio

from lmcache_stream.errors import UsageError
from lmcache_stream.types import AsyncPostCompletion, Completion, PostCompletion, TokenEvent

T = TypeVar("T")
Items = Sequence[TokenEvent | Completion]

_CLOSE_TIMEOUT: Final = 5.0
_MAX_AHEAD: Final = 1024


def runs_on_loop(fn: Callable[..., Any]) -> bool:
    """Whether calling `fn` gives a coroutine or an async generator, so that the call itself cannot block."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    call = fn if inspect.isroutine(fn) else type(fn).__call__
    return inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call)


async def abandonable_thread(fn: Callable[..., T], *args: Any) -> T:
    """Run blocking `fn` in a thread of its own. Cancelled: the thread is let go and its result dropped.

    It is a daemon: a call that blocks for ever does not keep the process from its end.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    work = functools.partial(contextvars.copy_context().run, fn, *args)
    del args
    threading.Thread(target=_deliver, args=(work, loop, outcome), name="lmcache-stream-user", daemon=True).start()
    del work
    try:
        return await outcome
    finally:
        del outcome  # see `finishing`


def _deliver(work: Callable[[], T], loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[T]) -> None:
    settle: Callable[[Any], None] = outcome.set_result
    value: Any
    try:
        value = work()
    except StopIteration as error:
        settle, value = outcome.set_exception, RuntimeError("StopIteration was raised, which no future can carry")
        value.__cause__ = error
    except BaseException as error:
        settle, value = outcome.set_exception, error
    with suppress(RuntimeError):  # the loop closed meanwhile
        loop.call_soon_threadsafe(_unless_cancelled, outcome, settle, value)
    del outcome, settle, value


def _unless_cancelled(outcome: asyncio.Future[Any], settle: Callable[[Any], None], value: Any) -> None:
    if not outcome.done():
        settle(value)


async def call(fn: Callable[..., Any], *args: Any) -> Any:
    """The result of sync or async `fn`; a sync one runs in a thread of its own."""
    result = fn(*args) if runs_on_loop(fn) else await abandonable_thread(fn, *args)
    return await result if inspect.isawaitable(result) else result


async def event_batches(
    post_completion: PostCompletion | AsyncPostCompletion,
    prompt_token_ids: list[int],
    sampling_params: Mapping[str, Any],
    cache_salt: str,
) -> AsyncGenerator[Items, None]:
    """What `post_completion` yields, in batches of what came together.

    A callable with an async generator method `batches` is asked for batches; an async one is iterated on the loop; a
    blocking one is called and iterated in one thread. Leaving early closes whatever it opened; a blocking iterable is
    closed by its thread, as soon as that comes to its next item.
    """
    args = (prompt_token_ids, sampling_params, cache_salt)
    batches = getattr(post_completion, "batches", None)
    if inspect.isasyncgenfunction(batches):
        async with aclosing(batches(*args)) as produced:
            async for batch in produced:
                yield batch if isinstance(batch, list) else [batch]
        return
    if not runs_on_loop(post_completion):
        async with aclosing(_BlockingRun(post_completion, args).batches()) as run:
            async for batch in run:
                yield batch
        return
    result: Any = post_completion(*args)
    async with aclosing(_iterate(await result if inspect.isawaitable(result) else result)) as items:
        async for batch in items:
            yield batch


async def _iterate(produced: Any) -> AsyncGenerator[Items, None]:
    if isinstance(produced, AsyncIterable):
        iterator = aiter(produced)
        try:
            async for item in iterator:
                yield [item]
        finally:
            if isinstance(iterator, AsyncGenerator):
                with anyio.move_on_after(_CLOSE_TIMEOUT, shield=True):
                    await iterator.aclose()
    elif isinstance(produced, Iterable):
        async with aclosing(_BlockingRun(lambda: produced, ()).batches()) as run:
            async for batch in run:
                yield batch
    else:
        raise _gives_nothing(produced)


def _gives_nothing(produced: object) -> UsageError:
    return UsageError(
        f"an engine (post_completion, probe) must give an iterable of TokenEvent, not {type(produced).__name__}: see "
        "PostCompletion"
    )


class _BlockingRun:
    """One thread calls and iterates; the loop takes what has piled up, at most `_MAX_AHEAD` items behind."""

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._call = call
        self._args = args
        self._ready: deque[TokenEvent | Completion] = deque()
        self._handed_over: Any = None
        self._room = threading.Condition()
        self._stopped = False
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()

    async def batches(self) -> AsyncGenerator[Items, None]:
        thread = asyncio.ensure_future(abandonable_thread(self._work))
        thread.add_done_callback(lambda _: self._arrived.set())
        try:
            while True:
                finished = thread.done()
                if ready := self._take():
                    yield ready
                elif finished:
                    break
                else:
                    await self._arrived.wait()
                    self._arrived.clear()
            await thread
        finally:
            self._stop()
            thread.cancel()  # who blocks is not waited for: it sees that it was stopped when it goes on
            with anyio.CancelScope(shield=True):
                await asyncio.wait([thread], timeout=_CLOSE_TIMEOUT)
            if thread.done() and not thread.cancelled():
                thread.exception()  # seen by the caller already, or nobody wants it any more
        if self._handed_over is not None:
            produced = self._handed_over
            async with aclosing(_iterate(await produced if inspect.isawaitable(produced) else produced)) as items:
                async for batch in items:
                    yield batch

    def _work(self) -> None:
        produced = self._call(*self._args)
        if inspect.isawaitable(produced) or isinstance(produced, AsyncIterable):
            self._handed_over = produced
            return
        if not isinstance(produced, Iterable):
            raise _gives_nothing(produced)
        iterator = iter(produced)
        try:
            for item in iterator:
                if not self._deliver(item):
                    break
        finally:
            if isinstance(iterator, Generator):
                iterator.close()

    def _deliver(self, item: TokenEvent | Completion) -> bool:
        with self._room:
            self._room.wait_for(lambda: self._stopped or len(self._ready) < _MAX_AHEAD)
            if self._stopped:
                return False
            first = not self._ready
            self._ready.append(item)
        if first:
            self._wake()
        return True

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:  # the loop closed while the thread was blocked
            self._stop()

    def _take(self) -> list[TokenEvent | Completion]:
        with self._room:
            batch = list(self._ready)
            self._ready.clear()
            self._room.notify()
        return batch

    def _stop(self) -> None:
        with self._room:
            self._stopped = True
            self._room.notify()
