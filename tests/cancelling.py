"""Cancels a coroutine at each of its awaits, one run after another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
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
