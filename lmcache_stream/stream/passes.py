"""The requests of one call of a stream: each sent, its tokens handed on, and its end judged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from lmcache_stream import observe
from lmcache_stream.callables import Items, event_batches
from lmcache_stream.errors import EditNotUsed, EngineResponseError, LMCacheStreamError, StreamTimeout, UsageError
from lmcache_stream.kvcache.context import AsyncKVCacheContext, check_timeout
from lmcache_stream.stream.edits import EditsWhileDecoding, plan_passes
from lmcache_stream.stream.kv import Coverage, OnShortfall, StreamKV, seconds_left
from lmcache_stream.stream.state import GenerateCall, Request, StreamState, check_token_ids
from lmcache_stream.types import AsyncPostCompletion, Completion, PostCompletion, TokenEvent

__all__ = ["Passes"]

logger: logging.Logger = logging.getLogger("lmcache_stream.stream")

_COVERAGE_TIMEOUT: Final = 30.0
_POLL_INTERVAL: Final = 0.2


class Passes:
    """Asks the engine of a stream, and edits between two passes; the consumer records what comes."""

    def __init__(
        self,
        ctx: AsyncKVCacheContext,
        kv: StreamKV,
        state: StreamState,
        stream_id: str,
        post_completion: PostCompletion | AsyncPostCompletion,
        *,
        on_shortfall: OnShortfall,
    ) -> None:
        self._ctx = ctx
        self._kv = kv
        self._state = state
        self._stream_id = stream_id
        self._post_completion = post_completion
        self._on_shortfall = on_shortfall

    async def run(
        self,
        sampling_params: Mapping[str, Any],
        suffix_tokens: Sequence[int],
        edits: EditsWhileDecoding | None,
        timeout: float | None,
    ) -> AsyncGenerator[tuple[Request, Items], None]:
        """The requests of one call, with what each brings, for the consumer to record."""
        max_tokens = _max_tokens(sampling_params)
        suffix = check_token_ids(suffix_tokens, "suffix_tokens")
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + check_timeout(timeout)
        if edits is not None and sampling_params.get("min_tokens"):
            raise UsageError(
                "min_tokens does not go with edit_every, whose passes are shorter: give ignore_eos instead"
            )
        call = GenerateCall()
        try:
            for size, edit_after in plan_passes(max_tokens, edits):
                params = dict(sampling_params) if size is None else {**sampling_params, "max_tokens": size}
                request = Request(self._state, suffix, size or max_tokens, call)
                suffix = []
                phase = "prefill" if params.get("max_tokens") == 1 and not self._state.generated else "decode"
                span = observe.request(self._ctx.model_name, params, phase, self._stream_id)
                failure: BaseException | None = None
                try:
                    async with aclosing(self._exchange(request, params, deadline, span)) as batches:
                        async for batch in batches:
                            yield request, batch
                except BaseException as error:
                    failure = None if isinstance(error, GeneratorExit) else error
                    raise
                finally:
                    self._tell(span, phase, request, failure)
                    del failure  # see `finishing`
                if self._state.done:
                    return
                if edit_after and edits is not None and self._state.expected >= self._ctx.chunk_size:
                    await self._edit_midway(edits, call, deadline)
        finally:
            self._state.last_metrics = call.metrics() or self._state.last_metrics

    def _tell(self, span: observe.Span, phase: str, request: Request, failure: BaseException | None) -> None:
        """Say what a request was, now that it has ended."""
        reason = request.completion.finish_reason if request.completion is not None else None
        logger.debug(
            "stream %s: %s: %d tokens sent, %s of them cached, %d came, %s",
            self._stream_id,
            phase,
            len(request.ids),
            request.cached_tokens,
            request.arrived,
            type(failure).__name__ if failure is not None else reason,
        )
        if span:
            first = request.first - request.start if request.first is not None else None
            span.set(
                {
                    "gen_ai.usage.input_tokens": len(request.ids),
                    "gen_ai.usage.output_tokens": request.arrived,
                    "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
                    "gen_ai.response.finish_reasons": None if reason is None else [reason],
                    "gen_ai.response.time_to_first_chunk": first,
                }
            )
            span.record("gen_ai.client.operation.time_to_first_chunk", first)
            span.record("gen_ai.client.token.usage", len(request.ids), **{"gen_ai.token.type": "input"})
            span.record("gen_ai.client.token.usage", request.arrived, **{"gen_ai.token.type": "output"})
        span.end(failure)

    async def _edit_midway(self, edits: EditsWhileDecoding, call: GenerateCall, deadline: float | None) -> None:
        left = seconds_left(deadline, _COVERAGE_TIMEOUT)
        coverage = Coverage(_COVERAGE_TIMEOUT if left is None else left, _POLL_INTERVAL)
        try:
            async with asyncio.timeout_at(deadline), edits.slots:
                await self._kv.modify(edits.editor, coverage, deadline=deadline)
        except LMCacheStreamError as error:
            error.arrived, error.suffix_consumed = call.failure().values()
            raise
        except UsageError as error:
            raise LMCacheStreamError(f"stream {self._stream_id}: an edit midway: {error}", **call.failure()) from error
        except TimeoutError as error:
            if deadline is None or asyncio.get_running_loop().time() < deadline:
                raise  # the editor's own
            raise StreamTimeout(
                f"stream {self._stream_id}: no end of an edit in time, after {len(call.times)} tokens",
                **call.failure(),
            ) from error

    async def _exchange(
        self, request: Request, sampling_params: dict[str, Any], deadline: float | None, span: observe.Span
    ) -> AsyncGenerator[Items, None]:
        """One request to the engine. The consumer records what it is given; this decides how the request ended."""
        state = self._state
        salt = state.salt
        try:
            if not request.ids:
                raise UsageError("nothing to send: the edit left no token, and there is no suffix")
            with span.attached():
                async with asyncio.timeout_at(deadline):
                    await self._kv.require_edit(deadline)
            request.send()
            batches = event_batches(self._post_completion, request.ids.copy(), sampling_params, salt)
            async with aclosing(batches):
                with span.attached():  # the request goes out with the first step
                    batch = await _next(batches, deadline)
                while batch is not None:
                    yield batch
                    batch = await _next(batches, deadline)
            request.finish()
            request.judge_edit()
            if request.repeated and state.unverified:
                async with asyncio.timeout_at(deadline):
                    await self._kv.look_for_edit(deadline)
                request.call.miss(salt, state.lost)
        except TimeoutError as error:
            if deadline is None or asyncio.get_running_loop().time() < deadline:
                raise self._failed(request, error) from error
            raise StreamTimeout(
                f"stream {self._stream_id}: no end in time, {request.arrived} tokens arrived", **request.call.failure()
            ) from error
        except LMCacheStreamError as error:
            error.arrived, error.suffix_consumed = request.call.failure().values()
            raise
        except UsageError as error:
            if request.call.consumed:
                raise self._failed(request, error) from error
            raise
        except Exception as error:
            raise self._failed(request, error) from error
        if request.aborted:
            reason = request.completion.finish_reason if request.completion else None
            raise LMCacheStreamError(
                f"stream {self._stream_id}: the engine ended the request with finish reason {reason!r} after "
                f"{request.arrived} tokens",
                **request.call.failure(),
            )
        if state.unverified:
            _warn_unverifiable()
        if state.lost and self._on_shortfall == "raise":
            raise EditNotUsed(
                f"stream {self._stream_id}: the engine took {request.cached_tokens} tokens from the cache, but the "
                f"edit has {state.stored}: it was evicted, or the request went out without its cache_salt, "
                "so this output does not come from the edit",
                stored=state.stored,
                used=state.stored - state.lost,
                **request.call.failure(),
            )

    def record(self, request: Request, item: TokenEvent | Completion) -> None:
        """Take one item of a request into the stream's state."""
        try:
            request.record(item)
        except UsageError as error:
            if request.call.consumed:
                raise self._failed(request, error) from error
            raise

    def _failed(self, request: Request, error: BaseException) -> LMCacheStreamError:
        refused = isinstance(error, EngineResponseError) and 400 <= error.status < 500 and not request.arrived
        what = "the engine refused the request" if refused else f"the engine failed after {request.arrived} tokens"
        return LMCacheStreamError(
            f"stream {self._stream_id}: {what}: {str(error) or repr(error)}", **request.call.failure()
        )


def _max_tokens(sampling_params: Any) -> int | None:
    if not isinstance(sampling_params, Mapping):
        raise UsageError(f"sampling_params must be a mapping, not {type(sampling_params).__name__}")
    max_tokens: int | None = sampling_params.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise UsageError(f"max_tokens must be an int of at least 1, not {max_tokens!r}")
    return max_tokens


async def _next(batches: AsyncGenerator[Items, None], deadline: float | None) -> Items | None:
    if deadline is None:
        return await anext(batches, None)
    async with asyncio.timeout_at(deadline):
        return await anext(batches, None)


_warned = False


def _warn_unverifiable() -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "the engine, or post_completion, does not say how many prompt tokens came from the cache, so nothing shows "
            "at once that an edit was decoded from: start vLLM with --enable-prompt-tokens-details, and let "
            "post_completion end with a Completion that has its usage"
        )
