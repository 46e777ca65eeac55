"""What a stream knows, and how it changes: no I/O.

The full logical sequence is `tokens` + `suffix`. Nothing is lost and nothing is doubled: what is sent to the engine is
always kept ids + tail + suffix + generated ids, each once.
"""

from __future__ import annotations

import hashlib
import operator
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
        raise UsageError(f"{what} is {token!r}, not a token id") from None
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
        stored: False when `fn` returned None: nothing was stored and the stream is unchanged.
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


class Request:
    """One request of a stream: the state moves with its first token, not before.

    Args:
        state: The stream's.
        suffix: The caller's suffix tokens.
        max_tokens: As asked for; None if not.
        earlier: Requests of the same call before this one.
    """

    def __init__(
        self,
        state: StreamState,
        suffix: Sequence[int],
        max_tokens: int | None,
        earlier: Sequence[Request] = (),
    ) -> None:
        self._state = state
        self._earlier = tuple(earlier)
        self._max_tokens = max_tokens
        self.ids: list[int] = [*state.tokens, *state.suffix, *suffix]
        self.start: float = time.perf_counter()
        self.times: list[float] = []
        self.consumed: bool = False
        self.completion: Completion | None = None

    @property
    def arrived(self) -> int:
        """Tokens that came so far."""
        return len(self.times)

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
                self.times.append(time.perf_counter() if item.time is None else item.time)
                state.tokens.append(token)
                state.generated.append(token)
                state.decoded += 1
            if item.text:
                state.text_parts.append(item.text)
        elif isinstance(item, Completion):
            self.completion = item
        else:
            raise UsageError(f"post_completion must yield TokenEvent(token_id, text), not {type(item).__name__}")

    def _consume(self) -> None:
        state = self._state
        state.tokens = self.ids.copy()
        state.suffix = []
        state.expected = len(self.ids)
        state.done = False
        state.finish_reason = None
        self.consumed = True

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

    def judge_edit(self) -> None:
        """Note what the ended request tells about the stored edit.

        An engine always computes the last token of a prompt, also one that a cache has.
        """
        state = self._state
        cached = self.cached_tokens
        if cached is not None:
            state.unverified = False
            state.lost = max(state.lost, min(state.stored, len(self.ids) - 1) - cached)

    def failure(self) -> dict[str, Any]:
        """What an error has to say about the call: `arrived` and `suffix_consumed`."""
        earlier = sum(request.arrived for request in self._earlier)
        return {"arrived": earlier + self.arrived, "suffix_consumed": self.consumed or bool(self._earlier)}

    def metrics(self) -> StreamPerfMetrics:
        """What the call took, up to now: this request and those before it, with all that lay between."""
        requests = (*self._earlier, self)
        return StreamPerfMetrics.from_times(
            start=requests[0].start,
            end=time.perf_counter(),
            times=[arrival for request in requests for arrival in request.times],
            input_tokens=len(requests[0].ids),
            cached_tokens=self.cached_tokens,
            edit_shortfall=self._state.lost,
        )
