"""What watches the cancellations notices what it is there for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading

import pytest

from tests.cancelling import WatchedRun, tasks_watched

from .traces import Traces, pending_futures


async def two_tasks() -> None:
    await asyncio.sleep(0)
    await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0))


async def test_points_are_those_of_all_tasks_and_each_can_be_cancelled_at() -> None:
    with tasks_watched():
        whole = WatchedRun(None)
        assert not await whole(two_tasks)
        assert whole.points == 4  # its own two, and one of each task
        assert [await WatchedRun(at)(two_tasks) for at in range(6)] == [True] * 5 + [False]


async def test_a_cancellation_that_is_swallowed_is_noticed() -> None:
    async def swallow() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)

    with tasks_watched(), pytest.raises(AssertionError, match="went on although"):
        await WatchedRun(1)(swallow)


async def test_a_cancellation_that_is_wrapped_is_noticed() -> None:
    async def wrap() -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError as error:
            raise RuntimeError("wrapped") from error

    with tasks_watched(), pytest.raises(RuntimeError, match="wrapped"):
        await WatchedRun(1)(wrap)


async def test_again_and_again_reaches_what_cleans_up() -> None:
    cleaned = []

    async def clean_up() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    with tasks_watched():
        assert await WatchedRun(1)(clean_up)
        assert cleaned == [True]
        assert await WatchedRun(1, insist=True)(clean_up)
        assert cleaned == [True]


async def test_what_is_left_behind_is_noticed() -> None:
    never = asyncio.Event()
    left: list[asyncio.Task[bool]] = []

    async def leave_a_task() -> None:
        left.append(asyncio.create_task(never.wait()))

    futures, before = len(pending_futures()), Traces.now()
    with tasks_watched():
        run = WatchedRun(None)
        await run(leave_a_task)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left")
    thread.start()
    ends = os.pipe()
    try:
        await asyncio.sleep(0)
        new = " ".join(before.new(run.tasks))
        assert "pending <Task" in new
        assert "thread left" in new
        assert "descriptor pipe" in new
        assert len(pending_futures()) >= futures + 2  # the task, and what it waits for
        with pytest.raises(AssertionError, match="left behind"):
            await before.gone(run.tasks, within=0)
        with pytest.raises(AssertionError, match="held at a server"):
            await Traces.now().gone([], held=lambda: True, within=0)
    finally:
        stop.set()
        thread.join()
        for end in ends:
            os.close(end)
        left[0].cancel()
    await before.gone(run.tasks)
