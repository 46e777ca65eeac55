"""What a stream knows, and how it changes: no I/O.

The full logical sequence is `tokens` + `suffix`. Nothing is lost and nothing is doubled: what is sent to the engine is
always kept ids + tail + suffix + generated ids, each once.
"""

from __future__ import annotations

import hashlib
import operator
import reprlib
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from lmcache_stream.errors import UsageError
from lmcache_stream.kvcache.context import MAX_CACHE_SALT
from lmcache_stream.metrics import StreamPerfMetrics
from lmcache_stream.types import Completion, TokenEvent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

_NONCE_BYTES: Final = 12
_SALT_SEPARATOR: Final = "~"


def fresh_salt(original: str) -> str:
    """A new `cache_salt` for an edit, derived from the caller's original one; at most 128 characters."""
    nonce = secrets.token_hex(_NONCE_BYTES)
    room = MAX_CACHE_SALT - len(nonce) - len(_SALT_SEPARATOR)
    if len(original) > room:
        original = hashlib.blake2b(original.encode(), digest_size=32).hexdigest()
    return f"{original}{_SALT_SEPARATOR}{nonce}"


def check_token_ids(tokens: Iterable[int], what: str) -> list[int]:
    """`tokens` as a list of plain non-negative ints; `UsageError` names `what` otherwise."""
    if isinstance(tokens, str | bytes):
        raise UsageError(f"{what} must be token ids, not text: tokenize it first")
    ids = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    try:
        listed = list(ids)
    except TypeError:
        raise UsageError(f"{what} must be a sequence of token ids, not {type(tokens).__name__}") from None
    for position, token in enumerate(listed):
        if type(token) is not int or token < 0:
            listed[position] = check_token_id(token, f"{what}[{position}]")
    return listed


def check_token_id(token: Any, what: str) -> int:
    """`token` as a plain non-negative int; `UsageError` names `what` otherwise."""
    try:
        plain = operator.index(token)
    except TypeError:
        nested = ": take one list of ids, not a list of lists" if isinstance(token, list | tuple) else ""
        raise UsageError(f"{what} is {reprlib.repr(token)}, not a token id{nested}") from None
    if plain < 0:
        raise UsageError(f"{what} is {plain}: a token id is not negative")
    return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class ModifyReceipt:
    """What one edit of a stream's KV did.

    Args:
        tokens_before: Tokens of the KV that the editor was given.
        tokens_after: Tokens of the KV that it returned.
        kept_positions: Positions, before the edit, of the tokens kept, int64 `[T']`, `[L, T']` or `[L, H, T']`; None
            where the editor does not say.
        asked: The budget that the editor was asked for, a ratio or a token count; None where there is none.
        chunks_stored: Whole chunks that the cache took.
        recomputed: Tokens of the edit after the last whole chunk: the engine computes their KV from their ids.
        bytes_moved: Bytes of KV read from the cache and written to it.
        seconds: Time in each step: `wait` for coverage, `retrieve`, `edit`, `store`.
        salt: The `cache_salt` under which the edit lies.
        stored: False when there was nothing to store: `fn` returned None, or an editor its input as it was. The stream
            is unchanged then.
    """

    tokens_before: int
    tokens_after: int
    kept_positions: torch.Tensor | None = field(default=None, compare=False, repr=False)
    asked: float | int | None = None
    chunks_stored: int = 0
    recomputed: int = 0
    bytes_moved: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    salt: str = field(default="", repr=False)
    stored: bool = True


@dataclass(slots=True)
class StreamState:
    """A stream between two operations.

    Args:
        tokens: Sequence that backs the stored KV; sent as the next prompt.
        salt: The `cache_salt` under which that KV lies.
        original_salt: The caller's own.
        suffix: Tokens after `tokens` that have no stored KV; sent once, with the next request.
        expected: How many of `tokens` the cache should come to hold: what was sent, or what was stored.
        stored: How many of `tokens` are the ids of a stored edit; 0 without one.
        fingerprint: Of the stored edit's KV, to know it again.
        unverified: Whether a request went out since of which nobody said whether it took the edit. An engine offloads
            what it computes itself under the edit's ids and salt, so a lookup tells nothing any more.
        shared: Whether a fork decodes from the same edit, whose requests are as good as ones of our own without a word.
        lost: How many of the `stored` tokens are known to be gone.
    """

    tokens: list[int]
    salt: str
    original_salt: str
    suffix: list[int] = field(default_factory=list)
    expected: int = 0
    stored: int = 0
    fingerprint: torch.Tensor | None = None
    unverified: bool = False
    shared: bool = False
    lost: int = 0
    generated: list[int] = field(default_factory=list)
    text_parts: list[str] = field(default_factory=list)
    decoded: int = 0
    done: bool = False
    finish_reason: str | None = None
    last_metrics: StreamPerfMetrics | None = None
    last_receipt: ModifyReceipt | None = None

    def copy(self) -> StreamState:
        """An independent copy."""
        return replace(
            self,
            tokens=self.tokens.copy(),
            suffix=self.suffix.copy(),
            generated=self.generated.copy(),
            text_parts=self.text_parts.copy(),
        )

    def replace_prefix(
        self,
        stored: Sequence[int],
        unstored: Sequence[int],
        tail: Sequence[int],
        salt: str,
        fingerprint: torch.Tensor | None = None,
    ) -> None:
        """Back the stream by an edit: `stored` ids lie in the cache under `salt`.

        Args:
            stored: Ids of the whole chunks that were stored.
            unstored: The edit's ids after them, less than a chunk: recomputed with the next request.
            tail: Ids that came after the edited prefix.
            salt: Where `stored` lies.
            fingerprint: Of the stored KV.
        """
        self.suffix = [*unstored, *tail, *self.suffix]
        self.tokens = list(stored)
        self.salt = salt
        self.expected = self.stored = len(self.tokens)
        self.fingerprint = fingerprint
        self.unverified = self.shared = False
        self.lost = 0
        self.done = False
        self.finish_reason = None


class GenerateCall:
    """What the requests of one call of a stream brought so far.

    Attributes:
        times: When each token came, in seconds of `time.perf_counter`.
        consumed: Whether the pending and the caller's suffix are part of the stream's tokens now.
        cached_tokens: Prompt tokens of the first request that the engine took from a cache; None if it does not say.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.consumed: bool = False
        self.cached_tokens: int | None = None
        self._start: float | None = None
        self._input_tokens = 0
        self._shortfalls: dict[str, int] = {}

    def begin(self, input_tokens: int) -> bool:
        """Note that a request of so many tokens goes out; whether it is the first."""
        if self._start is not None:
            return False
        self._start, self._input_tokens = time.perf_counter(), input_tokens
        return True

    def miss(self, salt: str, tokens: int) -> None:
        """Note how many tokens of the edit under `salt` were not taken from the cache."""
        self._shortfalls[salt] = tokens

    def failure(self) -> dict[str, Any]:
        """What an error has to say about it: `arrived` and `suffix_consumed`."""
        return {"arrived": len(self.times), "suffix_consumed": self.consumed}

    def metrics(self) -> StreamPerfMetrics | None:
        """What it took, up to now, with all that lay between its requests; None if none went out."""
        if self._start is None:
            return None
        return StreamPerfMetrics.from_times(
            start=self._start,
            end=time.perf_counter(),
            times=self.times,
            input_tokens=self._input_tokens,
            cached_tokens=self.cached_tokens,
            edit_shortfall=sum(self._shortfalls.values()),
        )


class Request:
    """One request of a stream: the state moves with its first token, not before.

    Args:
        state: The stream's.
        suffix: The caller's suffix tokens.
        max_tokens: As asked for; None if not.
        call: The call that it is a part of.

    Attributes:
        start: When it went out, in seconds of `time.perf_counter`.
    """

    def __init__(
        self, state: StreamState, suffix: Sequence[int], max_tokens: int | None, call: GenerateCall | None = None
    ) -> None:
        self._state = state
        self._max_tokens = max_tokens
        self._first = False
        self.call: GenerateCall = GenerateCall() if call is None else call
        self.ids: list[int] = [*state.tokens, *state.suffix, *suffix]
        self.start: float = time.perf_counter()
        self._times = self.call.times
        self._earlier = len(self._times)
        self.consumed: bool = False
        self.completion: Completion | None = None

    @property
    def arrived(self) -> int:
        """Tokens that came so far."""
        return len(self._times) - self._earlier

    @property
    def first(self) -> float | None:
        """When its first token came; None before."""
        return self._times[self._earlier] if self.arrived else None

    def send(self) -> None:
        """Note that it goes out now."""
        self.start = time.perf_counter()
        self._first = self.call.begin(len(self.ids))
        self._state.unverified = self._state.stored > 0
        self.call.miss(self._state.salt, self._state.lost)

    def record(self, item: TokenEvent | Completion) -> None:
        """Take one item from the engine into the stream's state."""
        if self.completion is not None:
            raise UsageError("post_completion yielded something after its Completion: that must be the last item")
        if isinstance(item, TokenEvent):
            state = self._state
            token = item.token_id
            if token is not None and (type(token) is not int or token < 0):
                token = check_token_id(token, "TokenEvent.token_id")
            if type(item.text) is not str:
                raise UsageError(f"TokenEvent.text must be text, not {type(item.text).__name__}")
            if not self.consumed:
                self._consume()
            if token is not None:
                self._times.append(time.perf_counter() if item.time is None else item.time)
                state.tokens.append(token)
                state.generated.append(token)
                state.decoded += 1
            if item.text:
                state.text_parts.append(item.text)
        elif isinstance(item, Completion):
            self.completion = item
            if self._first:
                self.call.cached_tokens = self.cached_tokens
        else:
            raise UsageError(f"post_completion must yield TokenEvent(token_id, text), not {type(item).__name__}")

    def _consume(self) -> None:
        state = self._state
        state.tokens = self.ids.copy()
        state.suffix = []
        state.expected = len(self.ids)
        state.done = False
        state.finish_reason = None
        self.consumed = self.call.consumed = True

    def finish(self) -> None:
        """The engine ended the request by itself: decide whether the stream is done."""
        if not self.consumed:
            if self.aborted:
                return
            self._consume()
        state = self._state
        reason = self.completion.finish_reason if self.completion else None
        state.finish_reason = reason
        if reason is None:
            state.done = self._max_tokens is not None and self.arrived < self._max_tokens
        else:
            state.done = reason not in ("length", "abort", "error")

    @property
    def aborted(self) -> bool:
        """Whether the engine gave up on the request."""
        return self.completion is not None and self.completion.finish_reason in ("abort", "error")

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the engine took from a cache; None if it does not say."""
        usage = self.completion.usage if self.completion else None
        return usage.cached_tokens if usage else None

    @property
    def repeated(self) -> bool:
        """Whether the engine was asked more than once: then KV of an earlier attempt may have passed for the edit."""
        return self.completion is not None and self.completion.attempts > 1

    def judge_edit(self) -> None:
        """Note what the ended request tells about the stored edit.

        An engine always computes the last token of a prompt, also one that a cache has.
        """
        state = self._state
        cached = self.cached_tokens
        if cached is not None:
            state.unverified = self.repeated and state.stored > 0
            state.lost = max(state.lost, min(state.stored, len(self.ids) - 1) - cached)
            self.call.miss(state.salt, state.lost)
