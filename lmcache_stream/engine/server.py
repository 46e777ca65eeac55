"""The engine's HTTP application."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web

from lmcache_stream import __version__
from lmcache_stream.engine.generation import Delta, EngineCore, Generation
from lmcache_stream.engine.protocol import (
    CompletionAnswer,
    CompletionRequest,
    DetokenizeRequest,
    RequestError,
    TokenizeRequest,
)
from lmcache_stream.engine.scheduler import Scheduler
from lmcache_stream.errors import UsageError
from lmcache_stream.finishing import thread_to_the_end
from lmcache_stream.kvcache.context import check_cache_salt

__all__ = ["make_application"]

MAX_BODY_BYTES = 64 << 20
SHORT_TEXT = 1024


def make_application(core: EngineCore, scheduler: Scheduler, root: str) -> web.Application:
    """Make the application that serves a model: completions, models, health, version, tokenize, detokenize.

    Args:
        core: The model with all that belongs to it.
        scheduler: Runs the completions; started.
        root: Where the model came from; `/v1/models` shows it.
    """
    handlers = Handlers(core, scheduler, root)
    application = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors_in_json])
    application.add_routes(
        [
            web.post("/v1/completions", handlers.completions),
            web.get("/v1/models", handlers.models),
            web.get("/health", handlers.health),
            web.get("/version", handlers.version),
            web.post("/tokenize", handlers.tokenize),
            web.post("/detokenize", handlers.detokenize),
        ]
    )
    return application


class Handlers:
    """One method a route."""

    def __init__(self, core: EngineCore, scheduler: Scheduler, root: str) -> None:
        self._core = core
        self._scheduler = scheduler
        self._root = root
        self._started = int(time.time())
        self._tokenizing = asyncio.Lock()

    async def completions(self, http: web.Request) -> web.StreamResponse:
        request = CompletionRequest.parse(await http.read())
        self._check_model(request.model)
        self._check_salt(request.cache_salt)
        self._check_token_parameters(request)
        prompt = await self._prompt(request)
        request = self._fitted(request, len(prompt))
        answer = CompletionAnswer(request, self._core.model_name, prompt)
        if request.stream:
            return await self._stream(http, request, prompt, answer)
        whole = Delta()
        async for delta in self._generate(request, prompt):
            whole = merged(whole, delta)
        return web.Response(body=answer.whole(whole), content_type="application/json")

    async def models(self, http: web.Request) -> web.StreamResponse:
        permission = {
            "id": f"modelperm-{uuid.uuid4().hex[:16]}",
            "object": "model_permission",
            "created": int(time.time()),
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": False,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        model = {
            "id": self._core.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "lmcache-stream",
            "root": self._root,
            "parent": None,
            "max_model_len": self._core.lm.max_model_len,
            "permission": [permission],
        }
        return json_response({"object": "list", "data": [model]})

    async def health(self, http: web.Request) -> web.StreamResponse:
        return web.Response()

    async def version(self, http: web.Request) -> web.StreamResponse:
        return json_response({"version": __version__})

    async def tokenize(self, http: web.Request) -> web.StreamResponse:
        request = TokenizeRequest.parse(await http.read())
        self._check_model(request.model)
        tokenizer = self._core.tokenizer
        if request.messages is None:
            tokens = await self._encode(request.prompt or "", request.add_special_tokens is not False)
        else:
            text = await thread_to_the_end(lambda: rendered(tokenizer, request))
            tokens = await self._encode(text, request.add_special_tokens is True)
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": self._core.lm.max_model_len,
                "tokens": tokens,
                "token_strs": tokenizer.convert_ids_to_tokens(tokens) if request.return_token_strs else None,
            }
        )

    async def detokenize(self, http: web.Request) -> web.StreamResponse:
        request = DetokenizeRequest.parse(await http.read())
        self._check_model(request.model)
        self._check_vocabulary(request.tokens)
        text = self._core.tokenizer.decode(request.tokens, clean_up_tokenization_spaces=False)
        return json_response({"prompt": text})

    async def _stream(
        self, http: web.Request, request: CompletionRequest, prompt: list[int], answer: CompletionAnswer
    ) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        last = Delta()
        try:
            await response.prepare(http)
            try:
                async for last in self._generate(request, prompt):
                    await response.write(answer.event(last))
            except RequestError as error:
                await response.write(answer.failure(error))
            else:
                await response.write(answer.end(last))
            await response.write_eof()
        except ConnectionResetError:  # the client has gone, and the generation with it
            pass
        return response

    async def _generate(self, request: CompletionRequest, prompt: list[int]) -> AsyncIterator[Delta]:
        """Yield deltas of `stream_interval` tokens each, but for the first and the last."""
        self._check_vocabulary(prompt)
        arrived: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(item: Delta | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(arrived.put_nowait, item)

        generation = Generation(self._core, prompt, request, request.cache_salt, emit)
        if not self._scheduler.submit(generation):
            raise RequestError("the engine has too many requests", status=503, type="ServiceUnavailableError")
        try:
            pending, enough = Delta(), 1
            while pending.finish_reason is None:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise RequestError.of(item) from item
                pending = merged(pending, item)
                if pending.finish_reason is not None or len(pending.token_ids) >= enough:
                    yield pending
                    if pending.finish_reason is None:
                        pending, enough = Delta(), request.stream_interval
        finally:
            generation.abort()

    async def _prompt(self, request: CompletionRequest) -> list[int]:
        if isinstance(request.prompt, list):
            return request.prompt
        prompt = await self._encode(request.prompt, request.add_special_tokens)
        if not prompt:
            raise RequestError("the prompt has no tokens", param="prompt")
        return prompt

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        def encode() -> list[int]:
            ids: list[int] = self._core.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return ids

        async with self._tokenizing:
            return encode() if len(text) <= SHORT_TEXT else await thread_to_the_end(encode)

    def _fitted(self, request: CompletionRequest, prompt_tokens: int) -> CompletionRequest:
        limit = self._core.lm.max_model_len
        room = limit - prompt_tokens
        if room < 1:
            raise RequestError(
                f"the context of this model is at most {limit} tokens, and the prompt has {prompt_tokens}:"
                " shorten the prompt",
                param="input_tokens",
            )
        if request.max_tokens <= room:
            return request
        if "max_tokens" in request.model_fields_set:
            raise RequestError(
                f"the context of this model is at most {limit} tokens: {prompt_tokens} of the prompt and"
                f" {request.max_tokens} to generate are too many",
                param="max_tokens",
            )
        return request.model_copy(update={"max_tokens": room})

    def _check_model(self, name: str | None) -> None:
        served = self._core.model_name
        if name is not None and name != served:
            raise RequestError(
                f"there is no model `{name}` here; this engine serves `{served}`",
                status=404,
                type="NotFoundError",
                param="model",
            )

    def _check_salt(self, cache_salt: str) -> None:
        try:
            check_cache_salt(cache_salt)
        except UsageError as error:
            raise RequestError(str(error), param="cache_salt") from error

    def _check_token_parameters(self, request: CompletionRequest) -> None:
        self._check_vocabulary(request.logit_bias, param="logit_bias")
        self._check_vocabulary(request.stop_token_ids, param="stop_token_ids")

    def _check_vocabulary(self, tokens: Iterable[int], param: str | None = None) -> None:
        size = self._core.lm.vocab_size
        unknown = next((token for token in tokens if not 0 <= token < size), None)
        if unknown is not None:
            raise RequestError(f"token id {unknown} is not in the vocabulary of {size} tokens", param=param)


def rendered(tokenizer: Any, request: TokenizeRequest) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            request.messages, tokenize=False, add_generation_prompt=request.add_generation_prompt
        )
    except Exception as error:  # a template is a program of its own
        raise RequestError(f"the model's chat template fails: {error}", param="messages") from error
    return text


def merged(first: Delta, second: Delta) -> Delta:
    return Delta(
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        cached_tokens=second.cached_tokens,
    )


@web.middleware
async def errors_in_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return error_response(error)
    except web.HTTPException as error:
        return error_response(RequestError(error.reason, status=error.status, type=error.reason))


def error_response(error: RequestError) -> web.Response:
    return json_response(error.body(), status=error.status)


def json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json", status=status)
