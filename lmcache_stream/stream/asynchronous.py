"""One request over several passes: what it does with its engine and its cached KV, one thing at a time."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, Self

import torch

from lmcache_stream import observe
from lmcache_stream.editors.base import Editor
from lmcache_stream.errors import StreamTimeout, UsageError
from lmcache_stream.kvcache.context import AsyncKVCacheContext, check_cache_salt
from lmcache_stream.metrics import StreamPerfMetrics
from lmcache_stream.stream.edits import EditsWhileDecoding, ModifyFn
from lmcache_stream.stream.face import StreamFace
from lmcache_stream.stream.kv import Coverage, OnShortfall, StreamKV
from lmcache_stream.stream.passes import Passes
from lmcache_stream.stream.state import ModifyReceipt, StreamState, check_token_ids
from lmcache_stream.types import AsyncPostCompletion, PostCompletion, TokenEvent

__all__ = ["AsyncLMCacheStream"]

_RELEASE_TIMEOUT: Final = 10.0


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
                f"the first argument is a {type(ctx).__name__}: AsyncLMCacheStream takes (context, engine, ids), with "
                "a context from `async with aconnect(...)`; LMCacheStream takes one from connect(...)"
            )
        if not callable(post_completion):
            raise TypeError(
                f"the second argument is a {type(post_completion).__name__}: it takes what asks the engine, such as "
                "CompletionsClient(base_url), or a callable (prompt_token_ids, sampling_params, cache_salt)"
            )
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
        self._begin_with(StreamState(tokens=tokens, salt=cache_salt, original_salt=cache_salt, expected=len(tokens)))
        self._operation: str | None = None
        self._idle = asyncio.Event()
        self._open_events: weakref.ref[AsyncGenerator[TokenEvent, None]] | None = None

    def _begin_with(self, state: StreamState) -> None:
        self._state = state
        self._kv = StreamKV(
            self._ctx, state, self._stream_id, salt_edits=self._salt_edits, on_shortfall=self._on_shortfall
        )
        self._passes = Passes(
            self._ctx, self._kv, state, self._stream_id, self._post_completion, on_shortfall=self._on_shortfall
        )

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
            async with aclosing(self._passes.run(sampling_params, suffix_tokens, edits, timeout)) as passes:
                async for request, batch in passes:
                    for item in batch:
                        self._passes.record(request, item)
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
            async with aclosing(self._passes.run(sampling_params, suffix_tokens, edits, timeout)) as passes:
                async for request, batch in passes:
                    for item in batch:
                        self._passes.record(request, item)
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
                return await self._kv.retrieve(Coverage(timeout, poll_interval, allow_partial, decode_saved))

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
                await self._kv.update(kv, tokens, timeout=timeout)

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
            return await self._kv.modify(fn, Coverage(timeout, poll_interval, allow_partial, decode_saved))

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
            fork._begin_with(self._state.copy())
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
            try:
                async with asyncio.timeout(_RELEASE_TIMEOUT):
                    await self._idle.wait()
            except TimeoutError as error:
                raise StreamTimeout(
                    f"stream {self._stream_id}: {operation}: the events(...) left behind did not close within "
                    f"{_RELEASE_TIMEOUT:g} s; leave them through contextlib.aclosing(...)"
                ) from error
        self._operation = operation
        self._idle.clear()
        try:
            yield
        finally:
            self._operation = None
            self._open_events = None
            self._idle.set()
