"""What a soak counts."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Tally", "reason"]

SAMPLES = 5


@dataclass
class Tally:
    """Counts of one soak.

    Attributes:
        operations: Calls by name.
        faults: Faults by kind.
        tokens: Generated tokens that were held against what was expected.
        doubtful: Those of `tokens` that came in a request that failed or was left: they had to follow from the edit as
            far as the cache may still have held it.
        flagged: Tokens that came with `EditNotUsed`, which says that they do not come from the edit.
        states: Streams whose ids, suffix or text were held against what was expected.
        expected: Errors by type while faults were about.
        unexpected: Errors by type while none were, and those that may not come at all.
        wrong: What was wrong, in words.
        left: What was not let go of, in words.
    """

    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    doubtful: int = 0
    flagged: int = 0
    states: int = 0
    streams: int = 0
    expected: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)
    wrong_tokens: int = 0
    wrong_states: int = 0
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    samples: dict[str, list[str]] = field(default_factory=dict)

    def error(self, error: BaseException, *, expected: bool, during: str) -> None:
        """Count an error, and keep the words of the first few that should not have come."""
        name = type(error).__name__
        (self.expected if expected else self.unexpected)[name] += 1
        if not expected:
            samples = self.samples.setdefault(name, [])
            if len(samples) < SAMPLES:
                samples.append(f"{during}: {reason(error)}")

    def wrong_token(self, words: str, count: int = 1) -> None:
        """Count tokens that are not those expected."""
        self.wrong_tokens += count
        self.wrong.append(words)

    def wrong_state(self, words: str) -> None:
        """Count a stream that is not as it should be."""
        self.wrong_states += 1
        self.wrong.append(words)

    @property
    def bad(self) -> int:
        """How much is wrong."""
        return self.wrong_tokens + self.wrong_states + self.unexpected.total() + len(self.left)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "operations": dict(self.operations),
            "faults": dict(self.faults),
            "streams": self.streams,
            "tokens_checked": self.tokens,
            "tokens_of_unfinished_requests": self.doubtful,
            "tokens_flagged": self.flagged,
            "states_checked": self.states,
            "wrong_tokens": self.wrong_tokens,
            "wrong_states": self.wrong_states,
            "wrong": self.wrong[: 4 * SAMPLES],
            "expected_errors": dict(self.expected),
            "unexpected_errors": dict(self.unexpected),
            "unexpected_samples": self.samples,
            "left": self.left,
        }


def reason(error: BaseException) -> str:
    """An error and its causes on one line."""
    words = []
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, asyncio.CancelledError):
        words.append(f"{type(seen).__name__}: {seen}")
        seen = seen.__cause__
    return " ".join(" <- ".join(words).split())[:600]
