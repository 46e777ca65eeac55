"""The synchronous face: what a call and an item cost that cross from a thread to the background event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio.from_thread
from common import CLIENT_CORE, arguments, in_child, interleaved, median, ratio, report, span

from lmcache_stream import portal

ALONE, RUN, ANYIO, ASYNCIO = "await, no portal", "portal.run", "anyio portal", "run_coroutine_threadsafe"
ITERATED, ITERATE, ITERATE_SLOW, HOP = (
    "async for, no portal",
    "portal.iterate",
    "portal.iterate, 1 ms apart",
    "hop a token",
)


@dataclass(frozen=True)
class Run:
    """One run as it was measured: microseconds of wall and of CPU time a call or an item."""

    wall_us: float
    cpu_us: float


async def nothing() -> None:
    await asyncio.sleep(0)


async def items(count: int, gap: float = 0.0) -> AsyncIterator[int]:
    for item in range(count):
        await asyncio.sleep(gap)
        yield item


def awaited(count: int) -> None:
    async def calls() -> None:
        for _ in range(count):
            await nothing()

    asyncio.run(calls())


def run_each(count: int) -> None:
    for _ in range(count):
        portal.run(nothing)


def anyio_each(count: int) -> None:
    with anyio.from_thread.start_blocking_portal() as blocking_portal:
        for _ in range(count):
            blocking_portal.call(nothing)


def asyncio_each(count: int) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    for _ in range(count):
        asyncio.run_coroutine_threadsafe(nothing(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def async_for(count: int) -> None:
    async def consume() -> int:
        return sum([1 async for _ in items(count)])

    assert asyncio.run(consume()) == count


def iterate(count: int, gap: float = 0.0) -> None:
    assert sum(1 for _ in portal.iterate(lambda: items(count, gap))) == count


def hop_a_token(count: int) -> None:
    iterator = items(count)

    async def step() -> int | None:
        return await anext(iterator, None)

    seen = 0
    while portal.run(step) is not None:
        seen += 1
    assert seen == count


def measure(fn: Callable[[int], None], count: int) -> Run:
    """One run in this process; the first calls, which start a thread, are not counted."""
    fn(10)
    cpu, begin = time.process_time(), time.perf_counter()
    fn(count)
    return Run(1e6 * (time.perf_counter() - begin) / count, 1e6 * (time.process_time() - cpu) / count)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=3000, help="calls and items of a run")
    args = parser.parse_args()
    works: dict[str, Callable[[int], None]] = {
        ALONE: awaited,
        RUN: run_each,
        ANYIO: anyio_each,
        ASYNCIO: asyncio_each,
        ITERATED: async_for,
        ITERATE: iterate,
        ITERATE_SLOW: partial(iterate, gap=1e-3),
        HOP: hop_a_token,
    }
    places: dict[str, int | None] = {"any": None, "one": CLIENT_CORE}
    cases = {
        (name, cores): partial(in_child, measure, work, args.count // (10 if name == ITERATE_SLOW else 1), core=core)
        for cores, core in places.items()
        for name, work in works.items()
    }
    results = interleaved(cases, args.repeats)

    def wall(name: str) -> list[float]:
        return [run.wall_us for run in results[name, "any"]]

    def cpu(name: str) -> list[float]:
        return [run.cpu_us for run in results[name, "any"]]

    rows: list[dict[str, Any]] = [
        {
            "what": name,
            "cores": cores,
            "a": "call" if name in (ALONE, RUN, ANYIO, ASYNCIO) else "item",
            "us wall": median([run.wall_us for run in runs]),
            "us CPU": median([run.cpu_us for run in runs]),
            "range": span([run.wall_us for run in runs]),
        }
        for (name, cores), runs in results.items()
    ]
    summary = {
        "us_per_call": median(wall(RUN)),
        "us_per_item": median(wall(ITERATE)),
        "us_per_item_by_hops": median(wall(HOP)),
        "cpu_us_per_item_1ms_apart": median(cpu(ITERATE_SLOW)),
        "call_vs_anyio": ratio(wall(RUN), wall(ANYIO)),
        "call_vs_asyncio": ratio(wall(RUN), wall(ASYNCIO)),
        "item_vs_hop": ratio(wall(ITERATE), wall(HOP)),
    }
    report(args, "From a thread to the background event loop and back", rows, summary)


if __name__ == "__main__":
    main()
