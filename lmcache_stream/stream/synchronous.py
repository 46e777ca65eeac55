"""The synchronous face of a stream, and the same as functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from lmcache_stream import portal
from lmcache_stream.editors.base import Editor
from lmcache_stream.kvcache.context import KVCacheContext
from lmcache_stream.metrics import StreamPerfMetrics
from lmcache_stream.stream.asynchronous import AsyncLMCacheStream
from lmcache_stream.stream.edits import ModifyFn
from lmcache_stream.stream.face import StreamFace
from lmcache_stream.stream.kv import OnShortfall
from lmcache_stream.stream.state import ModifyReceipt
from lmcache_stream.types import AsyncPostCompletion, PostCompletion, TokenEvent

__all__ = ["LMCacheStream", "create_request", "generate", "get", "update"]


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
                f"the first argument is a {type(ctx).__name__}: LMCacheStream takes (context, engine, ids), with a "
                "context from connect(...); AsyncLMCacheStream takes one from aconnect(...)"
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
