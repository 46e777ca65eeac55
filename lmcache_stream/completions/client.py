"""An asyncio client of vLLM's `/v1/completions`, which yields token ids as they are generated."""

from __future__ import annotations

import asyncio
import email.utils
import io
import logging
import os
import random
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

from lmcache_stream import observe, portal
from lmcache_stream.addresses import check_address, is_line, shown
from lmcache_stream.completions.faults import excerpt, json_error, response_error
from lmcache_stream.completions.pacing import StartPacer
from lmcache_stream.completions.reading import read_arrived, unread
from lmcache_stream.completions.request import check_request, encode, request_body
from lmcache_stream.completions.sse import CompletionDecoder
from lmcache_stream.errors import (
    EngineConnectionError,
    EngineError,
    EngineResponseError,
    EngineStreamError,
    LMCacheError,
    UsageError,
)
from lmcache_stream.types import Completion, TokenEvent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

__all__ = ["CompletionsClient", "ModelCard"]

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

_RETRIED_STATUSES = frozenset({429, 502, 503, 504})
_FIRST_BACKOFF = 0.1
_LONGEST_BACKOFF = 10.0
_KEEP_ALIVE = 4.0  # uvicorn, under vLLM, drops idle connections after 5 s; a reused one must not meet that
_READ_BUFFER = 2**20
_ERROR_BODY = 2**16
_ANSWER = 2**26  # the longest there is lists the ids of a text
_DRAIN_TIMEOUT = 1.0
_BODY_AS_BYTES = 2**18
_SHORTEST_HIDDEN_KEY = 8


class ModelCard(msgspec.Struct, frozen=True):
    """A model as `/v1/models` lists it.

    Args:
        id: The name that requests ask for.
        root: The path or name that the engine loaded, which is also what LMCache calls the model.
        max_model_len: Tokens of prompt and output together, at most.
    """

    id: str
    root: str | None = None
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Prompt(msgspec.Struct):
    prompt: str


class CompletionsClient:
    """Streams completions of token ids from an OpenAI-compatible engine such as vLLM.

    It is called as a post-completion and asks for `return_token_ids`, which vLLM knows since 0.10.2. It belongs to the
    first event loop that uses it; used by synchronous streams, to the background loop behind them, and then a plain
    `with` closes it. A request is tried again only before the first byte of its answer, and only when the
    connection failed or the status is 429, 502, 503 or 504. Redirects are not followed.

    Args:
        base_url: Address of the engine, with or without `/v1`; None takes it from `OPENAI_BASE_URL`.
        model: Name of the model; None takes the one that the engine serves.
        api_key: Sent as a bearer token; None takes it from `OPENAI_API_KEY`, if that is set.
        connect_timeout: Bound on opening a connection, in seconds.
        idle_timeout: Bound on waiting for the next bytes of an answer, in seconds.
        retries: How often a request is tried again.
        max_connections: Connections at most, further requests wait; 0 for no limit.

    Raises:
        UsageError: No address is given, or one that cannot be right.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        model: str | None = None,
        api_key: str | None = None,
        connect_timeout: float = 10.0,
        idle_timeout: float = 300.0,
        retries: int = 2,
        max_connections: int = 0,
    ) -> None:
        if connect_timeout <= 0 or idle_timeout <= 0:
            raise UsageError("connect_timeout and idle_timeout are seconds above 0")
        if retries < 0 or max_connections < 0:
            raise UsageError("retries and max_connections cannot be negative")
        if model is not None and not is_line(model):
            raise UsageError(f"model is {model!r}: give a name as /v1/models lists it")
        self._url = _normalized(base_url if base_url is not None else os.environ.get("OPENAI_BASE_URL") or "")
        self._model = model
        self._api_key = _checked_key(api_key if api_key is not None else os.environ.get("OPENAI_API_KEY") or None)
        self._connect_timeout = connect_timeout
        self._idle_timeout = idle_timeout
        self._retries = retries
        self._max_connections = max_connections
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._pacer = StartPacer()
        self._naming = asyncio.Lock()
        self._closed = False

    @property
    def base_url(self) -> str:
        """Address of the engine, without `/v1`."""
        return self._url

    @property
    def model(self) -> str | None:
        """Name of the model; None until it was given or asked for."""
        return self._model

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r}, model={self._model!r})"

    async def __aenter__(self) -> Self:
        self._open_session()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self, *, timeout: float | None = None) -> None:
        """Closes every connection; streams that are open break off. Closing twice is allowed.

        Args:
            timeout: Bound in seconds on closing TLS connections in order; None: 5.
        """
        elsewhere = self._loop not in (None, asyncio.get_running_loop())
        if elsewhere and self._session is not None and self._loop is not None and not self._loop.is_closed():
            raise UsageError("this CompletionsClient belongs to another event loop: close it there")
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            closing = asyncio.ensure_future(session.close())
            _, late = await asyncio.wait({closing}, timeout=5.0 if timeout is None else timeout)
            for task in late:
                task.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self, *, timeout: float | None = None) -> None:
        """Closes a client that synchronous streams used; see `aclose`. A plain `with` does it at its end."""
        portal.run(self.aclose, timeout=timeout)

    async def __call__(
        self, prompt_token_ids: Sequence[int], sampling_params: Mapping[str, Any], cache_salt: str = ""
    ) -> AsyncGenerator[TokenEvent | Completion, None]:
        """Generates from token ids: one `TokenEvent` a token as it comes, then one `Completion`.

        Leaving the generator early closes the response, so that the engine stops generating.

        Args:
            prompt_token_ids: Token ids of the prompt.
            sampling_params: JSON values, sent as they are; `stream_options` is merged.
            cache_salt: Sent when not empty.

        Raises:
            UsageError: The request cannot be streamed as one sequence of token ids; nothing was sent.
            EngineConnectionError: The engine cannot be reached or did not answer.
            EngineResponseError: The engine answered with an error, or reported one inside the stream.
            EngineStreamError: The stream broke off, stalled or made no sense.
        """
        async with aclosing(self.batches(prompt_token_ids, sampling_params, cache_salt)) as batches:
            async for batch in batches:
                if isinstance(batch, Completion):
                    yield batch
                else:
                    for token in batch:
                        yield token

    async def batches(
        self, prompt_token_ids: Sequence[int], sampling_params: Mapping[str, Any], cache_salt: str = ""
    ) -> AsyncGenerator[list[TokenEvent] | Completion, None]:
        """As calling the client, but yields all tokens that one read of the socket brought as one list.

        It saves a hop through a coroutine per token when tokens pile up. No list is empty, and the tokens of one list
        share one time.
        """
        check_request(prompt_token_ids, sampling_params, cache_salt, self._model)
        model = sampling_params.get("model") or await self._model_name()
        body = request_body(prompt_token_ids, sampling_params, cache_salt, model)
        with self._seam("/v1/completions") as seam:
            response = await self._send("POST", seam.url, body, accept="text/event-stream")
            seam.answered = True
            try:
                if response.status != 200:
                    raise await self._response_error(response)
                if response.content_type != "text/event-stream":
                    raise await self._no_stream_error(response)
                decoder = CompletionDecoder()
                content = response.content
                with _IdleWatch(response, self._idle_timeout) as watch:
                    while True:
                        watch.waiting_since = time.perf_counter()
                        try:
                            data = await read_arrived(content)
                        except (aiohttp.ClientError, RuntimeError) as exc:
                            watch.waiting_since = None
                            if tokens := decoder.feed(unread(content), time.perf_counter()):
                                yield tokens
                            if decoder.ended:
                                break
                            if isinstance(exc, RuntimeError):  # what aiohttp says to a read in the pass of the closing
                                raise aiohttp.ClientConnectionError("the connection was closed") from exc
                            raise
                        watch.waiting_since = None
                        if not data:
                            break
                        tokens = decoder.feed(data, time.perf_counter())
                        if tokens:
                            yield tokens
                        if decoder.ended:
                            break
                if decoder.error is not None:
                    raise self._without_key(decoder.error)
                completion = decoder.finish()
                if not content.at_eof():
                    await _drain(content)
            finally:
                response.close()
        yield completion

    async def models(self, *, timeout: float | None = None) -> list[ModelCard]:
        """The models that the engine serves.

        Args:
            timeout: Bound on the whole call in seconds; None: only the client's connect and idle bounds.
        """
        return (await self._ask("GET", "/v1/models", None, _ModelList, timeout)).data

    async def tokenize(self, text: str, add_special_tokens: bool = True, *, timeout: float | None = None) -> list[int]:
        """The engine's token ids of a text (vLLM's `/tokenize`).

        Args:
            text: The text.
            add_special_tokens: Whether the tokenizer adds its special tokens, such as one at the beginning.
            timeout: Seconds, as in `models`.
        """
        body: dict[str, Any] = {"prompt": text, "add_special_tokens": add_special_tokens}
        if self._model is not None:
            body["model"] = self._model
        return (await self._ask("POST", "/tokenize", body, _Tokens, timeout)).tokens

    async def detokenize(self, ids: Sequence[int], *, timeout: float | None = None) -> str:
        """The text of token ids (vLLM's `/detokenize`).

        Args:
            ids: Token ids.
            timeout: Seconds, as in `models`.
        """
        body: dict[str, Any] = {"tokens": list(ids)}
        if self._model is not None:
            body["model"] = self._model
        return (await self._ask("POST", "/detokenize", body, _Prompt, timeout)).prompt

    async def health(self, *, timeout: float | None = None) -> bool:
        """Whether the engine answers and calls itself healthy.

        Args:
            timeout: Seconds, as in `models`.
        """
        try:
            with self._seam("/health") as seam:
                async with asyncio.timeout(timeout):
                    response = await self._send("GET", seam.url, None, retries=0)
                    response.close()
        except EngineError:
            return False
        return response.status == 200

    async def _model_name(self) -> str:
        if self._model is not None:
            return self._model
        self._open_session()
        async with self._naming:
            if self._model is None:
                names = [card.id for card in await self.models()]
                if len(names) > 1:
                    listed = excerpt(", ".join(names))
                    raise UsageError(f"{self._url} serves several models, choose one with model=: {listed}")
                if not names:
                    raise EngineResponseError(f"{self._url}/v1/models lists no model", status=200)
                self._model = names[0]
            return self._model

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, answer: type[T], timeout: float | None
    ) -> T:
        data = b""
        with self._seam(path) as seam:
            async with asyncio.timeout(timeout):
                response = await self._send(method, seam.url, None if body is None else encode(body))
                try:
                    if response.status != 200:
                        raise await self._response_error(response)
                    data = await _whole(response)
                finally:
                    response.close()
        try:
            return msgspec.json.decode(data, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise EngineResponseError(
                f"{seam.url} answered something else than {path} should: {excerpt(data, 200)}", status=200
            ) from exc

    async def _send(
        self,
        method: str,
        url: str,
        body: bytes | None,
        *,
        accept: str = "application/json",
        retries: int | None = None,
    ) -> aiohttp.ClientResponse:
        left = self._retries if retries is None else retries
        headers = {"Accept": accept}
        if body is not None:
            headers["Content-Type"] = "application/json"
        observe.inject(headers)
        backoff = _FIRST_BACKOFF
        while True:
            pause = backoff * random.uniform(0.5, 1.0)
            await self._pacer.turn()
            try:
                response = await self._open_session().request(
                    method, url, data=_payload(body), headers=headers, allow_redirects=False
                )
            except aiohttp.ClientConnectionError as exc:
                if left == 0 or isinstance(exc, aiohttp.SocketTimeoutError | aiohttp.ClientSSLError):
                    raise
                why = f"no answer ({type(exc).__name__})"
            else:
                if left == 0 or response.status not in _RETRIED_STATUSES:
                    return response
                asked = _retry_after(response.headers.get("Retry-After"))
                pause = pause if asked is None else min(asked, _LONGEST_BACKOFF)
                why = f"HTTP {response.status}"
                response.close()
            logger.info("%s %s: %s, again in %.1f s (%d times at most)", method, url, why, pause, left)
            await asyncio.sleep(pause)
            left -= 1
            backoff = min(2 * backoff, _LONGEST_BACKOFF)

    def _open_session(self) -> aiohttp.ClientSession:
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
                    sock_read=self._idle_timeout,
                ),
                headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=_READ_BUFFER,
            )
        return self._session

    async def _response_error(self, response: aiohttp.ClientResponse) -> EngineError:
        body = await _start_of(response)
        error = response_error(response.status, body, reason=response.reason or "")
        if 300 <= response.status < 400:
            target = excerpt(shown(response.headers.get("Location", "nowhere")))
            message = f"{response.url} redirects to {target}, which is not followed: give that address as base_url"
            error = EngineResponseError(message, status=response.status)
        return self._without_key(error)

    async def _no_stream_error(self, response: aiohttp.ClientResponse) -> EngineError:
        body = await _start_of(response)
        kind = response.headers.get("Content-Type", "no content type")
        error = json_error(200, body) or EngineStreamError(
            f"{response.url} answered {kind} instead of an event stream: {excerpt(body, 200)}"
        )
        return self._without_key(error)

    def _without_key(self, error: EngineError) -> EngineError:
        """The error without the API key, should the server have repeated it."""
        key = self._api_key
        if key is not None and len(key) >= _SHORTEST_HIDDEN_KEY:
            error.args = tuple(str(arg).replace(key, "***") for arg in error.args)
            if isinstance(error, EngineResponseError):
                error.message = error.message.replace(key, "***")
        return error

    def _seam(self, path: str) -> _Seam:
        return _Seam(self._url + path, self._idle_timeout)


class _Seam:
    """Where aiohttp's errors become this package's."""

    def __init__(self, url: str, idle_timeout: float) -> None:
        self.url = url
        self.answered = False
        self._idle_timeout = idle_timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(exc, LMCacheError) or not isinstance(exc, aiohttp.ClientError | OSError):
            return
        if isinstance(exc, aiohttp.ClientResponseError):
            _forget_request_headers(exc)
            raise EngineStreamError(f"{self.url} answered something that is no HTTP: {excerpt(exc.message)}") from exc
        if isinstance(exc, aiohttp.SocketTimeoutError):
            reason = f"nothing came for {self._idle_timeout:g} s (idle_timeout)"
        elif isinstance(exc, aiohttp.ServerDisconnectedError):
            reason = "the connection was closed"
        else:
            reason = excerpt(str(exc)) or ("time ran out" if isinstance(exc, TimeoutError) else type(exc).__name__)
        if self.answered:
            raise EngineStreamError(f"the stream of {self.url} broke off: {reason}") from exc
        raise EngineConnectionError(f"{self.url} gave no answer: {reason}") from exc


class _IdleWatch:
    """Breaks a read off that waits too long, with one timer a response instead of one a read."""

    def __init__(self, response: aiohttp.ClientResponse, timeout: float) -> None:
        self.waiting_since: float | None = None
        self._content = response.content
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        connection = response.connection
        if connection is not None and connection.protocol is not None:
            connection.protocol.read_timeout = None

    def __enter__(self) -> Self:
        self._handle = self._loop.call_later(self._timeout, self._check)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.cancel()

    def _check(self) -> None:
        waited = 0.0 if self.waiting_since is None else time.perf_counter() - self.waiting_since
        if waited >= self._timeout:
            self._content.set_exception(aiohttp.SocketTimeoutError("idle"))
        else:
            self._handle = self._loop.call_later(self._timeout - waited, self._check)


def _normalized(base_url: str) -> str:
    if not isinstance(base_url, str):
        raise UsageError(f"base_url must be a string such as 'http://localhost:8000', not {type(base_url).__name__}")
    url = base_url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    if not url:
        raise UsageError("no engine is named: give base_url or set OPENAI_BASE_URL")
    parts = urlsplit(check_address(url, "base_url"))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(f"base_url is {shown(url)!r}, or has more than host and path: give http://localhost:8000")
    return url


def _checked_key(api_key: str | None) -> str | None:
    if api_key is not None and not (is_line(api_key) and api_key.isascii()):
        raise UsageError("api_key holds a line break or another character that no header can carry: strip it")
    return api_key


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


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    while data := await response.content.readany():
        body += data
        if len(body) > _ANSWER:
            raise EngineResponseError(f"{response.url} answered more than {_ANSWER} bytes", status=200)
    return bytes(body)


async def _start_of(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    while len(body) < _ERROR_BODY and (data := await response.content.readany()):
        body += data
    return bytes(body)


async def _drain(content: aiohttp.StreamReader) -> None:
    """Reads the end of the body, so that the connection can serve another request."""
    try:
        async with asyncio.timeout(_DRAIN_TIMEOUT):
            while not content.at_eof():
                await content.readany()
    except (TimeoutError, aiohttp.ClientError):
        pass


def _forget_request_headers(exc: aiohttp.ClientResponseError) -> None:
    """An error of aiohttp carries the request's headers, the API key among them, and shows them in its repr."""
    bare = exc.request_info
    exc.request_info = aiohttp.RequestInfo(bare.url, bare.method, CIMultiDictProxy(CIMultiDict()), bare.real_url)
    exc.args = (exc.request_info, exc.history)
