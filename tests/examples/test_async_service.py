from __future__ import annotations

import argparse
import asyncio
import importlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lmcache_stream import CompletionsClient, aconnect
from lmcache_stream.engine import EmbeddedEngine
from tests.examples.browser import Page, needs_browser, open_page

CACHE = "memory://service-test"
TEXT = "kora mila tenu. " * 60


class Served:
    def __init__(self, url: str, engine: EmbeddedEngine) -> None:
        self.url = url
        self.engine = engine

    async def idle(self) -> None:
        """Wait until the engine computes nothing."""
        async with asyncio.timeout(60):
            while self.engine.unfinished_requests:  # noqa: ASYNC110  (another thread's state)
                await asyncio.sleep(0.02)


@pytest.fixture
async def service(examples: Path, tiny_model_path: Path) -> AsyncIterator[Served]:
    module: Any = importlib.import_module("async_service")
    servers: Any = importlib.import_module("servers")
    async with (
        EmbeddedEngine(tiny_model_path, cache=CACHE) as engine,
        aconnect(CACHE, model_name=engine.model_name) as cache,
        CompletionsClient(engine.base_url, model=engine.model_name) as client,
    ):
        app = module.make_app(servers.Servers(client, cache, engine.tokenizer))
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=2)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield Served(f"http://127.0.0.1:{runner.addresses[0][1]}", engine)
        finally:
            await runner.cleanup()


async def lines(answer: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    return [json.loads(line) async for line in answer.content]


async def test_every_step_is_a_line(service: Served) -> None:
    asked = {"text": TEXT, "editor": "random", "keep": 0.25, "max_tokens": 8}
    async with aiohttp.ClientSession() as session, session.post(f"{service.url}/answer", json=asked) as answer:
        first, *events, last = await lines(answer)
    edit = first["edit"]
    assert edit["after"] < edit["before"] / 2
    assert sum(end - start for start, end in edit["runs"]) == edit["after"]
    assert edit["runs"] == sorted(edit["runs"])
    assert len(events) == 8
    assert last == {"end": "length"}


async def test_what_cannot_be_right_is_refused_at_once(service: Served) -> None:
    async with aiohttp.ClientSession() as session:
        for asked, said in [
            ("no json", "Expecting value"),
            ("{}", "text"),
            ('{"text": "a", "editor": "none"}', "no editor is called 'none'"),
            ('{"text": "a", "keep": 0}', "keep"),
        ]:
            async with session.post(f"{service.url}/answer", data=asked) as answer:
                assert answer.status == 400
                assert said in (await answer.json())["error"]


async def test_a_failure_after_the_first_byte_is_a_line_too(service: Served) -> None:
    asked = {"text": "short"}
    async with aiohttp.ClientSession() as session, session.post(f"{service.url}/answer", json=asked) as answer:
        (line,) = await lines(answer)
    assert "less than one chunk" in line["error"]


@needs_browser
async def test_a_browser_shows_tokens_and_kept_positions_and_stops_the_engine_when_it_leaves(
    service: Served, tmp_path: Path
) -> None:
    async with open_page(tmp_path / "profile") as page:
        await page.go(service.url)
        await ask(page, max_tokens=6)
        await page.wait_until('by("state").textContent.includes("finished (length)")')
        kept = await page.value('by("state").textContent.match(/(\\d+) of (\\d+) tokens kept/).slice(1).map(Number)')
        strip = 'Array.from(document.querySelectorAll("#strip rect"), rect => +rect.getAttribute("width"))'
        assert sum(await page.value(strip)) == kept[0] < kept[1]
        assert await page.value('by("strip").viewBox.baseVal.width') == kept[1]
        assert await page.value('by("answer").textContent.length') > 0

        await ask(page, max_tokens=3000)  # the button
        await page.wait_until('by("answer").textContent.length > 5')
        assert service.engine.unfinished_requests == 1
        await page.value('by("stop").click()')
        await page.wait_until('by("state").textContent === "Stopped."')
        await service.idle()

        await ask(page, max_tokens=3000)  # another page
        await page.wait_until('by("answer").textContent.length > 5')
        assert service.engine.unfinished_requests == 1
        await page.go("about:blank")
        await service.idle()


async def ask(page: Page, *, max_tokens: int) -> None:
    await page.wait_until('typeof by === "function" && "ready" in by("form").dataset && !by("ask").disabled')
    await page.value(f'by("text").value = {json.dumps(TEXT)}; by("max_tokens").value = {max_tokens}')
    await page.value('by("ask").click()')


async def test_the_script_serves_its_page(
    examples: Path, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module: Any = importlib.import_module("async_service")
    given = {"base_url": None, "kv_url": None, "kv_http_url": None}
    options = argparse.Namespace(model=tiny_model_path, port=0, **given)
    running = asyncio.create_task(module.main(options))
    try:
        async with asyncio.timeout(60):
            while not (said := capsys.readouterr().out):
                if running.done():
                    await running
                await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as session, session.get(said.split()[1]) as answer:
            assert "<title>Edited KV</title>" in await answer.text()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
