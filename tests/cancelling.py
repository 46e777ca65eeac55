"""Cancels a coroutine at each of its awaits, one run after another."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any


class _CancelAt:
    """Awaits `coroutine` and cancels the task around it when it suspends for the `at`-th time."""

    def __init__(self, coroutine: Any, at: int) -> None:
        self._coroutine = coroutine
        self._at = at
        self.suspensions = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        steps = self._coroutine.__await__()
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                waited = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value
            value, error = None, None
            self.suspensions += 1
            if self.suspensions == self._at:
                task.cancel()
            try:
                value = yield waited
            except BaseException as thrown:
                error = thrown


async def cancelled_at_each_await(
    operation: Callable[[], Awaitable[Any]], *, limit: int = 400
) -> AsyncIterator[tuple[int, bool]]:
    """Run `operation()` again and again, cancelled at its first, second, ... suspension.

    Yields (suspension, whether the run was cancelled) after each run; ends after the first run that was not.
    """
    for at in range(1, limit):
        run = _CancelAt(operation(), at)

        async def body(run: _CancelAt = run) -> Any:
            return await run

        task = asyncio.create_task(body())
        await asyncio.wait([task])
        if task.cancelled():
            yield at, True
            continue
        task.result()
        yield at, False
        if run.suspensions < at:
            return
    raise AssertionError(f"more than {limit} suspensions")


class WatchedRun:
    """One run of an operation: its own suspensions and those of every task that it starts are its points.

    Args:
        at: The point at which it is cancelled, 0 for before it begins; None: never.
        insist: Whether it is cancelled at every point from there on.
    """

    def __init__(self, at: int | None, *, insist: bool = False) -> None:
        self._at = at
        self._insist = insist
        self.points = 0
        self.tasks: list[asyncio.Task[Any]] = []
        self._root: asyncio.Task[Any] | None = None

    async def __call__(self, operation: Callable[[], Awaitable[Any]]) -> bool:
        """Run `operation()`; whether it was cancelled. What else it raises is raised."""

        async def body() -> Any:
            return await operation()

        context = contextvars.copy_context()
        context.run(_watching.set, self)
        self._root = root = asyncio.get_running_loop().create_task(body(), context=context)
        if self._at == 0:
            root.cancel()
        await asyncio.wait([root])
        self._root = None
        asked = self._at is not None and self.points >= self._at
        if root.cancelled():
            assert asked, "cancelled by itself"
            return True
        root.result()
        assert not asked, f"went on although it was cancelled at point {self._at}"
        return False

    def suspended(self) -> None:
        """One of its tasks is about to wait."""
        if self._root is None or self._root.done():
            return
        self.points += 1
        if self._at and (self.points == self._at or (self._insist and self.points > self._at)):
            self._root.cancel()


_watching: contextvars.ContextVar[WatchedRun | None] = contextvars.ContextVar("watching", default=None)


class _Counted(Coroutine[Any, Any, Any]):
    """A coroutine that tells of its suspensions."""

    def __init__(self, coroutine: Any, run: WatchedRun) -> None:
        self._coroutine = coroutine
        self._run = run

    def send(self, value: Any) -> Any:
        waited = self._coroutine.send(value)
        self._run.suspended()
        return waited

    def throw(self, *error: Any) -> Any:
        try:
            waited = self._coroutine.throw(*error)
        finally:
            del error  # its traceback leads here: a circle that keeps all that it ran through
        self._run.suspended()
        return waited

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("only tasks run it")


@contextmanager
def tasks_watched() -> Iterator[None]:
    """Let the running loop's tasks count their suspensions for the `WatchedRun` that they belong to."""
    loop = asyncio.get_running_loop()

    def make(
        loop: asyncio.AbstractEventLoop, work: Any, *, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        run = _watching.get() if context is None else context.get(_watching)
        if run is None:
            return asyncio.Task(work, loop=loop, context=context)
        task = asyncio.Task(_Counted(work, run), loop=loop, context=context)
        run.tasks.append(task)
        return task

    loop.set_task_factory(make)
    try:
        yield
    finally:
        loop.set_task_factory(None)
