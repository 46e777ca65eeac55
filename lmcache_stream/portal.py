"""The one background event loop behind every synchronous face.

`run` works in a script, in any thread, and in a notebook whose kernel already runs a loop, because the coroutine runs
on a loop of its own, in a daemon thread that lives as long as the process. A forked child gets a new one.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from concurrent.futures import Future
from typing import Generic, ParamSpec, TypeVar

from lmcache_stream.errors import UsageError

__all__ = ["iterate", "run"]

T = TypeVar("T")
P = ParamSpec("P")

_QUEUE_ITEMS = 256
_STOP_SECONDS = 5.0


def run(fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `await fn(*args, **kwargs)` on the background loop and wait for its result.

    It sees the caller's context variables. An exception raised in the caller while it waits (Ctrl-C, above all) cancels
    the task, waits until its clean-up is done, and goes on; a second Ctrl-C does not wait.

    Raises:
        UsageError: Called on the background loop itself, where waiting would never end; `await` there instead.
    """

    async def call() -> T:
        return await fn(*args, **kwargs)

    task = _Task(_current_portal(), call)
    try:
        task.start()
        return task.outcome.result()
    except BaseException:
        task.cancel_and_wait()
        raise
    finally:
        del task  # see `finishing`


def iterate(open_: Callable[[], AsyncIterator[T]]) -> Generator[T, None, None]:
    """Iterate over `open_()` from synchronous code, with at most a few hundred items read ahead.

    One task on the background loop reads the async iterator, so its code sees one task and one set of context
    variables. Closing, abandoning or interrupting the iteration cancels that task, which closes the async iterator,
    and waits for it.

    Raises:
        UsageError: Iterated on the background loop itself; use `async for` there instead.
    """
    portal = _current_portal()
    queue: _Queue[T] = _Queue(portal.loop)
    task = _Task(portal, lambda: queue.fill(open_))
    task.outcome.add_done_callback(lambda _: queue.end())
    try:
        task.start()
        while items := queue.take():
            yield from items
        task.outcome.result()
    except GeneratorExit:
        task.cancel_and_wait()
        if task.outcome.done() and isinstance(failure := task.outcome.exception(), Exception):
            raise failure from None
        raise
    finally:
        task.cancel_and_wait()


class _Portal:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._stopping = False
        self.thread = threading.Thread(target=self._main, name="lmcache-stream-portal", daemon=True)
        self.thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._stopping:
            # A task that calls `sys.exit` would end the loop for everybody; its own caller gets the exception.
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                continue

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._wind_down(), self.loop)
        self.thread.join(2 * _STOP_SECONDS)
        if not self.thread.is_alive():
            self.loop.close()

    async def _wind_down(self) -> None:
        try:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_STOP_SECONDS)
            await self.loop.shutdown_asyncgens()
        finally:
            self._stopping = True
            self.loop.stop()


class _Task(Generic[T]):
    """A task on the portal's loop, begun, cancelled and waited for from another thread."""

    def __init__(self, portal: _Portal, call: Callable[[], Awaitable[T]]) -> None:
        self.outcome: Future[T] = Future()
        self._portal = portal
        self._call = call
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        self._portal.loop.call_soon_threadsafe(self._start)

    def cancel_and_wait(self) -> None:
        """Do nothing when the task is done."""
        if self.outcome.done() or self._portal.loop.is_closed():
            return
        self._portal.loop.call_soon_threadsafe(self._cancel)
        if threading.current_thread() is not self._portal.thread:
            self.outcome.exception()

    def _start(self) -> None:
        begin = self._call

        async def call() -> T:
            return await begin()

        self._task = self._portal.loop.create_task(call(), context=self._context)
        self._task.add_done_callback(self._deliver)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.outcome.done():
            self.outcome.set_exception(asyncio.CancelledError())

    def _deliver(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.outcome.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


class _Queue(Generic[T]):
    """Items from one task on the loop to one thread, in batches: as many as there are at each `take`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._room = asyncio.Event()
        self._changed = threading.Condition()
        self._items: list[T] = []
        self._ended = False

    async def fill(self, open_: Callable[[], AsyncIterator[T]]) -> None:
        iterator = open_()
        try:
            async for item in iterator:
                with self._changed:
                    self._items.append(item)
                    full = len(self._items) >= _QUEUE_ITEMS
                    self._changed.notify()
                if full:
                    self._room.clear()
                    await self._room.wait()
        finally:
            aclose = getattr(iterator, "aclose", None)
            if aclose is not None:
                await aclose()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def take(self) -> list[T]:
        """Wait for items; none means that the iterator ended."""
        with self._changed:
            while not self._items and not self._ended:
                self._changed.wait()
            items, self._items = self._items, []
        if len(items) >= _QUEUE_ITEMS:
            self._loop.call_soon_threadsafe(self._room.set)
        return items


_lock = threading.Lock()
_portal: _Portal | None = None
_parents_portals: list[_Portal] = []


def _current_portal() -> _Portal:
    global _portal
    with _lock:
        if _portal is None:
            _portal = _Portal()
        portal = _portal
    if threading.current_thread() is portal.thread:
        raise UsageError("a synchronous call on the background event loop would wait for itself: use its async twin")
    return portal


def _stop() -> None:
    global _portal
    with _lock:
        portal, _portal = _portal, None
    if portal is not None:
        portal.stop()


def _forget_after_fork() -> None:
    global _lock, _portal
    _lock = threading.Lock()
    if _portal is not None:
        # Kept alive: collecting the parent's loop here would touch the selector that both processes share.
        _parents_portals.append(_portal)
        _portal = None


atexit.register(_stop)
os.register_at_fork(after_in_child=_forget_after_fork)
