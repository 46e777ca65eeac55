"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")

STARTS_WITHIN = 90.0


class Page:
    """The one tab of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression gives; a promise is waited for."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def wait_until(self, expression: str) -> None:
        """Wait until a JavaScript expression holds in the page that is shown."""
        while not await self.value(f"Boolean({expression})"):  # noqa: ASYNC110  (another process)
            await asyncio.sleep(0.05)


@asynccontextmanager
async def open_page(profile: Path) -> AsyncIterator[Page]:
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0"]
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *flags,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    try:
        async with asyncio.timeout(STARTS_WITHIN):
            port = await port_of(profile)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tabs = json.loads(await answer.text())
            (url,) = [tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"]
            async with session.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                yield page
                await page.call("Browser.close")
                async with asyncio.timeout(10):
                    await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def port_of(profile: Path) -> int:
    told = profile / "DevToolsActivePort"
    while not (told.exists() and "\n" in told.read_text()):  # noqa: ASYNC110  (another process)
        await asyncio.sleep(0.05)
    return int(told.read_text().split("\n")[0])
