"""A batch's journal: what became of every stream in every phase, so that a batch that was broken off can go on.

It holds ids, text and figures, no KV: a stream's ids once, what each request added, and the ids that each edit left.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec

from lmcache_stream.batch.entries import Asked, Done, Member, Run, apply, digest_of, encode_asked, entry_of
from lmcache_stream.errors import CacheError, LMCacheStreamError, UsageError
from lmcache_stream.finishing import to_the_end
from lmcache_stream.journal import Journal, JournalContent
from lmcache_stream.kvcache.context import whole_chunks
from lmcache_stream.stream.state import StreamState

if TYPE_CHECKING:
    import os

    from lmcache_stream.stream import AsyncLMCacheStream

__all__ = ["BatchJournal", "Call", "JournaledPhase"]

HEADER: Final = {"of": "batch"}
SYNC_EVERY: Final = 5.0
"""Seconds between two syncs of a phase that goes on; the end of a phase syncs, too."""

Operation: TypeAlias = Callable[["AsyncLMCacheStream"], Awaitable[Any]]
T = TypeVar("T")

DONE_ANEW: Final = 4
"""Streams that do earlier phases again at once: an edit holds its KV in memory."""

RESTORED_AT_ONCE: Final = 64
"""Streams that are restored before others get their turn on the event loop."""


@dataclass(frozen=True)
class Call:
    """What a phase asks of its streams.

    Args:
        edits: Whether it needs the KV of the streams.
        asked: Everything that decides what comes out, as JSON values.
    """

    edits: bool
    asked: Mapping[str, Any]


@dataclass
class _Kept:
    """A stream and what the journal holds of it.

    Args:
        index: Its place in the batch.
        state: The stream's own.
        fresh: As it was added.
        known: As the last entry left it.
        entries: What the journal holds, operation by operation.
        taken: How many of them this run has taken.
        operations: What this run asked for, to do it again if the cache has lost the KV.
        is_restored: Whether the last operation was taken from the journal.
        is_lost: Whether nothing more is written about it in this run.
    """

    index: int
    state: StreamState
    fresh: StreamState
    known: StreamState
    entries: list[Done] = field(default_factory=list)
    taken: int = 0
    operations: list[tuple[int, Operation, str]] = field(default_factory=list)
    is_restored: bool = False
    is_lost: bool = False

    @property
    def has_more(self) -> bool:
        """Whether the journal tells how the next operation ended; one that failed last is to be tried again."""
        more = self.entries[self.taken :]
        return len(more) > 1 or (len(more) == 1 and not more[0].error)


class BatchJournal:
    """Keeps a batch's streams in a file, and takes from it what an earlier run has done.

    The file is open, and nobody else's, while a phase runs. A line is written when a stream is through; it survives the
    end of the process at once, and the end of the machine after a few seconds.

    Args:
        path: The file; begun if there is none.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._kept: dict[str, _Kept] = {}
        self._members = 0
        self._calls: dict[bytes, int] = {}
        self._journal: Journal | None = None
        self._size: int | None = None
        self._run = 0
        self._phases = 0
        self._opening = asyncio.Lock()
        self.doing_anew: asyncio.Semaphore = asyncio.Semaphore(DONE_ANEW)
        self._read: dict[int, tuple[str, list[Done]]] = {}

    def add(self, stream_id: str, state: StreamState) -> None:
        """Keep a stream, which is known by its place in the batch from now on."""
        self._kept[stream_id] = _Kept(len(self._kept), state, state.copy(), state.copy())

    @asynccontextmanager
    async def phase(self, call: Call) -> AsyncIterator[JournaledPhase]:
        """Hold the file open for a phase.

        Raises:
            UsageError: It is no journal of these streams, or another process writes it.
            OSError: It could not be written.
        """
        async with self._opening:
            if self._phases == 0:
                try:
                    await _pooled_to_the_end(self._open)
                except BaseException:
                    await self._close()
                    raise
            self._phases += 1
        try:
            async with self._opening:
                number = await _pooled_to_the_end(self._prepare, call)
            phase = JournaledPhase(self, number, call.edits)
            syncing = asyncio.create_task(self._sync_now_and_then())
            try:
                yield phase
            finally:
                syncing.cancel()
                await to_the_end(asyncio.wait([syncing]))
        finally:
            await to_the_end(self._let_go())
        if phase.error is not None:
            raise phase.error

    async def _let_go(self) -> None:
        async with self._opening:
            self._phases -= 1
            if self._phases == 0:
                await self._close()

    async def _close(self) -> None:
        journal, self._journal = self._journal, None
        if journal is not None:
            self._size = journal.size
            await _pooled_to_the_end(journal.close)

    async def _sync_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(SYNC_EVERY)
            if self._journal is not None:
                with contextlib.suppress(OSError):  # what is written next, or the end of the phase, says so
                    await _pooled_to_the_end(self._journal.sync)

    def _open(self) -> None:
        if self._size is not None:
            self._journal = Journal.go_on(self._path, self._size)
            return
        journal, content = Journal.open(self._path, HEADER)
        try:
            self._take_over(content)
            journal.append(Run())
        except BaseException:
            journal.close()
            raise
        self._journal = journal

    def _take_over(self, content: JournalContent) -> None:
        if content.header != HEADER:
            raise UsageError(f"{self._path} is no journal of a batch: name another file")
        entry: Any
        for entry in content.entries(Run | Member | Asked | Done):
            match entry:
                case Run():
                    self._run += 1
                case Member():
                    self._read[entry.stream] = entry.prompt, []
                case Asked():
                    self._calls[encode_asked(entry.asked)] = entry.call
                case Done():
                    entries = self._read[entry.stream][1]
                    entries[entry.step :] = [msgspec.structs.replace(entry, run=self._run)]

    def _prepare(self, call: Call) -> int:
        """Let the streams that were added take part; the number of what is asked of them."""
        self._enroll()
        return self._call(call)

    def _enroll(self) -> None:
        """Let the streams that were added have what the journal holds of them."""
        assert self._journal is not None
        added = list(self._kept.values())[self._members :]
        for kept in added:
            prompt = digest_of(kept.fresh)
            known = self._read.get(kept.index)
            if known is None:
                self._journal.append(Member(kept.index, prompt))
            elif known[0] != prompt:
                raise UsageError(
                    f"stream {kept.index} of this batch (the first is 0) has another prompt or salt than in "
                    f"{self._path}: add the same prompts in the same order, or name another journal"
                )
        for kept in added:
            kept.entries = self._read.pop(kept.index, ("", []))[1]
        self._members += len(added)

    def _call(self, call: Call) -> int:
        assert self._journal is not None
        asked = encode_asked(call.asked)
        if asked not in self._calls:
            self._journal.append(Asked(len(self._calls), msgspec.json.decode(asked)))
            self._calls[asked] = len(self._calls)
        return self._calls[asked]

    def _words(self, call: int) -> str:
        return next(asked.decode() for asked, number in self._calls.items() if number == call)


class JournaledPhase:
    """One phase of a batch, as its journal sees it.

    Attributes:
        seconds: That earlier runs spent on what was taken from the journal.
        error: Why the journal could not be written any more.
    """

    def __init__(self, journal: BatchJournal, call: int, edits: bool) -> None:
        self._batch = journal
        self._call = call
        self._edits = edits
        self._began = time.perf_counter()
        self._seconds: dict[int, float] = {}
        self.error: OSError | None = None

    @property
    def seconds(self) -> float:
        """Time of all its runs, in seconds."""
        return sum(self._seconds.values())

    async def take(
        self, stream_ids: Iterable[str], operation: Operation
    ) -> tuple[dict[str, Any], dict[str, LMCacheStreamError]]:
        """Bring streams to where an earlier run had them after this phase: outcome, or failure, by stream id.

        An operation that failed, or of which nothing is known, is not among them, unless more is known of its stream.

        Raises:
            UsageError: The earlier run asked for something else; nothing is changed.
        """
        due = {stream_id: self._batch._kept[stream_id] for stream_id in stream_ids}
        for kept in due.values():
            if kept.has_more and kept.entries[kept.taken].call != self._call:
                earlier = self._batch._words(kept.entries[kept.taken].call)
                raise UsageError(
                    f"operation {kept.taken} of stream {kept.index} (the first is 0) was {earlier} in "
                    f"{self._batch._path}, and now it is {self._batch._words(self._call)}: ask for the same, or name "
                    "another journal"
                )
        outcomes: dict[str, Any] = {}
        failures: dict[str, LMCacheStreamError] = {}
        for number, (stream_id, kept) in enumerate(due.items(), start=1):
            if number % RESTORED_AT_ONCE == 0:
                await asyncio.sleep(0)
            if not kept.has_more:
                del kept.entries[kept.taken :]
                continue
            entry = kept.entries[kept.taken]
            kept.taken += 1
            kept.is_restored = True
            kept.operations.append((self._call, operation, entry.error))
            apply(entry, kept.known)
            _become(kept.state, kept.known)
            self._seconds[entry.run] = max(self._seconds.get(entry.run, 0.0), entry.at)
            if entry.error:
                failures[stream_id] = LMCacheStreamError(f"in an earlier run: {entry.error}")
            else:
                outcomes[stream_id] = kept.state.last_receipt if self._edits else kept.state.last_metrics
        return outcomes, failures

    async def do(self, stream: AsyncLMCacheStream, operation: Callable[[AsyncLMCacheStream], Awaitable[T]]) -> T:
        """Do an operation and write what became of it; first do again what the cache has lost."""
        kept = self._batch._kept[stream.stream_id()]
        if kept.is_restored:
            kept.is_restored = False
            if not await _has_kv(stream, self._edits):
                await self._do_anew(stream, kept)
        try:
            outcome = await operation(stream)
        except Exception as error:
            await self._write(kept, self._call, operation, error=f"{type(error).__name__}: {error}")
            raise
        await self._write(kept, self._call, operation, outcome=outcome)
        return outcome

    async def _do_anew(self, stream: AsyncLMCacheStream, kept: _Kept) -> None:
        _become(kept.state, kept.fresh)
        kept.known = kept.fresh.copy()
        operations, kept.operations, kept.entries = kept.operations, [], []
        try:
            async with self._batch.doing_anew:
                for call, operation, error in operations:
                    outcome = None if error else await operation(stream)
                    await self._write(kept, call, operation, outcome=outcome, error=error, at=0.0)
        except BaseException:
            kept.is_lost = True
            raise

    async def _write(
        self,
        kept: _Kept,
        call: int,
        operation: Operation,
        *,
        outcome: Any = None,
        error: str = "",
        at: float | None = None,
    ) -> None:
        if self.error is not None or kept.is_lost:
            kept.is_lost = True
            return
        kept.operations.append((call, operation, error))
        entry = entry_of(
            kept.known,
            kept.state,
            stream=kept.index,
            step=len(kept.entries),
            call=call,
            at=time.perf_counter() - self._began if at is None else at,
            outcome=outcome,
            error=error,
        )
        kept.entries.append(entry)
        kept.taken = len(kept.entries)
        kept.known = kept.state.copy()
        assert self._batch._journal is not None
        try:
            await _pooled_to_the_end(self._batch._journal.append, entry)
        except OSError as failure:
            self.error = failure
            kept.is_lost = True


async def _pooled_to_the_end(work: Callable[..., T], *args: object) -> T:
    """Do something that blocks, to its end, whatever happens to the caller; a thread for each stream is too many."""
    return await to_the_end(asyncio.get_running_loop().run_in_executor(None, work, *args))


async def _has_kv(stream: AsyncLMCacheStream, edits: bool) -> bool:
    """Whether the cache still holds what the next operation builds on; if it cannot be asked, that one will say so."""
    state = stream._state
    try:
        if state.stored and await stream._kv.find_edit() < state.stored:
            return False
        wanted = whole_chunks(state.expected, stream.ctx.chunk_size) if edits else 0
        return not wanted or await stream.ctx.lookup(state.tokens[:wanted], state.salt) >= wanted
    except CacheError:
        return True


def _become(state: StreamState, other: StreamState) -> None:
    copy = other.copy()
    for each in fields(StreamState):
        setattr(state, each.name, getattr(copy, each.name))
