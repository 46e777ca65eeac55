"""The words that pass between a stream, an engine and a cache."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterable, Awaitable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

__all__ = ["AsyncPostCompletion", "CacheKind", "Completion", "PostCompletion", "TokenEvent", "Usage"]


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """One generated token.

    Args:
        token_id: The token's id; None for text that came without a token (an engine flushing held-back text).
        text: The text that became readable with it; may be empty while a character or a stop string is unfinished.
        time: When it arrived, in seconds of `time.perf_counter`; None: when the stream sees it. Tokens of one server
            event share one time.
    """

    token_id: int | None
    text: str = ""
    time: float | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the engine reports them.

    Args:
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Tokens generated.
        cached_tokens: Prompt tokens that the engine took from a cache instead of computing them; None if it does not
            say (vLLM says with `--enable-prompt-tokens-details`).
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None


class Completion(msgspec.Struct, frozen=True):
    """How a completion ended. An engine callable may yield one after its last `TokenEvent`.

    Args:
        finish_reason: "stop", "length", "repetition", "abort", "error", or None if the engine does not say.
        stop_reason: The stop string or the stop token's id, if one ended it.
        usage: Token counts, if the engine reports them.
        attempts: How often the engine was asked: the last may have found cached what an earlier one had computed.
    """

    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    attempts: int = 1


class CacheKind(enum.Enum):
    """What a cache holds for a token: its keys and values, or its queries."""

    KV = "kv"
    QUERY = "query"


class PostCompletion(Protocol):
    """Calls an engine and yields one `TokenEvent` per generated token, blocking in between.

    It is called as `post_completion(prompt_token_ids, sampling_params, cache_salt)` and iterated in a thread of its
    own. It may end with one `Completion`; without one, a stream counts tokens to tell whether it is done. One that asks
    an engine again by itself says so in `Completion.attempts`.
    """

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: Mapping[str, Any], cache_salt: str, /
    ) -> Iterable[TokenEvent | Completion]: ...


class AsyncPostCompletion(Protocol):
    """Calls an engine without blocking: an async generator, or a callable that returns one or an awaitable of one."""

    def __call__(
        self, prompt_token_ids: list[int], sampling_params: Mapping[str, Any], cache_salt: str, /
    ) -> (
        AsyncIterable[TokenEvent | Completion]
        | Awaitable[AsyncIterable[TokenEvent | Completion] | Iterable[TokenEvent | Completion]]
    ): ...
