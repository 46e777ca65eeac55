"""What both faces of a stream answer from its state alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_stream.metrics import StreamPerfMetrics
    from lmcache_stream.stream.state import ModifyReceipt, StreamState
    from lmcache_stream.types import AsyncPostCompletion, PostCompletion

__all__ = ["StreamFace"]


class StreamFace:
    """What both faces answer from the stream's state alone."""

    _state: StreamState
    _stream_id: str
    _post_completion: PostCompletion | AsyncPostCompletion

    def stream_id(self) -> str:
        """The stream's unique id."""
        return self._stream_id

    def suffix_tokens(self) -> list[int]:
        """Tokens that have no stored KV and go in front of the next request's own suffix; a copy."""
        return self._state.suffix.copy()

    def decoded_tokens(self) -> int:
        """How many tokens were generated so far, over all requests."""
        return self._state.decoded

    def output_text(self) -> str:
        """The text generated so far, over all requests."""
        return "".join(self._state.text_parts)

    def output_tokens(self) -> list[int]:
        """The ids of the tokens generated so far, over all requests, and only those; a copy."""
        return self._state.generated.copy()

    def is_done(self) -> bool:
        """Whether the last request ended by itself (EOS, a stop string), not by its length."""
        return self._state.done

    def finish_reason(self) -> str | None:
        """Why the last request ended, as the engine says ("stop", "length", ...); None if it does not say."""
        return self._state.finish_reason

    @property
    def tokens(self) -> list[int]:
        """Sequence that backs the stored KV; the next request sends it, then the suffix. A copy."""
        return self._state.tokens.copy()

    @property
    def done(self) -> bool:
        """The same as `is_done()`."""
        return self._state.done

    @property
    def cache_salt(self) -> str:
        """The `cache_salt` of the next request: the caller's, or that of the last edit."""
        return self._state.salt

    @property
    def post_completion(self) -> PostCompletion | AsyncPostCompletion:
        """What calls the engine."""
        return self._post_completion

    @property
    def last_metrics(self) -> StreamPerfMetrics | None:
        """Metrics of the last request, also of one that was left early or failed; None before the first."""
        return self._state.last_metrics

    @property
    def last_receipt(self) -> ModifyReceipt | None:
        """Receipt of the last edit; None before the first."""
        return self._state.last_receipt

    def __repr__(self) -> str:
        state = self._state
        return (
            f"{type(self).__name__}({self._stream_id}, tokens={len(state.tokens)}, suffix={len(state.suffix)}, "
            f"decoded={state.decoded}, done={state.done})"
        )
