"""Asks an LMCache MP server over HTTP what it says about itself."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from lmcache_stream import bodies
from lmcache_stream.addresses import check_address, shown
from lmcache_stream.errors import CacheConnectionError, CacheProtocolError, UsageError
from lmcache_stream.kvcache.mp.status import ServerConfig, ServerFacts, parse_config, parse_status

__all__ = ["check_http_url", "check_server", "discover", "fetch_config", "fetch_status"]

_EXCERPT = 200


def check_server(config: ServerConfig, *, url: str, http_url: str) -> None:
    """Refuse a server that this client cannot work with at `url`.

    Raises:
        CacheConnectionError: The server lacks the operations needed, or speaks another transport; the message says how
            to start it or which URL to use.
    """
    if not config.engine_driven:
        raise CacheConnectionError(
            f"the LMCache server at {http_url} runs with --supported-transfer-mode {config.transfer_mode}, which "
            "offers this client no way to its KV: start the LMCache server with --supported-transfer-mode auto"
        )
    scheme = url.partition("://")[0]
    wanted = "grpc" if scheme.startswith("grpc") else "zmq"
    if config.transport is not None and config.transport != wanted:
        right = "grpc://host:port" if config.transport == "grpc" else "tcp://host:port"
        raise CacheConnectionError(
            f"the LMCache server at {http_url} speaks {config.transport}, but url={url!r} means {wanted}: use {right}, "
            f"or start the LMCache server with --transport {wanted}"
        )


def check_http_url(http_url: str) -> str:
    """Return `http_url` without a slash at its end.

    Raises:
        UsageError: It is no HTTP address, or holds credentials.
    """
    parts = urlsplit(check_address(http_url, "http_url"))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(
            f"http_url must start with http:// or https:// and have a host, and nothing behind the path: not "
            f"{shown(http_url)!r}"
        )
    return http_url.rstrip("/")


async def discover(
    http_url: str, model_name: str | None = None, *, url: str | None = None, timeout: float = 5.0
) -> ServerFacts:
    """Ask a server's HTTP API about itself and about one model.

    Args:
        http_url: The HTTP address of an LMCache MP server, such as "http://localhost:8080".
        model_name: The model's name in the cache's keys; None: the only one registered.
        url: Where this client means to speak to it; None: that is not checked.
        timeout: Seconds for both questions together.

    Raises:
        CacheConnectionError: Nobody answers there, it is not ready, it cannot be spoken to at `url`, or no engine has
            registered the model.
        CacheProtocolError: What answers is no LMCache MP server.
        GeometryError: The model's layout is not supported.
        UsageError: `http_url` is no HTTP address.
    """
    base = check_http_url(http_url)
    limit = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(timeout=limit) as session:
        config = await _config(session, base)
        if url is not None:
            check_server(config, url=url, http_url=base)
        status = await _answer(session, f"{base}/status")
    return ServerFacts(http_url=base, config=config, state=parse_status(status, model_name, url=f"{base}/status"))


async def fetch_config(http_url: str, *, timeout: float) -> ServerConfig:
    """What the server at `http_url` says about itself; errors as of `discover`."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session:
        return await _config(session, http_url)


async def fetch_status(http_url: str, *, timeout: float = 3.0) -> dict[str, Any]:
    """The `/status` of the server at `http_url`.

    Raises:
        CacheConnectionError: No answer, or an error as the answer; the message has the URL.
        CacheProtocolError: The answer is no JSON object, or has no end.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session:
        status = await _answer(session, f"{http_url}/status")
    if not isinstance(status, dict):
        raise CacheProtocolError(f"{http_url}/status answers no JSON object")
    return status


async def _config(session: aiohttp.ClientSession, base: str) -> ServerConfig:
    url, answer = f"{base}/config", await _answer(session, f"{base}/config", missing_ok=True)
    if answer is None:
        url, answer = f"{base}/conf", await _answer(session, f"{base}/conf")
    return parse_config(answer, url=url)


async def _answer(session: aiohttp.ClientSession, url: str, *, missing_ok: bool = False) -> Any:
    try:
        async with session.get(url, allow_redirects=False) as response:
            body = await bodies.read_body(response, bodies.MOST_BYTES)
    except TimeoutError as error:
        raise CacheConnectionError(
            f"{url} did not answer in time: is the LMCache server up, and is this its HTTP port?"
        ) from error
    except (aiohttp.ClientError, ValueError) as error:
        raise CacheConnectionError(
            f"cannot reach {url} ({str(error)[:_EXCERPT]}): start the LMCache server, or correct http_url"
        ) from error
    if body is None:
        raise CacheProtocolError(f"{url} answers more than {bodies.MOST_BYTES} bytes: is it an LMCache MP server's?")
    if response.status == 404 and missing_ok:
        return None
    if response.status == 503:
        raise CacheConnectionError(f"{url} answers 503{_excerpt(body)}: the LMCache server is not ready yet, try again")
    if response.status != 200:
        raise CacheProtocolError(
            f"{url} answers {response.status}{_excerpt(body)}: is it the HTTP address of an LMCache MP server "
            "(lmcache server --http-port)?"
        )
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CacheProtocolError(
            f"{url} answers no JSON{_excerpt(body)}: is it the HTTP address of an LMCache MP server "
            "(lmcache server --http-port)?"
        ) from error


def _excerpt(body: bytes) -> str:
    text = " ".join(body[:_EXCERPT].decode("utf-8", "replace").split())
    return f" ({''.join(c if c.isprintable() else '?' for c in text)})" if text else ""
