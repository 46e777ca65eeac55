"""What one request took."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_stream.metrics.statistics import rate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

__all__ = ["StreamPerfMetrics"]


@dataclass(frozen=True)
class StreamPerfMetrics:
    """The performance of one request of one stream; times in seconds, throughputs in tokens a second.

    Args:
        duration: From the request to the end of its answer.
        input_tokens: Tokens of the prompt that was sent; of several passes, the first's.
        output_tokens: Tokens that were generated.
        input_tput: `input_tokens / duration`; 0 when `duration` is 0.
        output_tput: `output_tokens / duration`; 0 when `duration` is 0.
        tpot: Time before each output token after the first, `output_tokens - 1` gaps (none for no tokens). Tokens that
            arrive in one event share its time: the gap before the event is spread evenly over them, and an opening
            event of k tokens gives k - 1 gaps of zero. The gaps sum to the time from the first to the last arrival.
        ttft: From the request to the arrival of the first token; 0 when none came.
        cached_tokens: Those of them that the engine took from a cache; None if it does not say.
        edit_shortfall: Tokens of stored edits that the engine did not take from the cache.
        times: Arrival of each token since the request.
        start: When the request was sent, in seconds of `time.perf_counter`.
    """

    duration: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    input_tput: float = 0.0
    output_tput: float = 0.0
    tpot: list[float] = field(default_factory=list)
    ttft: float = 0.0
    cached_tokens: int | None = None
    edit_shortfall: int = 0
    times: tuple[float, ...] = field(default=(), repr=False, compare=False)
    start: float = field(default=0.0, repr=False, compare=False)

    @classmethod
    def from_times(
        cls,
        *,
        start: float,
        end: float,
        times: Sequence[float],
        input_tokens: int,
        cached_tokens: int | None = None,
        edit_shortfall: int = 0,
    ) -> Self:
        """Measure a request by its clock.

        Args:
            start: When it was sent, in seconds of `time.perf_counter`.
            end: When its answer ended, on the same clock.
            times: When each token arrived, on the same clock, in order; equal neighbours are one event.
            input_tokens: Tokens of the prompt that was sent; of several passes, the first's.
            cached_tokens: Those of them that the engine took from a cache; None if it does not say.
            edit_shortfall: Tokens of stored edits that the engine did not take from the cache.
        """
        duration = end - start
        return cls(
            duration=duration,
            input_tokens=input_tokens,
            output_tokens=len(times),
            input_tput=rate(input_tokens, duration),
            output_tput=rate(len(times), duration),
            tpot=_gaps(times),
            ttft=times[0] - start if times else 0.0,
            cached_tokens=cached_tokens,
            edit_shortfall=edit_shortfall,
            times=tuple(time - start for time in times),
            start=start,
        )


def _gaps(times: Sequence[float]) -> list[float]:
    events = [(time, len(list(tokens))) for time, tokens in itertools.groupby(times)]
    if not events:
        return []
    gaps = [0.0] * (events[0][1] - 1)
    for (before, _), (time, tokens) in itertools.pairwise(events):
        gaps.extend([(time - before) / tokens] * tokens)
    return gaps
