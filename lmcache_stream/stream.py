"""One request over several passes: prefill, modify its KV, decode.

`AsyncLMCacheStream` holds the logic; `LMCacheStream` is its synchronous, documented face.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Final, Literal, Self, TypeVar

import anyio
import torch

from lmcache_stream import observe, portal
from lmcache_stream.callables import Items, call, event_batches, in_own_thread
from lmcache_stream.editors.base import Edit, EditInput, Editor
from lmcache_stream.errors import (
    CacheError,
    CoverageTimeout,
    EditNotUsed,
    LMCacheStreamError,
    StoreError,
    StreamTimeout,
    UsageError,
)
from lmcache_stream.face import StreamFace
from lmcache_stream.kvcache.context import (
    AsyncKVCacheContext,
    KVCacheContext,
    StoreOutcome,
    check_cache_salt,
    check_timeout,
)
from lmcache_stream.metrics import StreamPerfMetrics
from lmcache_stream.rounds import EditsWhileDecoding, ModifyFn, plan_passes
from lmcache_stream.state import ModifyReceipt, Request, StreamState, check_token_ids, fresh_salt, whole_chunks
from lmcache_stream.types import AsyncPostCompletion, CacheKind, Completion, PostCompletion, TokenEvent

__all__ = [
    "AsyncLMCacheStream",
    "LMCacheStream",
    "LMCacheStreamError",
    "ModifyFn",
    "ModifyReceipt",
    "PostCompletion",
    "StreamPerfMetrics",
    "TokenEvent",
    "create_request",
    "generate",
    "get",
    "update",
]

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")
OnShortfall = Literal["raise", "report"]
_RELEASE_TIMEOUT: Final = 10.0
_COVERAGE_TIMEOUT: Final = 30.0
_POLL_INTERVAL: Final = 0.2


class AsyncLMCacheStream(StreamFace):
    """One logical request that spans several passes of an engine over KV that the caller edits.

    One operation at a time: a second one while the first runs is a `UsageError`. A failure before the first token
    leaves everything as it was. After it, what was sent and what arrived is part of `tokens`, and the error says so.

    Args:
        ctx: The cache that the engine offloads KV to, from `aconnect`.
        post_completion: Calls the engine with `(prompt_token_ids, sampling_params, cache_salt)`: a `CompletionsClient`,
            an async generator function, or a plain blocking callable that returns an iterable.
        prompt_token_ids: The prompt.
        cache_salt: Isolates this request's KV from other users'; at most 128 characters.
        salt_edits: Whether every edit gets a `cache_salt` of its own. Without it, an edit that keeps the ids of a
            chunk is a `StoreError`: a cache keeps the chunk that it has.
        on_shortfall: What to do when the engine did not take the whole stored edit from the cache: "raise"
            `EditNotUsed`, or "report" it in the metrics (`edit_shortfall`).

    Raises:
        UsageError: Ids that are no token ids, or an unknown `on_shortfall`.
        TypeError: A synchronous context.
    """

    def __init__(
        self,
        ctx: AsyncKVCacheContext,
        post_completion: PostCompletion | AsyncPostCompletion,
        prompt_token_ids: Sequence[int],
        cache_salt: str = "",
        *,
        salt_edits: bool = True,
        on_shortfall: OnShortfall = "raise",
    ) -> None:
        if not isinstance(ctx, AsyncKVCacheContext):
            raise TypeError(
                "AsyncLMCacheStream takes a context from aconnect(...); LMCacheStream takes one from connect(...)"
            )
        if not callable(post_completion):
            raise TypeError("post_completion must be callable as (prompt_token_ids, sampling_params, cache_salt)")
        if on_shortfall not in ("raise", "report"):
            raise UsageError(f'on_shortfall must be "raise" or "report", not {on_shortfall!r}')
        tokens = check_token_ids(prompt_token_ids, "prompt_token_ids")
        check_cache_salt(cache_salt)
        if not tokens:
            raise UsageError("prompt_token_ids is empty: an engine needs at least one token")
        self._ctx = ctx
        self._post_completion = post_completion
        self._salt_edits = salt_edits
        self._on_shortfall: OnShortfall = on_shortfall
        self._stream_id = str(uuid.uuid4())
        self._state = StreamState(tokens=tokens, salt=cache_salt, original_salt=cache_salt, expected=len(tokens))
        self._operation: str | None = None
        self._idle = asyncio.Event()
        self._open_events: weakref.ref[AsyncGenerator[TokenEvent, None]] | None = None

    @property
    def ctx(self) -> AsyncKVCacheContext:
        """The cache."""
        return self._ctx

    async def generate(
        self,
        sampling_params: Mapping[str, Any],
        suffix_tokens: Sequence[int] = (),
        *,
        edit_every: int | None = None,
        editor: ModifyFn | Editor | None = None,
        timeout: float | None = None,
    ) -> StreamPerfMetrics:
        """Run one pass of the engine to its end: send `tokens`, the pending suffix and `suffix_tokens`, and decode.

        With `edit_every`, edit while decoding: after that many tokens they are sent again as part of the prompt, so
        that the engine offloads them, their KV is edited with the rest, and decoding goes on, until `max_tokens` or
        the engine's own end. An editor with a token count as its budget bounds the KV of a long answer. A `seed` begins
        anew with each pass, and a stop string that two passes share is not seen.

        Args:
            sampling_params: The engine's, as JSON values; `max_tokens` 1 is a prefill.
            suffix_tokens: Ids to append to the prompt.
            edit_every: Tokens between two edits; None: no edits.
            editor: What edits, as for `modify_kv`.
            timeout: Seconds for the whole pass, edits included; None: no limit of its own.

        Returns:
            The pass's metrics; times in seconds. With edits, gaps between tokens include them.

        Raises:
            LMCacheStreamError: The engine or the cache failed (`arrived`, `suffix_consumed`).
            EditNotUsed: The engine did not decode from the stored edit.
            StreamTimeout: It did not end in time.
            UsageError: Arguments that cannot be right, or an operation under way.
        """
        edits = EditsWhileDecoding.checked(edit_every, editor)
        return await self._generate(sampling_params, suffix_tokens, edits, timeout)

    async def _generate(
        self,
        sampling_params: Mapping[str, Any],
        suffix_tokens: Sequence[int],
        edits: EditsWhileDecoding | None,
        timeout: float | None,
    ) -> StreamPerfMetrics:
        async with self._exclusive("generate"):
            async with aclosing(self._passes(sampling_params, suffix_tokens, edits, timeout)) as passes:
                async for request, batch in passes:
                    for item in batch:
                        self._record(request, item)
            assert self._state.last_metrics is not None
            return self._state.last_metrics

    def events(
        self,
        sampling_params: Mapping[str, Any],
        suffix_tokens: Sequence[int] = (),
        *,
        edit_every: int | None = None,
        editor: ModifyFn | Editor | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[TokenEvent, None]:
        """Run one pass of the engine, token by token: `async for event in stream.events(...)`.

        The tokens handed out are part of the stream. Leaving early closes the engine's response and keeps those that
        were handed out; `last_metrics` holds the pass's metrics afterwards. Arguments and errors are those of
        `generate`.
        """
        holder: list[weakref.ref[AsyncGenerator[TokenEvent, None]]] = []
        edits = EditsWhileDecoding.checked(edit_every, editor)
        events = self._events(sampling_params, suffix_tokens, edits, timeout, holder)
        holder.append(weakref.ref(events))
        return events

    async def _events(
        self,
        sampling_params: Mapping[str, Any],
        suffix_tokens: Sequence[int],
        edits: EditsWhileDecoding | None,
        timeout: float | None,
        holder: list[weakref.ref[AsyncGenerator[TokenEvent, None]]],
    ) -> AsyncGenerator[TokenEvent, None]:
        async with self._exclusive("events"):
            self._open_events = holder[0]
            async with aclosing(self._passes(sampling_params, suffix_tokens, edits, timeout)) as passes:
                async for request, batch in passes:
                    for item in batch:
                        self._record(request, item)
                        if isinstance(item, TokenEvent):
                            yield item

    async def retrieve_kv(
        self,
        timeout: float = 30,
        poll_interval: float = 0.2,
        *,
        allow_partial: bool = False,
        decode_saved: bool = False,
    ) -> torch.Tensor:
        """Fetch the KV of the longest cached prefix of `tokens`, once the cache covers what was sent.

        Engines offload KV after they answer, so this waits until the cache covers the whole chunks of the prompt, of
        the last request's ids after one, or of what was stored after an edit.

        Args:
            timeout: Seconds to wait for that.
            poll_interval: Seconds between two looks, where the cache has to be asked.
            allow_partial: After `timeout`, take what there is.
            decode_saved: Wait for generated tokens too; usually engines do not offload them.

        Returns:
            `[2, L, hit_tokens, D]` on the CPU (one plane for MLA); a private copy.

        Raises:
            CoverageTimeout: The cache covered less in time (`seen`, `wanted`).
            EditNotUsed: The stored edit is gone from the cache.
            LMCacheStreamError: There is no whole chunk to expect, or the cache failed.
        """
        async with self._exclusive("retrieve_kv"):
            with observe.span("retrieve_kv", stream=self._stream_id):
                return await self._retrieve(timeout, poll_interval, allow_partial, decode_saved, {})

    async def update_kv(self, kv: torch.Tensor, tokens: Sequence[int], *, timeout: float | None = None) -> None:
        """Store `kv` for `tokens` and go on from there: `tokens` replaces the stream's.

        Whole chunks are stored, under a new `cache_salt`; ids after the last whole chunk go in front of the suffix,
        and the engine recomputes them. The pending suffix stays. What the stream's `tokens` had after the retrieved
        KV is not carried over (`modify_kv` does that): pass it as `suffix_tokens` to the next `generate`.

        Args:
            kv: `[2, L, T, D]`, in the dtype that was retrieved.
            tokens: `T` ids.
            timeout: Seconds for the store; None: the context's own.

        Raises:
            UsageError: `kv` and `tokens` do not fit.
            StoreError: The cache did not take every chunk. Nothing changed.
            LMCacheStreamError: The cache failed. Nothing changed.
        """
        async with self._exclusive("update_kv"):
            with observe.span("update_kv", stream=self._stream_id):
                await self._store(kv, self._check_pair(kv, tokens, like=None), tail=(), timeout=timeout)

    async def modify_kv(
        self,
        fn: ModifyFn | Editor,
        *,
        timeout: float = 30,
        poll_interval: float = 0.2,
        allow_partial: bool = False,
        decode_saved: bool = False,
    ) -> ModifyReceipt:
        """Retrieve the KV, let `fn` edit it, store the result: all or nothing.

        Args:
            fn: An `Editor`, or `fn(kv [2, L, T, D], tokens)` that returns `(new_kv, new_tokens)` of any length; sync
                (it runs in a thread of its own) or async. `kv` is a private copy, free to be edited in place. None
                from it means that there is nothing to store.
            timeout: Seconds to wait until the cache covers what was sent; see `retrieve_kv`, as for the rest.
            poll_interval: Seconds between two looks.
            allow_partial: After `timeout`, edit what there is.
            decode_saved: Wait for generated tokens too.

        Returns:
            What was done, step by step.

        Raises:
            CoverageTimeout, EditNotUsed, StoreError, LMCacheStreamError: As `retrieve_kv` and `update_kv`. Nothing
                changed.
            UsageError: `fn` returned something that cannot be stored. Nothing changed.
            Exception: Whatever `fn` raises, unchanged. Nothing changed.
        """
        async with self._exclusive("modify_kv"):
            return await self._modify(fn, timeout, poll_interval, allow_partial, decode_saved)

    async def fork(self, *, timeout: float | None = None) -> Self:
        """A second stream that goes on from here on its own: one prefill, several edits.

        Args:
            timeout: Seconds, as everywhere; a fork waits for nothing.

        Raises:
            UsageError: An operation is under way.
        """
        async with self._exclusive("fork"):
            self._state.shared = self._state.stored > 0
            fork = type(self)(
                self._ctx,
                self._post_completion,
                self._state.tokens or [0],  # an edit may have left none; the state itself is copied
                self._state.original_salt,
                salt_edits=self._salt_edits,
                on_shortfall=self._on_shortfall,
            )
            fork._state = self._state.copy()
            return fork

    @asynccontextmanager
    async def _exclusive(self, operation: str) -> AsyncIterator[None]:
        while self._operation is not None:
            if self._operation != "events" or self._open_events is None or self._open_events() is not None:
                raise UsageError(
                    f"stream {self._stream_id}: {operation} while {self._operation} is under way; a stream does one "
                    "thing at a time: await it first, close its events(...), or fork() the stream"
                )
            # An iterator of events was left behind: the loop is closing it.
            with anyio.fail_after(_RELEASE_TIMEOUT):
                await self._idle.wait()
        self._operation = operation
        self._idle.clear()
        try:
            yield
        finally:
            self._operation = None
            self._open_events = None
            self._idle.set()

    async def _passes(
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
        requests: list[Request] = []
        for size, edit_after in plan_passes(max_tokens, edits):
            params = dict(sampling_params) if size is None else {**sampling_params, "max_tokens": size}
            request = Request(self._state, suffix, size or max_tokens, requests)
            requests.append(request)
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
            if self._state.done:
                return
            if edit_after and edits is not None and self._state.expected >= self._ctx.chunk_size:
                await self._edit_midway(edits, request, deadline)

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
            first = request.times[0] - request.start if request.times else None
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

    async def _edit_midway(self, edits: EditsWhileDecoding, request: Request, deadline: float | None) -> None:
        left = _left(deadline, _COVERAGE_TIMEOUT)
        try:
            async with asyncio.timeout_at(deadline), edits.slots:
                await self._modify(
                    edits.editor,
                    _COVERAGE_TIMEOUT if left is None else left,
                    _POLL_INTERVAL,
                    False,
                    False,
                    deadline=deadline,
                )
        except LMCacheStreamError as error:
            error.arrived, error.suffix_consumed = request.failure().values()
            raise
        except TimeoutError as error:
            if deadline is None or asyncio.get_running_loop().time() < deadline:
                raise  # the editor's own
            raise StreamTimeout(
                f"stream {self._stream_id}: no end of an edit in time, after {request.arrived} tokens",
                **request.failure(),
            ) from error

    async def _modify(
        self,
        fn: ModifyFn | Editor,
        timeout: float,
        poll_interval: float,
        allow_partial: bool,
        decode_saved: bool,
        *,
        deadline: float | None = None,
    ) -> ModifyReceipt:
        with observe.span(
            "modify_kv",
            {"gen_ai.request.model": self._ctx.model_name},
            duration="lmcache_stream.modify.duration",
            measured=("gen_ai.request.model",),
            stream=self._stream_id,
        ) as span:
            receipt = await self._modified(fn, timeout, poll_interval, allow_partial, decode_saved, deadline)
            names = ("tokens_before", "tokens_after", "chunks_stored", "recomputed", "bytes_moved")
            told = {name: getattr(receipt, name) for name in names}
            logger.debug("stream %s: modified: %s", self._stream_id, told)
            span.set({f"lmcache_stream.modify.{name}": value for name, value in told.items()})
            span.record("lmcache_stream.modify.io", receipt.bytes_moved)
        return receipt

    async def _modified(
        self,
        fn: ModifyFn | Editor,
        timeout: float,
        poll_interval: float,
        allow_partial: bool,
        decode_saved: bool,
        deadline: float | None,
    ) -> ModifyReceipt:
        seconds: dict[str, float] = {}
        needs_queries = fn if isinstance(fn, Editor) and "queries" in fn.needs else None
        kv = await self._retrieve(
            timeout, poll_interval, allow_partial, decode_saved, seconds, needs_queries, bound=deadline
        )
        shape, dtype, nbytes = kv.shape, kv.dtype, kv.nbytes
        covered = shape[2]
        prefix, tail = self._state.tokens[:covered], self._state.tokens[covered:]
        with _timed(seconds, "edit"):
            edit = await self._edit(fn, kv, prefix)
        del kv
        if edit is None:
            receipt = ModifyReceipt(
                tokens_before=covered,
                tokens_after=covered,
                bytes_moved=nbytes,
                seconds=seconds,
                salt=self._state.salt,
                stored=False,
            )
            self._state.last_receipt = receipt
            return receipt
        ids = self._check_pair(edit.kv, edit.tokens, like=(shape, dtype))
        with _timed(seconds, "store"):
            stored = await self._store(edit.kv, ids, tail=tail, timeout=_left(deadline, self._ctx.timeout))
        receipt = ModifyReceipt(
            tokens_before=covered,
            tokens_after=len(ids),
            kept_positions=edit.kept_positions,
            asked=edit.asked,
            chunks_stored=stored // self._ctx.chunk_size,
            recomputed=len(ids) - stored,
            bytes_moved=nbytes + (edit.kv.nbytes // len(ids) * stored if ids else 0),
            seconds=seconds,
            salt=self._state.salt,
        )
        self._state.last_receipt = receipt
        return receipt

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
                    await self._require_edit(deadline)
            request.start = time.perf_counter()
            state.unverified = state.stored > 0
            try:
                batches = event_batches(self._post_completion, request.ids.copy(), sampling_params, salt)
                async with aclosing(batches):
                    with span.attached():  # the request goes out with the first step
                        batch = await _next(batches, deadline)
                    while batch is not None:
                        yield batch
                        batch = await _next(batches, deadline)
                request.finish()
                request.judge_edit()
            finally:
                state.last_metrics = request.metrics()
        except TimeoutError as error:
            if deadline is None or asyncio.get_running_loop().time() < deadline:
                raise self._failed(request, error) from error
            raise StreamTimeout(
                f"stream {self._stream_id}: no end in time, {request.arrived} tokens arrived", **request.failure()
            ) from error
        except LMCacheStreamError:
            raise
        except UsageError as error:
            if request.consumed:
                raise self._failed(request, error) from error
            raise
        except Exception as error:
            raise self._failed(request, error) from error
        if request.aborted:
            reason = request.completion.finish_reason if request.completion else None
            raise LMCacheStreamError(
                f"stream {self._stream_id}: the engine ended the request with finish reason {reason!r} after "
                f"{request.arrived} tokens",
                **request.failure(),
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
                **request.failure(),
            )

    def _record(self, request: Request, item: TokenEvent | Completion) -> None:
        try:
            request.record(item)
        except UsageError as error:
            if request.consumed:
                raise self._failed(request, error) from error
            raise

    def _failed(self, request: Request, error: BaseException) -> LMCacheStreamError:
        return LMCacheStreamError(
            f"stream {self._stream_id}: the engine failed after {request.arrived} tokens: {str(error) or repr(error)}",
            **request.failure(),
        )

    async def _require_edit(self, deadline: float | None) -> None:
        """Nobody else would tell: an engine recomputes an evicted edit from its ids without a word."""
        state = self._state
        if state.stored and not state.lost:
            with self._at_the_cache("looking up the edit"):
                state.lost = state.stored - await self._find_edit(_left(deadline, self._ctx.timeout))
        self._refuse_a_lost_edit()

    async def _require_edit_in(self, kv: torch.Tensor) -> None:
        """The same for KV that was retrieved: an engine may have put what it computed in the place of the edit."""
        state = self._state
        if state.stored and not state.lost and (state.unverified or state.shared):
            found = await self._ctx.executor.run(_fingerprint, kv[:, :, : state.stored])
            if kv.shape[2] < state.stored or state.fingerprint is None or not torch.equal(found, state.fingerprint):
                state.lost = state.stored
        self._refuse_a_lost_edit()

    def _refuse_a_lost_edit(self) -> None:
        state = self._state
        if state.lost and self._on_shortfall == "raise":
            raise EditNotUsed(
                f"stream {self._stream_id}: the cache holds {state.stored - state.lost} of the edit's {state.stored} "
                "tokens: it was evicted before it was decoded from; give the cache more room or decode sooner, and "
                "start from the prompt",
                stored=state.stored,
                used=state.stored - state.lost,
            )

    async def _find_edit(self, timeout: float | None = None) -> int:
        """How many tokens of the stored edit the cache still holds."""
        state = self._state
        ids = state.tokens[: state.stored]
        if not (state.unverified or state.shared):
            return min(state.stored, await self._ctx.lookup(ids, state.salt, timeout=timeout))
        kv = await self._ctx.retrieve(ids, state.salt, timeout=timeout)
        if kv is None or kv.shape[2] < state.stored:
            return kv.shape[2] if kv is not None else 0
        assert state.fingerprint is not None
        same = torch.equal(await self._ctx.executor.run(_fingerprint, kv), state.fingerprint)
        return state.stored if same else 0

    async def _retrieve(
        self,
        timeout: float,
        poll_interval: float,
        allow_partial: bool,
        decode_saved: bool,
        seconds: dict[str, float],
        needs_queries: Editor | None = None,
        bound: float | None = None,
    ) -> torch.Tensor:
        state = self._state
        chunk_size = self._ctx.chunk_size
        expected = len(state.tokens) if decode_saved else state.expected
        wanted = whole_chunks(expected, chunk_size)
        if not wanted:
            raise LMCacheStreamError(
                f"stream {self._stream_id}: {expected} tokens are less than one chunk of {chunk_size}: "
                "there will be no cached KV; use a longer prompt or a cache with smaller chunks"
            )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + check_timeout(timeout)
        with self._at_the_cache("retrieving KV"):
            while True:
                with _timed(seconds, "wait"):
                    covered = await self._ctx.wait_for(
                        state.tokens[:wanted],
                        timeout=max(0.0, deadline - loop.time()),
                        poll_interval=poll_interval,
                        cache_salt=state.salt,
                    )
                seen = covered
                if covered >= wanted or allow_partial:
                    left = _left(bound, self._ctx.timeout)
                    if needs_queries is not None and not await self._ctx.lookup(
                        state.tokens[:wanted], state.salt, kind=CacheKind.QUERY, timeout=left
                    ):
                        raise needs_queries.without_queries()
                    with _timed(seconds, "retrieve"):
                        kv = await self._ctx.retrieve(state.tokens, state.salt, timeout=left)
                    seen = kv.shape[2] if kv is not None else 0
                    if kv is not None and (seen >= wanted or allow_partial):
                        await self._require_edit_in(kv)
                        return kv
                if loop.time() >= deadline or covered < wanted:
                    raise CoverageTimeout(
                        f"stream {self._stream_id}: after {timeout:g} s the cache covers {seen} of {wanted} tokens; "
                        "does the engine offload to this cache, under this model name and cache_salt, and has the "
                        "cache room? (allow_partial=True takes what is there)",
                        seen=seen,
                        wanted=wanted,
                    )

    async def _edit(self, fn: Any, kv: torch.Tensor, tokens: list[int]) -> Edit | None:
        if isinstance(fn, Editor):
            queries = None
            if "queries" in fn.needs:
                with self._at_the_cache("retrieving queries"):
                    queries = await self._ctx.retrieve(tokens, self._state.salt, kind=CacheKind.QUERY)
            given = EditInput(
                kv=kv,
                tokens=tuple(tokens),
                geometry=self._ctx.geometry,
                chunk_size=self._ctx.chunk_size,
                queries=queries,
                spent=True,
            )
            edit: object = await in_own_thread(fn.edit, given)
            if not isinstance(edit, Edit):
                raise UsageError(f"{type(fn).__name__}.edit must return an Edit, not {type(edit).__name__}")
            return None if edit.kv is kv and edit.tokens == given.tokens else edit
        if not callable(fn) or isinstance(fn, type):
            raise UsageError(
                f"modify_kv takes an Editor, such as StreamingLLM(keep=0.5), or a function fn(kv, tokens), not {fn!r}"
            )
        result = await call(fn, kv, tokens.copy())
        if result is None:
            return None
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise UsageError(f"fn must return (new_kv, new_tokens) or None, not {type(result).__name__}")
        new_kv, new_tokens = result
        return Edit(kv=new_kv, tokens=tuple(check_token_ids(new_tokens, "new_tokens")), kept_positions=None)

    def _check_pair(self, kv: Any, tokens: Sequence[int], *, like: tuple[torch.Size, torch.dtype] | None) -> list[int]:
        ids = check_token_ids(tokens, "tokens")
        if not isinstance(kv, torch.Tensor) or kv.ndim != 4:
            raise UsageError(f"KV must be a tensor [2, L, T, D], not {getattr(kv, 'shape', type(kv).__name__)}")
        if kv.shape[2] != len(ids):
            raise UsageError(f"KV of {kv.shape[2]} tokens does not fit {len(ids)} ids")
        if like is not None:
            shape, dtype = like
            if (kv.shape[0], kv.shape[1], kv.shape[3]) != (shape[0], shape[1], shape[3]):
                raise UsageError(
                    f"an edit must keep planes, layers and width: got {list(kv.shape)}, from {list(shape)}"
                )
            if kv.dtype != dtype:
                raise UsageError(f"an edit must keep the dtype: got {kv.dtype}, from {dtype}; cast it back")
        return ids

    async def _store(self, kv: torch.Tensor, ids: list[int], *, tail: Sequence[int], timeout: float | None) -> int:
        """Store whole chunks, then move the state; the number of tokens stored."""
        state = self._state
        chunk_size = self._ctx.chunk_size
        whole = whole_chunks(len(ids), chunk_size)
        salt = fresh_salt(state.original_salt) if self._salt_edits else state.salt
        fingerprint = None
        if whole:
            kept = kv[:, :, :whole]
            with self._at_the_cache("storing the edit"):
                fingerprint = await self._ctx.executor.run(_fingerprint, kept)
                outcome = await self._ctx.put(kept, ids[:whole], salt, timeout=timeout)
            if not outcome.complete:
                raise StoreError(self._refusal(outcome))
        state.replace_prefix(ids[:whole], ids[whole:], tail, salt, fingerprint)
        return whole

    def _refusal(self, outcome: StoreOutcome) -> str:
        parts = []
        if outcome.kept:
            parts.append(
                f"{outcome.kept} are cached under these ids already and the cache keeps what it has "
                "(leave salt_edits on: an edit needs a cache_salt of its own)"
            )
        if outcome.missing:
            parts.append(f"for {outcome.missing} it has no room (give it more, or edit fewer streams at once)")
        return f"stream {self._stream_id}: of {outcome.chunks} chunks of the edit, " + ", and ".join(parts)

    @contextmanager
    def _at_the_cache(self, doing: str) -> Iterator[None]:
        try:
            yield
        except CacheError as error:
            raise LMCacheStreamError(f"stream {self._stream_id}: {doing}: {error}") from error


class LMCacheStream(StreamFace):
    """The synchronous face of `AsyncLMCacheStream`: the same arguments, methods and errors, without `await`.

    It works in a script, in a thread, and in a notebook whose kernel already runs an event loop. Ctrl-C cancels the
    call under way and waits for its clean-up.

    Args:
        ctx: The cache that the engine offloads KV to, from `connect`.
        post_completion: As for `AsyncLMCacheStream`.
        prompt_token_ids: The prompt.
        cache_salt: Isolates this request's KV from other users'; at most 128 characters.
        salt_edits: As for `AsyncLMCacheStream`.
        on_shortfall: As for `AsyncLMCacheStream`.

    Raises:
        UsageError: Ids that are no token ids, or an unknown `on_shortfall`.
        TypeError: An async context.
    """

    def __init__(
        self,
        ctx: KVCacheContext,
        post_completion: PostCompletion | AsyncPostCompletion,
        prompt_token_ids: Sequence[int],
        cache_salt: str = "",
        *,
        salt_edits: bool = True,
        on_shortfall: OnShortfall = "raise",
    ) -> None:
        if not isinstance(ctx, KVCacheContext):
            raise TypeError(
                "LMCacheStream takes a context from connect(...); AsyncLMCacheStream takes one from aconnect(...)"
            )
        self._ctx = ctx
        self._own(
            AsyncLMCacheStream(
                ctx.async_context,
                post_completion,
                prompt_token_ids,
                cache_salt,
                salt_edits=salt_edits,
                on_shortfall=on_shortfall,
            )
        )

    def _own(self, stream: AsyncLMCacheStream) -> None:
        self._async_stream = stream
        self._state = stream._state
        self._stream_id = stream.stream_id()
        self._post_completion = stream.post_completion

    @property
    def async_stream(self) -> AsyncLMCacheStream:
        """The async twin that does the work, on the background event loop."""
        return self._async_stream

    @property
    def ctx(self) -> KVCacheContext:
        """The cache."""
        return self._ctx

    def generate(
        self,
        sampling_params: Mapping[str, Any],
        suffix_tokens: Sequence[int] = (),
        *,
        edit_every: int | None = None,
        editor: ModifyFn | Editor | None = None,
        timeout: float | None = None,
    ) -> StreamPerfMetrics:
        """Run one pass of the engine to its end; see `AsyncLMCacheStream.generate`."""
        return portal.run(
            self._async_stream.generate,
            sampling_params,
            suffix_tokens,
            edit_every=edit_every,
            editor=editor,
            timeout=timeout,
        )

    def events(
        self,
        sampling_params: Mapping[str, Any],
        suffix_tokens: Sequence[int] = (),
        *,
        edit_every: int | None = None,
        editor: ModifyFn | Editor | None = None,
        timeout: float | None = None,
    ) -> Iterator[TokenEvent]:
        """Run one pass of the engine, token by token; see `AsyncLMCacheStream.events`.

        Tokens are read ahead: leaving early keeps those that had arrived, also the ones not handed out yet.
        """
        return portal.iterate(
            lambda: self._async_stream.events(
                sampling_params, suffix_tokens, edit_every=edit_every, editor=editor, timeout=timeout
            )
        )

    def retrieve_kv(
        self,
        timeout: float = 30,
        poll_interval: float = 0.2,
        *,
        allow_partial: bool = False,
        decode_saved: bool = False,
    ) -> torch.Tensor:
        """Fetch the KV of the longest cached prefix of `tokens`; see `AsyncLMCacheStream.retrieve_kv`."""
        return portal.run(
            self._async_stream.retrieve_kv,
            timeout,
            poll_interval,
            allow_partial=allow_partial,
            decode_saved=decode_saved,
        )

    def update_kv(self, kv: torch.Tensor, tokens: Sequence[int], *, timeout: float | None = None) -> None:
        """Store `kv` `[2, L, T, D]` for `T` tokens and go on from there; see `AsyncLMCacheStream.update_kv`."""
        portal.run(self._async_stream.update_kv, kv, tokens, timeout=timeout)

    def modify_kv(
        self,
        fn: ModifyFn | Editor,
        *,
        timeout: float = 30,
        poll_interval: float = 0.2,
        allow_partial: bool = False,
        decode_saved: bool = False,
    ) -> ModifyReceipt:
        """Retrieve the KV, let `fn` edit it, store the result; see `AsyncLMCacheStream.modify_kv`."""
        return portal.run(
            self._async_stream.modify_kv,
            fn,
            timeout=timeout,
            poll_interval=poll_interval,
            allow_partial=allow_partial,
            decode_saved=decode_saved,
        )

    def fork(self, *, timeout: float | None = None) -> Self:
        """A second stream that goes on from here on its own; see `AsyncLMCacheStream.fork`."""
        fork = object.__new__(type(self))
        fork._ctx = self._ctx
        fork._own(portal.run(self._async_stream.fork, timeout=timeout))
        return fork


def create_request(
    ctx: KVCacheContext,
    post_completion: PostCompletion | AsyncPostCompletion,
    prompt_token_ids: Sequence[int],
    cache_salt: str = "",
) -> LMCacheStream:
    """A new `LMCacheStream` for one request."""
    return LMCacheStream(ctx, post_completion, prompt_token_ids, cache_salt)


def generate(
    stream: LMCacheStream, sampling_params: Mapping[str, Any], suffix_tokens: Sequence[int] = ()
) -> StreamPerfMetrics:
    """The same as `stream.generate(sampling_params, suffix_tokens)`."""
    return stream.generate(sampling_params, suffix_tokens)


def get(stream: LMCacheStream, timeout: float = 30, poll_interval: float = 0.2) -> torch.Tensor:
    """The same as `stream.retrieve_kv(timeout, poll_interval)`: `[2, L, hit_tokens, D]`."""
    return stream.retrieve_kv(timeout, poll_interval)


def update(stream: LMCacheStream, kv: torch.Tensor, tokens: Sequence[int]) -> None:
    """The same as `stream.update_kv(kv, tokens)`, `kv` `[2, L, T, D]`."""
    stream.update_kv(kv, tokens)


def _max_tokens(sampling_params: Any) -> int | None:
    if not isinstance(sampling_params, Mapping):
        raise UsageError(f"sampling_params must be a mapping, not {type(sampling_params).__name__}")
    max_tokens: int | None = sampling_params.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise UsageError(f"max_tokens must be an int of at least 1, not {max_tokens!r}")
    return max_tokens


def _left(deadline: float | None, at_most: float) -> float | None:
    """Seconds until `deadline`, and no more than `at_most`; None where there is no deadline."""
    if deadline is None:
        return None
    return max(0.0, min(at_most, deadline - asyncio.get_running_loop().time()))


async def _next(batches: AsyncGenerator[Items, None], deadline: float | None) -> Items | None:
    if deadline is None:
        return await anext(batches, None)
    async with asyncio.timeout_at(deadline):
        return await anext(batches, None)


def _fingerprint(kv: torch.Tensor) -> torch.Tensor:
    """A sum over the bits of each plane and layer of `[P, L, T, D]`, int64 `[P, L]`: exact, whatever the order."""
    words = kv.detach().cpu().contiguous()
    wide = torch.int64 if words.shape[3] * words.element_size() % 8 == 0 else torch.uint8
    return words.view(wide).sum(dim=(2, 3), dtype=torch.int64)


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        with observe.span(
            step,
            {"lmcache_stream.step": step},
            duration="lmcache_stream.modify.duration",
            measured=("lmcache_stream.step",),
        ):
            yield
    finally:
        seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - start


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
