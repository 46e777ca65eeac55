"""What a benchmark did, request by request, in memory and in its journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from lmcache_stream.metrics import StreamPerfMetrics

if TYPE_CHECKING:
    from lmcache_stream.journal import Journal, JournalContent

__all__ = [
    "GENERATE",
    "EditRecord",
    "EditWhileDecoding",
    "Entry",
    "Ledger",
    "Phase",
    "PhaseRecord",
    "Record",
    "RequestRecord",
    "grouped",
]

Phase: TypeAlias = Literal["generate", "prefill", "modify", "decode"]

GENERATE: Final = "generate"
"""The run without an editor."""


class EditWhileDecoding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One edit between two passes of a decode.

    Args:
        start: When it began, in seconds since the decode was sent.
        duration: Seconds that it took, without the wait for its turn.
        tokens_before: Tokens whose KV was edited.
        tokens_after: Tokens that the edit gave back.
        recomputed: Tokens of them that fill no chunk, so that the engine computes them anew.
        chunks_stored: Chunks stored; 0 where the edit left everything as it was.
        bytes_moved: Bytes of KV read and written.
        seconds: Seconds by step: wait, retrieve, edit, store.
    """

    start: float
    duration: float
    tokens_before: int = 0
    tokens_after: int = 0
    recomputed: int = 0
    chunks_stored: int = 0
    bytes_moved: int = 0
    seconds: dict[str, float] = {}

    @property
    def tokens_stored(self) -> int:
        """Tokens that the cache holds of the edit."""
        return self.tokens_after - self.recomputed if self.chunks_stored else 0


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True, tag="request", tag_field="kind"):
    """One request to the engine; a decode with edits is several to the engine, and one here.

    Args:
        run: The run that it belongs to.
        phase: "generate", "prefill" or "decode".
        index: Number of its prompt.
        start: When it was sent, in seconds of its phase.
        duration: Seconds until its answer had ended.
        queue: Seconds between its arrival and `start`.
        input_tokens: Tokens of the prompt that was sent.
        events: When tokens arrived, in seconds since `start`, and how many at once.
        text: What was generated.
        tokens: The ids that a prefill generated.
        cached_tokens: Prompt tokens that the engine took from a cache, in the last pass of a decode with edits; None if
            it does not say.
        edit_shortfall: Tokens of stored edits that it did not.
        edits: Edits between the passes of a decode.
        error: Why it failed; empty if it did not.
    """

    run: str
    phase: Literal["generate", "prefill", "decode"]
    index: int
    start: float
    duration: float
    queue: float = 0.0
    input_tokens: int = 0
    events: list[tuple[float, int]] = []
    text: str = ""
    tokens: list[int] = []
    cached_tokens: int | None = None
    edit_shortfall: int = 0
    edits: list[EditWhileDecoding] = []
    error: str = ""

    @property
    def output_tokens(self) -> int:
        """Tokens generated."""
        return sum(count for _, count in self.events)

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token; 0 when none came."""
        return self.events[0][0] if self.events else 0.0

    @property
    def latency(self) -> float:
        """Seconds from sending to the last token; 0 when none came."""
        return self.events[-1][0] if self.events else 0.0

    @property
    def itl(self) -> list[float]:
        """Seconds between neighbouring events."""
        return [after - before for (before, _), (after, _) in zip(self.events, self.events[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for fewer than two tokens."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl_spread(self) -> list[float]:
        """Seconds before each token after the first: an event's gap, spread over its tokens."""
        times = [at for at, count in self.events for _ in range(count)]
        return StreamPerfMetrics.from_times(start=0.0, end=self.duration, times=times, input_tokens=0).tpot


class EditRecord(msgspec.Struct, frozen=True, omit_defaults=True, tag="edit", tag_field="kind"):
    """One edit of a prompt's KV.

    Args:
        run: The run that it belongs to.
        index: Number of its prompt.
        start: When it began, in seconds of its phase.
        duration: Seconds that it took.
        queue: Seconds that it waited for its turn.
        tokens_before: Tokens whose KV was edited.
        tokens_after: Tokens that the edit gave back.
        recomputed: Tokens of them that fill no chunk, so that the engine computes them anew.
        chunks_stored: Chunks stored.
        bytes_moved: Bytes of KV read and written.
        seconds: Seconds by step: wait, retrieve, edit, store.
        stored: The ids under which it is stored.
        suffix: The ids that come after them.
        salt: Its `cache_salt`.
        error: Why it failed; empty if it did not.
    """

    run: str
    index: int
    start: float
    duration: float
    queue: float = 0.0
    tokens_before: int = 0
    tokens_after: int = 0
    recomputed: int = 0
    chunks_stored: int = 0
    bytes_moved: int = 0
    seconds: dict[str, float] = {}
    stored: list[int] = []
    suffix: list[int] = []
    salt: str = ""
    error: str = ""
    phase: Literal["modify"] = "modify"


class PhaseRecord(msgspec.Struct, frozen=True, tag="phase", tag_field="kind"):
    """The end of a phase of a run, after `duration` seconds."""

    run: str
    phase: Phase
    duration: float


Record: TypeAlias = RequestRecord | EditRecord
Entry: TypeAlias = RequestRecord | EditRecord | PhaseRecord


class Ledger:
    """Every record once, by run, phase and prompt; each new one goes into the journal first, if there is one.

    Attributes:
        resumed: Records taken over from a journal.
    """

    def __init__(self) -> None:
        self._journal: Journal | None = None
        self._records: dict[tuple[str, Phase], dict[int, Record]] = {}
        self._durations: dict[tuple[str, Phase], float] = {}
        self.resumed: int = 0

    def write_to(self, journal: Journal) -> None:
        """Write what is added from now on to a journal, too."""
        self._journal = journal

    def restore(self, content: JournalContent) -> None:
        """Take over what a journal holds."""
        entry: Entry
        for entry in content.entries(Entry):
            self._take(entry)
            self.resumed += not isinstance(entry, PhaseRecord)

    def add(self, entry: Entry) -> None:
        """Keep a new entry.

        Raises:
            OSError: The journal cannot be written; the entry is not kept.
        """
        if self._journal is not None:
            self._journal.append(entry)
        self._take(entry)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has ended yet, well or badly."""
        return not self._records

    def find(self, run: str, phase: Phase, index: int) -> Record | None:
        """The record of a prompt in a phase of a run, if there is one."""
        return self._records.get((run, phase), {}).get(index)

    def requests(self, run: str, phase: Phase) -> list[RequestRecord]:
        """A phase's requests, in the order of their prompts."""
        return [record for record in self._in_order(run, phase) if isinstance(record, RequestRecord)]

    def edits(self, run: str) -> list[EditRecord]:
        """A run's edits, in the order of their prompts."""
        return [record for record in self._in_order(run, "modify") if isinstance(record, EditRecord)]

    def failures(self) -> list[str]:
        """Run, phase and reason of everything that failed, in order of time."""
        return [
            f"{run}, {phase}: {record.error}"
            for (run, phase), records in self._records.items()
            for record in records.values()
            if record.error
        ]

    def is_finished(self, run: str, phase: Phase) -> bool:
        """Whether a phase came to its end."""
        return (run, phase) in self._durations

    def duration(self, run: str, phase: Phase) -> float:
        """Seconds that a phase took, up to its last record if it did not come to its end."""
        ends = (record.start + record.duration for record in self._records.get((run, phase), {}).values())
        return self._durations.get((run, phase)) or max(ends, default=0.0)

    def todo(self, run: str, phase: Phase, indices: Iterable[int]) -> list[int]:
        """Those of `indices` that a phase has no record of."""
        done = self._records.get((run, phase), {})
        return [index for index in indices if index not in done]

    def sync(self) -> None:
        """Wait until the journal is on the disk. It blocks: call it in a thread."""
        if self._journal is not None:
            self._journal.sync()

    def _in_order(self, run: str, phase: Phase) -> Iterator[Record]:
        return (record for _, record in sorted(self._records.get((run, phase), {}).items()))

    def _take(self, entry: Entry) -> None:
        if isinstance(entry, PhaseRecord):
            self._durations[entry.run, entry.phase] = entry.duration
        else:
            self._records.setdefault((entry.run, entry.phase), {})[entry.index] = entry


def grouped(times: Sequence[float]) -> list[tuple[float, int]]:
    """Arrivals of tokens as events: equal neighbours came at once."""
    events: list[tuple[float, int]] = []
    for at in times:
        if events and events[-1][0] == at:
            events[-1] = (at, events[-1][1] + 1)
        else:
            events.append((at, 1))
    return events
