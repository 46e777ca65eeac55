"""What a run may leave behind in this process: tasks, futures, threads, descriptors."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

POOLS = ("lmcache-stream-transfer", "asyncio_")
"""Names of threads that stay for the whole process."""


def threads() -> Counter[str]:
    """Names of the threads outside the standing pools."""
    return Counter(
        thread.name.rsplit(" (", 1)[0] for thread in threading.enumerate() if not thread.name.startswith(POOLS)
    )


def descriptors() -> dict[str, str]:
    """What each open descriptor leads to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # of the listing itself, or closed by another thread
    return found


def pending_futures() -> list[asyncio.Future[Any]]:
    """Futures, tasks among them, that nobody has resolved; what `gc.freeze` put aside is left out."""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), asyncio.Future) and not thing.done()]


@dataclass(frozen=True)
class Traces:
    """What there is at one moment.

    Args:
        threads: By name.
        descriptors: By number.
    """

    threads: Counter[str]
    descriptors: dict[str, str]

    @classmethod
    def now(cls) -> Traces:
        """What there is now."""
        return cls(threads(), descriptors())

    def new(self, tasks: Iterable[asyncio.Task[Any]]) -> list[str]:
        """What there is more of now, in words; `tasks` are to have ended."""
        more = [f"pending {task!r}" for task in tasks if not task.done()]
        more += [f"thread {name}" for name in (threads() - self.threads).elements()]
        now = descriptors()
        if len(now) > len(self.descriptors):
            more += [f"descriptor {what}" for what in (Counter(now.values()) - Counter(self.descriptors.values()))]
        return more

    async def gone(
        self, tasks: list[asyncio.Task[Any]], *, held: Callable[[], bool] = bool, within: float = 10.0
    ) -> None:
        """Wait until nothing is new, and nothing is held at a server.

        Those of `tasks` that have ended are taken out: the error of one holds what it ran into.

        Raises:
            AssertionError: Something stays.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within
        pause = 0.0
        while more := [*self.new(tasks), *(["held at a server"] if held() else [])]:
            assert loop.time() < deadline, f"left behind: {more}"
            tasks[:] = [task for task in tasks if not task.done()]
            await asyncio.sleep(pause)
            pause = min(pause + 0.0005, 0.02)
