from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest

from lmcache_stream.finishing import finish, thread_to_the_end, to_the_end


class Thing:
    pass


async def test_work_goes_on_to_its_end_however_often_it_is_cancelled() -> None:
    going, ended = asyncio.Event(), asyncio.Event()

    async def work() -> str:
        await going.wait()
        ended.set()
        return "done"

    task = asyncio.create_task(to_the_end(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    going.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert await to_the_end(work()) == "done"


async def test_what_it_raises_is_raised_and_dropped_where_nobody_waits() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await to_the_end(work())
    task = asyncio.create_task(to_the_end(work()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_wait_keeps_nothing_alive() -> None:
    async def wait(_: Thing) -> None:
        await to_the_end(asyncio.sleep(0.001))

    thing = Thing()
    alive = weakref.ref(thing)
    gc.disable()
    try:
        task = asyncio.create_task(wait(thing))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        del task, thing
        await asyncio.sleep(0)
        assert alive() is None
    finally:
        gc.enable()


async def test_a_thread_is_waited_for() -> None:
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        go.wait()
        ended.set()
        return 3

    task = asyncio.create_task(thread_to_the_end(work))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert await thread_to_the_end(work) == 3


async def test_the_wait_for_an_end_has_a_bound() -> None:
    task = asyncio.ensure_future(asyncio.Event().wait())
    began = time.monotonic()
    await finish(task, 0.02)
    assert time.monotonic() - began >= 0.02
    assert not task.done()
    task.cancel()
    await finish(task, None)
    assert task.cancelled()
