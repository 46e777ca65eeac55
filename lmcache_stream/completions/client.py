"""An asyncio client of vLLM's `/v1/completions`, which yields token ids as they are generated."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from lmcache_stream import portal
from lmcache_stream.addresses import check_address, is_line, shown
from lmcache_stream.completions.faults import excerpt
from lmcache_stream.completions.http import EngineHTTP
from lmcache_stream.completions.reading import IdleWatch, drain, read_arrived, unread
from lmcache_stream.completions.request import check_request, request_body
from lmcache_stream.completions.sse import CompletionDecoder
from lmcache_stream.errors import EngineError, EngineResponseError, UsageError
from lmcache_stream.types import Completion, TokenEvent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

__all__ = ["CompletionsClient", "ModelCard"]


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
        linger: How long a request that is left before its first token is kept open for that, in seconds, behind the
            back of whoever left it; 0: it is closed at once. vLLM ends when a request is left while LMCache loads its
            KV (vllm#43226). `aclose` waits for it.

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
        linger: float = 5.0,
    ) -> None:
        if connect_timeout <= 0 or idle_timeout <= 0:
            raise UsageError("connect_timeout and idle_timeout are seconds above 0")
        if retries < 0 or max_connections < 0 or linger < 0:
            raise UsageError("retries, max_connections and linger cannot be negative")
        if model is not None and not is_line(model):
            raise UsageError(f"model is {model!r}: give a name as /v1/models lists it")
        url = _normalized(base_url if base_url is not None else os.environ.get("OPENAI_BASE_URL") or "")
        key = _checked_key(api_key if api_key is not None else os.environ.get("OPENAI_API_KEY") or None)
        self._model = model
        self._naming = asyncio.Lock()
        self._http = EngineHTTP(
            url,
            key,
            connect_timeout=connect_timeout,
            idle_timeout=idle_timeout,
            retries=retries,
            max_connections=max_connections,
            linger=linger,
        )

    @property
    def base_url(self) -> str:
        """Address of the engine, without `/v1`."""
        return self._http.url

    @property
    def model(self) -> str | None:
        """Name of the model; None until it was given or asked for."""
        return self._model

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._http.url!r}, model={self._model!r})"

    async def __aenter__(self) -> Self:
        self._http.open()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self, *, timeout: float | None = None) -> None:
        """Closes every connection; streams that are open break off. Closing twice is allowed.

        Args:
            timeout: Bound in seconds on waiting for first tokens, and on closing TLS connections in order; None:
                `linger`, and 5.
        """
        await self._http.aclose(timeout)

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

        Leaving the generator early closes the response, before the first token after `linger` at most, so that the
        engine stops generating.

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
        with self._http.seam("/v1/completions") as seam:
            response, attempts = await self._http.send("POST", seam.url, body, accept="text/event-stream", linger=True)
            seam.answered = True
            close = response.close
            try:
                if response.status != 200:
                    raise await self._http.error_of(response)
                if response.content_type != "text/event-stream":
                    raise await self._http.no_stream_error(response)
                decoder = CompletionDecoder()
                content = response.content
                with IdleWatch(response, self._http.idle_timeout, self._http.watches) as watch:
                    while True:
                        watch.waiting_since = time.perf_counter()
                        try:
                            data = await read_arrived(content)
                        except asyncio.CancelledError:
                            if not decoder.tokens:
                                close = partial(self._http.lingering.leave_answer, response, decoder)
                            raise
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
                    raise self._http.without_key(decoder.error)
                completion = msgspec.structs.replace(decoder.finish(), attempts=attempts)
                if not content.at_eof():
                    await drain(content)
            finally:
                close()
        yield completion

    async def models(self, *, timeout: float | None = None) -> list[ModelCard]:
        """The models that the engine serves.

        Args:
            timeout: Bound on the whole call in seconds; None: only the client's connect and idle bounds.
        """
        return (await self._http.ask("GET", "/v1/models", None, _ModelList, timeout)).data

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
        return (await self._http.ask("POST", "/tokenize", body, _Tokens, timeout)).tokens

    async def detokenize(self, ids: Sequence[int], *, timeout: float | None = None) -> str:
        """The text of token ids (vLLM's `/detokenize`).

        Args:
            ids: Token ids.
            timeout: Seconds, as in `models`.
        """
        body: dict[str, Any] = {"tokens": list(ids)}
        if self._model is not None:
            body["model"] = self._model
        return (await self._http.ask("POST", "/detokenize", body, _Prompt, timeout)).prompt

    async def health(self, *, timeout: float | None = None) -> bool:
        """Whether the engine answers and calls itself healthy.

        Args:
            timeout: Seconds, as in `models`.
        """
        try:
            with self._http.seam("/health") as seam:
                async with asyncio.timeout(timeout):
                    response, _ = await self._http.send("GET", seam.url, None, retries=0)
                    response.close()
        except EngineError:
            return False
        return response.status == 200

    async def _model_name(self) -> str:
        if self._model is not None:
            return self._model
        self._http.open()
        async with self._naming:
            if self._model is None:
                names = [card.id for card in await self.models()]
                if len(names) > 1:
                    listed = excerpt(", ".join(names))
                    raise UsageError(f"{self._http.url} serves several models, choose one with model=: {listed}")
                if not names:
                    raise EngineResponseError(f"{self._http.url}/v1/models lists no model", status=200)
                self._model = names[0]
            return self._model


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
