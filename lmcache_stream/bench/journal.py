"""What a long measurement has found so far: JSON lines, so that it can be interrupted and go on."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from lmcache_stream import journal
from lmcache_stream.errors import UsageError

__all__ = ["Edited", "Journal", "Outcome", "Record"]


class Outcome(msgspec.Struct, frozen=True):
    """How one probe went.

    Args:
        nll: Mean negative log-likelihood of its targets, in nats a token.
        agreement: Share of its targets where the likeliest token is the one with all KV.
        exact: Whether every target is the likeliest token: greedy decoding gives them all.
    """

    nll: float
    agreement: float
    exact: bool


class Edited(msgspec.Struct, frozen=True):
    """One edit of a sample.

    Args:
        kept: Tokens left.
        edit_s: Seconds that the edit took.
        score_s: Seconds that all probes took.
        probes: Outcome by probe.
    """

    kept: int
    edit_s: float
    score_s: float
    probes: dict[str, Outcome]


class Record(msgspec.Struct, frozen=True):
    """Everything that was measured on one sample.

    Args:
        group: "text", or task and form.
        id: The sample, within its group.
        cluster: What samples that may depend on each other share, such as a document.
        depth: Where its fact lies, for tasks.
        prefill_s: Seconds that its forward pass took.
        full: With all KV, outcome by probe.
        edited: With edited KV, by the variant's label.
    """

    group: str
    id: str
    cluster: str
    depth: float | None
    prefill_s: float
    full: dict[str, Outcome]
    edited: dict[str, Edited]


class Definition(msgspec.Struct, tag="variant", frozen=True):
    label: str
    definition: str


class Measured(msgspec.Struct, tag="sample", frozen=True):
    record: Record


class Journal:
    """Records by group and sample, in a file if there is one.

    Args:
        path: The file: read if it exists, added to line by line; None to keep all in memory.
        settings: What numbers depend on, apart from the variants.

    Raises:
        UsageError: The file is of other settings, or no such journal.
    """

    def __init__(self, path: Path | None, settings: dict[str, str]) -> None:
        self._records: dict[tuple[str, str], Record] = {}
        self._definitions: dict[str, str] = {}
        self._path = path
        self._file: journal.Journal | None = None
        if path is None:
            return
        self._file, content = journal.Journal.open(path, {"settings": settings})
        try:
            self._check(path, content.header.get("settings", {}), settings)
            for item in content.entries(Definition | Measured):
                self._take(item)
        except BaseException:
            self.close()
            raise

    def define(self, label: str, definition: str) -> None:
        """Say what a label means.

        Raises:
            UsageError: It meant something else in this journal.
        """
        known = self._definitions.get(label)
        if known is None:
            self._definitions[label] = definition
            self._write(Definition(label, definition))
        elif known != definition:
            raise UsageError(
                f"{self._path} measured {label} as {known}, now it is {definition}: remove it, or write elsewhere"
            )

    def get(self, group: str, id: str) -> Record | None:
        """What is known about a sample."""
        return self._records.get((group, id))

    def add(self, record: Record) -> None:
        """Keep a record, in place of an earlier one of its sample."""
        self._records[record.group, record.id] = record
        self._write(Measured(record))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, item: Definition | Measured) -> None:
        match item:
            case Definition(label=label, definition=definition):
                self._definitions[label] = definition
            case Measured(record=record):
                self._records[record.group, record.id] = record

    def _check(self, path: Path, found: dict[str, str], settings: dict[str, str]) -> None:
        for name in sorted({*found, *settings}):
            if found.get(name) != settings.get(name):
                raise UsageError(
                    f"{path} was measured with {name} {found.get(name)}, not {settings.get(name)}:"
                    " remove it, or write elsewhere"
                )

    def _write(self, item: Definition | Measured) -> None:
        if self._file is not None:
            self._file.append(item)
            self._file.sync()
