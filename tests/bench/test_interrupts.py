from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from lmcache_stream.bench.interrupts import ENDING, INTERRUPTED, run_until_interrupt


@pytest.fixture(autouse=True)
def ctrl_c_is_not_ignored() -> Iterator[None]:
    """As on a terminal; a job in the background of a shell is started without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


async def wait_for_the_end() -> None:
    await asyncio.Event().wait()


def test_what_ends_by_itself_was_not_interrupted() -> None:
    said: list[str] = []
    assert not run_until_interrupt(lambda: asyncio.sleep(0), said.append)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert said == []


@pytest.mark.parametrize("presses", [1, 2])
def test_the_first_cancels_and_the_second_does_not_disturb_the_clean_up(presses: int) -> None:
    said: list[str] = []
    cleaned: list[bool] = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(press)
        try:
            await wait_for_the_end()
        finally:
            for _ in range(presses - 1):
                press()
            await asyncio.sleep(0.01)
            cleaned.append(True)

    assert run_until_interrupt(work, said.append)
    assert cleaned == [True]
    assert said == [ENDING] * (presses - 1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_comes_out() -> None:
    async def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_until_interrupt(work, print)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_third_leaves_on_the_spot() -> None:
    program = """
import asyncio, os, signal
from lmcache_stream.bench.interrupts import run_until_interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
async def work():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
run_until_interrupt(work, print)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (INTERRUPTED, "")


def test_a_program_that_handles_it_goes_on_doing_so() -> None:
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:

        async def work() -> None:
            press()
            await asyncio.sleep(0.01)

        assert not run_until_interrupt(work, print)
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [signal.SIGINT]


def test_in_another_thread() -> None:
    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(run_until_interrupt(lambda: asyncio.sleep(0), print)))
    thread.start()
    thread.join()
    assert ended == [False]
