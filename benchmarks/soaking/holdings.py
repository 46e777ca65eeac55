"""What this process holds, and whether its memory grows."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

__all__ = ["Holdings", "Memory", "holdings", "until_no_more_than"]

SHM = Path("/dev/shm")
LOOP_POOLS = ("asyncio", "AnyIO worker thread")
"""Threads that an event loop keeps until its end, as many as it needed once."""


@dataclass(frozen=True)
class Holdings:
    """Descriptors, threads, tasks and shared-memory segments, each by name."""

    descriptors: Counter[str]
    threads: Counter[str]
    tasks: Counter[str]
    segments: Counter[str]

    def beyond(self, other: Holdings) -> dict[str, dict[str, int]]:
        """What is held here beyond `other`, by kind and name."""
        more = {name: dict(getattr(self, name) - getattr(other, name)) for name in self.__dataclass_fields__}
        return {kind: names for kind, names in more.items() if names}

    def counts(self) -> dict[str, int]:
        """How many of each kind."""
        return {name: getattr(self, name).total() for name in self.__dataclass_fields__}


def holdings(owns: Callable[[str], bool]) -> Holdings:
    """What this process and its event loop hold now; `owns` tells our segments from those of other programs."""
    descriptors: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            descriptors[os.readlink(descriptor).partition(":")[0]] += 1
        except FileNotFoundError:
            continue  # that of the listing itself
    tasks = Counter(getattr(task.get_coro(), "__qualname__", "task") for task in asyncio.all_tasks())
    threads = Counter(thread.name.rstrip("-_0123456789") for thread in threading.enumerate())
    for pool in LOOP_POOLS:
        del threads[pool]
    shared = Counter(path.name for path in SHM.iterdir() if owns(path.name))
    return Holdings(descriptors, threads, tasks, shared)


async def until_no_more_than(
    before: Holdings, owns: Callable[[str], bool], seconds: float
) -> dict[str, dict[str, int]]:
    """Wait until nothing is held beyond `before`, at most `seconds`; what there is then."""
    deadline = time.monotonic() + seconds
    while (more := holdings(owns).beyond(before)) and time.monotonic() < deadline:
        await anyio.sleep(0.1)
        gc.collect()
    return more


def resident(kind: str) -> int:
    """Resident bytes of this process of a kind: a name of `/proc/PID/status` (proc(5)), in kB there."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) << 10


@dataclass
class Memory:
    """Resident memory over time: what this process has alone, and the pages that it shares with a server.

    The shared ones come and go with the server's pool, as far as that is mapped when somebody looks, so that only its
    own ones tell a leak. A pool that is mapped for longer than it should be holds a descriptor, which `Holdings` has.

    Args:
        warm_up: Share of the samples that counts as warm-up.

    Attributes:
        samples: Seconds since the start, and bytes of its own.
        shared: Bytes shared, one for each sample.
    """

    warm_up: float = 1 / 3
    samples: list[tuple[float, int]] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)

    def look(self, at: float) -> None:
        """Take a sample, `at` seconds from the start."""
        gc.collect()
        own, shared = (resident(kind) for kind in ("RssAnon", "RssShmem"))
        self.samples.append((at, own))
        self.shared.append(shared)

    def after_warm_up(self) -> Sequence[tuple[float, int]]:
        """The samples that count."""
        return self.samples[int(len(self.samples) * self.warm_up) :]

    def slope(self) -> float:
        """Bytes a second after the warm-up, 0 for fewer than three samples: the median over all pairs (Theil and Sen),
        which one sample that is given back again does not move."""
        counted = self.after_warm_up()
        if len(counted) < 3:
            return 0.0
        pairs = itertools.combinations(counted, 2)
        return statistics.median((size - before) / (at - since) for (since, before), (at, size) in pairs)

    def growth(self) -> float:
        """Bytes by which memory grew after the warm-up, along the slope."""
        counted = self.after_warm_up()
        return self.slope() * (counted[-1][0] - counted[0][0]) if counted else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything in MiB, as JSON values."""
        return {
            "samples": [[round(at, 1), round(size / 2**20, 1)] for at, size in self.samples],
            "shared": [round(size / 2**20, 1) for size in self.shared],
            "slope_mib_per_minute": self.slope() * 60 / 2**20,
            "growth_mib": self.growth() / 2**20,
        }
