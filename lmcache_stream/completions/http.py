"""HTTP with an engine: one session on one event loop; a request is tried again until its answer begins."""

from __future__ import annotations

import asyncio
import email.utils
import io
import logging
import random
import time
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import msgspec

from lmcache_stream import observe
from lmcache_stream.addresses import shown
from lmcache_stream.completions.faults import excerpt, json_error, response_error
from lmcache_stream.completions.lingering import Lingering
from lmcache_stream.completions.pacing import StartPacer
from lmcache_stream.completions.reading import IdleWatch, start_of, whole
from lmcache_stream.completions.request import encode
from lmcache_stream.completions.seam import Seam
from lmcache_stream.errors import EngineError, EngineResponseError, EngineStreamError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EngineHTTP"]

T = TypeVar("T")

logger: logging.Logger = logging.getLogger("lmcache_stream.completions.client")

_RETRIED_STATUSES = frozenset({429, 502, 503, 504})
_FIRST_BACKOFF = 0.1
_LONGEST_BACKOFF = 10.0
_KEEP_ALIVE = 4.0  # uvicorn, under vLLM, drops idle connections after 5 s; a reused one must not meet that
_READ_BUFFER = 2**20
_BODY_AS_BYTES = 2**18
_SHORTEST_HIDDEN_KEY = 8


class EngineHTTP:
    """Requests to one engine, for a `CompletionsClient`, whose arguments these are.

    Args:
        url: Address of the engine, without `/v1`.
        api_key: Sent as a bearer token; it shows in no error.
        connect_timeout: Bound on opening a connection, in seconds.
        idle_timeout: Bound on waiting for the next bytes of an answer, in seconds.
        retries: How often a request is tried again.
        max_connections: Connections at most; 0 for no limit.
        linger: How long a request that is left is kept open for its first token, in seconds.

    Attributes:
        lingering: The requests that were left.
        watches: Of the answers that are being read.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        connect_timeout: float,
        idle_timeout: float,
        retries: int,
        max_connections: int,
        linger: float,
    ) -> None:
        self.url = url
        self.idle_timeout = idle_timeout
        self.lingering: Lingering = Lingering(linger)
        self.watches: set[IdleWatch] = set()
        self._api_key = api_key
        self._connect_timeout = connect_timeout
        self._retries = retries
        self._max_connections = max_connections
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._pacer = StartPacer()
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    async def aclose(self, timeout: float | None) -> None:
        """See `CompletionsClient.aclose`."""
        elsewhere = self._loop not in (None, asyncio.get_running_loop())
        if elsewhere and self._session is not None and self._loop is not None and not self._loop.is_closed():
            raise UsageError("this CompletionsClient belongs to another event loop: close it there")
        self._closed = True
        try:
            if not elsewhere:
                await self.lingering.end(self.lingering.seconds if timeout is None else timeout)
        finally:
            for watch in tuple(self.watches):
                watch.break_off()
            session, self._session = self._session, None
            if session is not None:
                closing = self._closing = asyncio.ensure_future(session.close())
                _, late = await asyncio.wait({closing}, timeout=5.0 if timeout is None else timeout)
                for task in late:
                    task.cancel()

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, answer: type[T], timeout: float | None
    ) -> T:
        """The JSON answer to a request that is no stream, in `timeout` seconds; None: only the client's own bounds."""
        data = b""
        with self.seam(path) as seam:
            async with asyncio.timeout(timeout):
                response, _ = await self.send(method, seam.url, None if body is None else encode(body))
                try:
                    if response.status != 200:
                        raise await self.error_of(response)
                    data = await whole(response)
                finally:
                    response.close()
        try:
            return msgspec.json.decode(data, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise EngineResponseError(
                f"{seam.url} answered something else than {path} should: {excerpt(data, 200)}", status=200
            ) from exc

    async def send(
        self,
        method: str,
        url: str,
        body: bytes | None,
        *,
        accept: str = "application/json",
        retries: int | None = None,
        linger: bool = False,
    ) -> tuple[aiohttp.ClientResponse, int]:
        """Send a request; what it answers has begun and must be closed.

        Returns:
            The answer, and which attempt it is the answer to.

        Args:
            method: GET or POST.
            url: The whole address.
            body: JSON; None for none.
            accept: The kind of answer that is asked for.
            retries: How often it is tried again; None: as the client says.
            linger: Whether it is a completion, to be kept open for its first token when it is left.
        """
        attempts, left = 1, self._retries if retries is None else retries
        headers = {"Accept": accept}
        if body is not None:
            headers["Content-Type"] = "application/json"
        observe.inject(headers)
        backoff = _FIRST_BACKOFF
        while True:
            pause = backoff * random.uniform(0.5, 1.0)
            await self._pacer.turn()
            try:
                response = await self._once(method, url, body, headers, linger)
            except aiohttp.ClientConnectionError as exc:
                if left == 0 or isinstance(exc, aiohttp.SocketTimeoutError | aiohttp.ClientSSLError):
                    raise
                why = f"no answer ({type(exc).__name__})"
            else:
                if left == 0 or response.status not in _RETRIED_STATUSES:
                    return response, attempts
                asked = _retry_after(response.headers.get("Retry-After"))
                pause = pause if asked is None else min(asked, _LONGEST_BACKOFF)
                why = f"HTTP {response.status}"
                response.close()
            logger.info("%s %s: %s, again in %.1f s (%d times at most)", method, url, why, pause, left)
            await asyncio.sleep(pause)
            attempts += 1
            left -= 1
            backoff = min(2 * backoff, _LONGEST_BACKOFF)

    async def _once(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], linger: bool
    ) -> aiohttp.ClientResponse:
        lingers = linger and self.lingering.seconds > 0
        if lingers:
            await self.lingering.begin()
        sent = _Sent(0 if body is None else len(body))
        call = self.open().request(
            method, url, data=_payload(body), headers=headers, allow_redirects=False, trace_request_ctx=sent
        )
        if not lingers:
            return await call
        request = asyncio.ensure_future(call)
        try:
            await asyncio.wait([request])
        except asyncio.CancelledError:
            if sent.whole:
                self.lingering.leave_request(request)
            else:
                request.cancel()
                await asyncio.wait([request])
            raise
        try:
            return request.result()
        finally:
            del request  # else an error, its traceback, this frame and the task would keep each other

    def open(self) -> aiohttp.ClientSession:
        """The session, which belongs to the loop that opened it first."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise UsageError("this CompletionsClient is closed: make a new one")
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise UsageError("this CompletionsClient belongs to another event loop: make one for each loop")
        if self._session is None:
            headers = {"User-Agent": "lmcache-stream", "Accept-Encoding": "identity"}
            if self._api_key is not None:
                headers["Authorization"] = f"Bearer {self._api_key}"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=_KEEP_ALIVE),
                timeout=aiohttp.ClientTimeout(
                    connect=None if self._max_connections else self._connect_timeout,
                    sock_connect=self._connect_timeout,
                    sock_read=self.idle_timeout,
                ),
                headers=headers,
                trace_configs=[_Sent.watch()],
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=_READ_BUFFER,
            )
        return self._session

    async def error_of(self, response: aiohttp.ClientResponse) -> EngineError:
        """The error that an answer with another status than 200 stands for."""
        body = await start_of(response)
        error = response_error(response.status, body, reason=response.reason or "")
        if 300 <= response.status < 400:
            target = excerpt(shown(response.headers.get("Location", "nowhere")))
            message = f"{response.url} redirects to {target}, which is not followed: give that address as base_url"
            error = EngineResponseError(message, status=response.status)
        return self.without_key(_with_next_step(error))

    async def no_stream_error(self, response: aiohttp.ClientResponse) -> EngineError:
        """The error that an answer which is no event stream stands for."""
        body = await start_of(response)
        kind = response.headers.get("Content-Type", "no content type")
        error = json_error(200, body) or EngineStreamError(
            f"{response.url} answered {kind} instead of an event stream: {excerpt(body, 200)}"
        )
        return self.without_key(error)

    def without_key(self, error: EngineError) -> EngineError:
        """The error without the API key, should the server have repeated it."""
        key = self._api_key
        if key is not None and len(key) >= _SHORTEST_HIDDEN_KEY:
            error.args = tuple(str(arg).replace(key, "***") for arg in error.args)
            if isinstance(error, EngineResponseError):
                error.message = error.message.replace(key, "***")
        return error

    def seam(self, path: str) -> Seam:
        """Where requests of `path` meet errors of aiohttp."""
        return Seam(self.url + path, self.idle_timeout)


def _with_next_step(error: EngineResponseError) -> EngineResponseError:
    if error.status in (401, 403):
        step = "give the engine's key as api_key, or set OPENAI_API_KEY to it"
    elif error.status in (405, 501) or (error.status == 404 and (error.type is None or error.message == "Not Found")):
        # An engine that does not know a model says which.
        step = "is base_url the address of an engine such as vLLM?"
    else:
        return error
    error.args = (f"{error}; {step}",)
    return error


class _Sent:
    """How much of a request has been sent. Before the whole was, an engine has not begun to work on it."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._head = False

    @property
    def whole(self) -> bool:
        return self._head and self._left <= 0

    @staticmethod
    def watch() -> aiohttp.TraceConfig:
        """What tells the `_Sent` that a request was given."""
        config = aiohttp.TraceConfig()
        config.on_request_headers_sent.append(_Sent._on_head)
        config.on_request_chunk_sent.append(_Sent._on_chunk)
        return config

    @staticmethod
    async def _on_head(_: aiohttp.ClientSession, context: Any, __: aiohttp.TraceRequestHeadersSentParams) -> None:
        context.trace_request_ctx._head = True

    @staticmethod
    async def _on_chunk(_: aiohttp.ClientSession, context: Any, sent: aiohttp.TraceRequestChunkSentParams) -> None:
        context.trace_request_ctx._left -= len(sent.chunk)


def _payload(body: bytes | None) -> bytes | io.BytesIO | None:
    return body if body is None or len(body) <= _BODY_AS_BYTES else io.BytesIO(body)


def _retry_after(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
