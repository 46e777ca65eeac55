from __future__ import annotations

import asyncio
import contextlib
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from lmcache_stream.errors import CacheConnectionError, CacheError, CacheProtocolError, UsageError
from lmcache_stream.kvcache.mp.discovery import check_server, discover
from lmcache_stream.kvcache.mp.status import ServerConfig

from .statuses import HTTP, MODEL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping


@pytest.mark.parametrize("transfer_mode", ["auto", "engine_driven", None])
def test_accepts_a_server_with_engine_driven_operations(transfer_mode: str | None) -> None:
    config = ServerConfig(chunk_size=32, transfer_mode=transfer_mode, transport="zmq")
    check_server(config, url="tcp://h:5555", http_url="http://h")


def test_refuses_a_server_in_a_wrong_mode() -> None:
    config = ServerConfig(chunk_size=32, transfer_mode="lmcache_driven")
    with pytest.raises(CacheConnectionError, match="start the LMCache server with --supported-transfer-mode auto"):
        check_server(config, url="tcp://h:5555", http_url="http://h")


def test_refuses_a_url_of_the_wrong_transport() -> None:
    over_grpc, over_zmq = (ServerConfig(chunk_size=32, transport=name) for name in ("grpc", "zmq"))
    check_server(over_grpc, url="grpc+unix:///s", http_url="http://h")
    with pytest.raises(CacheConnectionError, match=r"speaks grpc.*use grpc://host:port"):
        check_server(over_grpc, url="tcp://h:5555", http_url="http://h")
    with pytest.raises(CacheConnectionError, match=r"speaks zmq.*use tcp://host:port"):
        check_server(over_zmq, url="grpc://h:5555", http_url="http://h")


@contextlib.asynccontextmanager
async def serving(routes: Mapping[str, tuple[int, str, bytes] | None]) -> AsyncIterator[str]:
    """An HTTP server with fixed answers (status, content type, body); None: it never answers."""

    leaving = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path not in routes:
            raise web.HTTPNotFound
        fixed = routes[request.path]
        if fixed is None:
            await leaving.wait()
        status, content_type, body = fixed or (200, "text/plain", b"")
        return web.Response(status=status, content_type=content_type, body=body)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        leaving.set()
        await runner.cleanup()


def json_answer(name: str) -> tuple[int, str, bytes]:
    return 200, "application/json", (HTTP / f"{name}.json").read_bytes()


@pytest.mark.parametrize("config_path", ["/config", "/conf"])
async def test_discovers_a_server(config_path: str) -> None:
    routes = {config_path: json_answer("config"), "/status": json_answer("status-lmcache-driven")}
    async with serving(routes) as url:
        found = await discover(url + "/", MODEL)
    assert found.http_url == url
    assert (found.chunk_size, found.model.num_layers) == (32, 4)


JSON, TEXT = "application/json", "text/plain"


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ((503, JSON, b'{"error":"not initialized"}'), CacheConnectionError, r"503.*not initialized.*not ready"),
        ((200, JSON, b"[]"), CacheProtocolError, "chunk size"),
        ((200, "text/html", b"<html>hello</html>"), CacheProtocolError, r"no JSON.*<html>hello"),
        ((500, TEXT, b"oops"), CacheProtocolError, r"500.*oops"),
        ((302, TEXT, b""), CacheProtocolError, "302"),
        ((200, JSON, b""), CacheProtocolError, "no JSON"),
        ((200, JSON, b"[" * 100_000), CacheProtocolError, "no JSON"),
        ((200, JSON, b'"\xff'), CacheProtocolError, "no JSON"),
        ((200, JSON, b'{"a": ' + b"9" * 5000 + b"}"), CacheProtocolError, "no JSON"),
        ((500, TEXT, b"\x1b]0;owned\x07"), CacheProtocolError, r"500 \(\?\]0;owned\?\)"),
        (None, CacheConnectionError, "did not answer in time"),
    ],
)
async def test_an_answer_that_is_none_is_one_error_with_the_url(
    answer: tuple[int, str, bytes] | None, error: type[CacheError], words: str
) -> None:
    async with serving({"/config": answer, "/status": json_answer("status-engine-driven")}) as url:
        with pytest.raises(error, match=words) as raised:
            await discover(url, MODEL, timeout=0.2 if answer is None else 60)
    assert f"{url}/config" in str(raised.value)


async def test_an_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_stream.bodies.MOST_BYTES", 1 << 16)
    async with serving({"/config": (200, JSON, b" " * (1 << 20))}) as url:
        with pytest.raises(CacheProtocolError, match=r"/config answers more than 65536 bytes"):
            await discover(url, MODEL)


async def test_nobody_there() -> None:
    async with serving({}) as url:
        pass
    with pytest.raises(
        CacheConnectionError, match=r"cannot reach http://127.0.0.1:\d+/config.*start the LMCache server"
    ):
        await discover(url, MODEL)


async def test_neither_config_nor_conf() -> None:
    async with serving({}) as url:
        with pytest.raises(CacheProtocolError, match=r"/conf answers 404"):
            await discover(url, MODEL)


@pytest.mark.parametrize(
    "url",
    ["tcp://localhost:5555", "localhost:8080", "http://", "http://host/?x=1", "http://host:port", "http://a\nb", 5],
)
async def test_a_url_that_is_not_http(url: Any) -> None:
    with pytest.raises(UsageError, match="http_url"):
        await discover(url, MODEL)


async def test_credentials_are_refused_and_not_repeated() -> None:
    for url in ("http://user:hunter2@host", "http://hunter2@host", "http://user:hunter2/x@host"):
        with pytest.raises(UsageError, match="http_url") as caught:
            await discover(url, MODEL)
        assert "hunter2" not in "".join(traceback.format_exception(caught.value))
