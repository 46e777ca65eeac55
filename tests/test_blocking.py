"""The watch over blocking calls that every test runs under."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockingError

import lmcache_stream


def of_the_package(source: str, folder: str = "") -> Any:
    """The function `made` of a source that counts as the package's."""
    scope: dict[str, Any] = {"time": time, "asyncio": asyncio}
    exec(compile(source, str(Path(lmcache_stream.__path__[0], folder, "made.py")), "exec"), scope)
    return scope["made"]


SLEEPS = "def sleeps():\n    time.sleep(0)\n"


async def test_a_coroutine_of_the_package_must_not_block() -> None:
    with pytest.raises(BlockingError, match=r"time\.sleep"):
        await of_the_package(f"{SLEEPS}\nasync def made():\n    sleeps()\n")()


async def test_nor_must_a_callback_of_it() -> None:
    caught: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: caught.append(context))
    loop.call_soon(of_the_package("def made():\n    time.sleep(0)\n"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    loop.set_exception_handler(None)
    assert [type(context["exception"]) for context in caught] == [BlockingError]


async def test_a_thread_of_it_may() -> None:
    await of_the_package(f"{SLEEPS}\nasync def made():\n    await asyncio.to_thread(sleeps)\n")()


async def test_so_may_a_test_and_a_fake() -> None:
    time.sleep(0)  # noqa: ASYNC251
    os.stat(__file__)
    of_the_package("def made():\n    time.sleep(0)\n")()
    await of_the_package("async def made():\n    time.sleep(0)\n", "testing")()
