from __future__ import annotations

import asyncio

from lmcache_stream.completions.pacing import StartPacer


async def starts_by_pass(pacer: StartPacer, waiters: int) -> list[int]:
    loop = asyncio.get_running_loop()
    counts = [0]
    left = waiters

    async def start() -> None:
        nonlocal left
        await pacer.turn()
        counts[-1] += 1
        left -= 1

    def next_pass() -> None:
        counts.append(0)
        if left:
            loop.call_soon(next_pass)

    loop.call_soon(next_pass)
    await asyncio.gather(*(start() for _ in range(waiters)))
    return counts


async def test_no_pass_of_the_loop_starts_more_than_its_share() -> None:
    counts = await starts_by_pass(StartPacer(4), 103)
    assert sum(counts) == 103
    assert max(counts) <= 8  # turns of one pass that waited, and of the next that did not have to


async def test_first_come_first_served_and_the_cancelled_do_not_hold_the_others() -> None:
    pacer = StartPacer(1)
    order: list[int] = []

    async def start(number: int) -> None:
        await pacer.turn()
        order.append(number)

    tasks = [asyncio.create_task(start(number)) for number in range(10)]
    await asyncio.sleep(0)
    for number in (3, 4, 9):
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 1, 2, 5, 6, 7, 8]
    await asyncio.wait_for(pacer.turn(), 5)
