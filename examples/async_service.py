"""A web service that edits the KV of each request, streams its tokens, and stops the engine when the browser leaves.

python examples/async_service.py [--port 8088] [--base-url URL --kv-url URL --kv-http-url URL]

Then open http://127.0.0.1:8088, or: curl -N http://127.0.0.1:8088/answer -d '{"text": "...", "editor": "knorm"}'
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from servers import Servers, arguments, open_servers, run

from lmcache_stream import AsyncLMCacheStream, Editor, LMCacheError, ModifyReceipt, UsageError, editors
from lmcache_stream.bench.prompts import Prompt, shipped_prompts

PAGE = Path(__file__).with_name("async_service.html")
EDITORS = ("streaming-llm", "middle-out", "random", "knorm", "keydiff")
EXAMPLE = shipped_prompts()[-1]
SERVERS = web.AppKey("servers", Servers)
TIMEOUT = 300.0


def make_app(at: Servers) -> web.Application:
    """The service; run it with `handler_cancellation=True`, so that a handler ends when its browser leaves."""
    app = web.Application()
    app[SERVERS] = at
    app.add_routes([web.get("/", page), web.get("/choices", choices), web.post("/answer", answer)])
    return app


async def page(request: web.Request) -> web.FileResponse:
    return web.FileResponse(PAGE)


async def choices(request: web.Request) -> web.Response:
    return web.json_response({"editors": EDITORS, "text": EXAMPLE.text})


async def answer(request: web.Request) -> web.StreamResponse:
    """Prefill, edit, decode; every step is a line of JSON, sent as it happens."""
    at = request.app[SERVERS]
    try:
        asked = await asyncio.to_thread(understood, await request.text(), at.tokenizer)
        stream = AsyncLMCacheStream(at.cache, at.engine, asked.token_ids)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # UsageError is a ValueError
        return web.json_response({"error": str(error)}, status=400)

    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
    await response.prepare(request)
    try:
        async with asyncio.timeout(TIMEOUT):
            await stream.generate({"max_tokens": 1, "temperature": 0})
            await send(response, edit=described(await stream.modify_kv(asked.editor)), text=stream.output_text())
            # aclosing: whatever ends this handler, the response of the engine is closed, and it stops computing.
            async with aclosing(stream.events({"max_tokens": asked.max_tokens, "temperature": 0})) as events:
                async for event in events:
                    await send(response, text=event.text)
        await send(response, end=stream.finish_reason())
    except (LMCacheError, TimeoutError) as error:
        await send(response, error=str(error) or f"no end within {TIMEOUT:g} s")
    return response


@dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    token_ids: list[int]
    editor: Editor
    max_tokens: int


def understood(body: str, tokenizer: Any) -> Asked:
    """Read and tokenize a request, in a thread: a long text takes its time."""
    given = json.loads(body)
    editor = editors.get(str(given.get("editor", EDITORS[0])), keep=float(given.get("keep", 0.5)))
    return Asked(Prompt(str(given["text"]), "").token_ids(tokenizer), editor, int(given.get("max_tokens", 128)))


async def send(response: web.StreamResponse, **message: Any) -> None:
    await response.write(json.dumps(message).encode() + b"\n")


def described(receipt: ModifyReceipt) -> dict[str, Any]:
    """How many tokens an edit kept, and which: `[first, end)` for each run of neighbours."""
    kept = [] if receipt.kept_positions is None else receipt.kept_positions.tolist()
    runs: list[list[int]] = []
    for position in kept:
        if runs and runs[-1][1] == position:
            runs[-1][1] += 1
        else:
            runs.append([position, position + 1])
    return {"before": receipt.tokens_before, "after": receipt.tokens_after, "runs": runs}


async def main(options: Any) -> None:
    if not 0 <= options.port < 1 << 16:
        raise UsageError(f"--port {options.port} is no port")
    async with open_servers(options) as at:
        runner = web.AppRunner(make_app(at), handler_cancellation=True, shutdown_timeout=5)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", options.port).start()
            print(f"open http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--port", type=int, default=8088, help="port to listen on, 0 for a free one (default: 8088)")
    try:
        run(main(parser.parse_args()))
    except KeyboardInterrupt:
        print("stopped")
