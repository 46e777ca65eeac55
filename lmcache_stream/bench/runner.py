"""Runs prompts through their phases: generate, or prefill, modify and decode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from lmcache_stream.bench.load import Clock, KVBudget, arrival_times, drive
from lmcache_stream.bench.records import (
    GENERATE,
    EditRecord,
    EditWhileDecoding,
    Ledger,
    Phase,
    PhaseRecord,
    Record,
    RequestRecord,
    grouped,
)
from lmcache_stream.errors import UsageError
from lmcache_stream.rounds import EditsWhileDecoding
from lmcache_stream.stream import AsyncLMCacheStream
from lmcache_stream.types import Completion

if TYPE_CHECKING:
    from types import TracebackType

    from lmcache_stream.bench.config import ServeOptions
    from lmcache_stream.bench.datasets import Sample
    from lmcache_stream.bench.live import Live
    from lmcache_stream.bench.place import Place
    from lmcache_stream.editors import Editor
    from lmcache_stream.metrics import StreamPerfMetrics

__all__ = ["BASELINE", "SHARED", "Runner"]

BASELINE: Final = "baseline"
"""The run that decodes without an edit."""
SHARED: Final = "shared"
"""The prefill that all runs go on from."""

_WARM_UP_SALT: Final = "bench-warm-up"  # keeps the measured requests from finding the warm-up's KV

_Operation = Callable[[int, float, Clock], Awaitable[Record]]


@dataclass(frozen=True)
class _Ready:
    """A stream between two phases, what it has to send besides, and how much of an edit backs it."""

    stream: AsyncLMCacheStream
    suffix: Sequence[int] = ()
    stored: int = 0

    @property
    def tokens(self) -> int:
        return len(self.stream.tokens) + len(self.stream.suffix_tokens()) + len(self.suffix)


@dataclass
class _Rounds:
    """The edits of a stream while it decodes: each takes one of `slots` for its time, and leaves a record.

    Attributes:
        sent: When the decode was sent, in seconds of `time.perf_counter`.
        edits: Those that succeeded.
        lost: Tokens of the edits that gave way to the next one, which the engine did not take from the cache.
    """

    stream: AsyncLMCacheStream
    slots: asyncio.Semaphore
    sent: float = 0.0
    edits: list[EditWhileDecoding] = field(default_factory=list)
    lost: int = 0
    _begun: float = 0.0

    async def __aenter__(self) -> None:
        await self.slots.acquire()
        self._begun = time.perf_counter()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.slots.release()
        receipt, metrics = self.stream.last_receipt, self.stream.last_metrics
        if exc_type is not None or receipt is None:
            return
        if receipt.stored and metrics is not None:
            self.lost += metrics.edit_shortfall
        self.edits.append(
            EditWhileDecoding(
                start=self._begun - self.sent,
                duration=time.perf_counter() - self._begun,
                tokens_before=receipt.tokens_before,
                tokens_after=receipt.tokens_after,
                recomputed=receipt.recomputed,
                chunks_stored=receipt.chunks_stored,
                bytes_moved=receipt.bytes_moved,
                seconds=dict(receipt.seconds),
            )
        )


@dataclass
class Runner:
    """Sends `samples` to `place` and keeps what came in `ledger`; what is there already is not done again.

    Without editors every prompt is one request. With them, all prompts are prefilled once; then every run goes on from
    there: the baseline, if it is wanted, decodes as it is, and each editor's run edits and decodes, with `edit_every`
    in rounds. Arrivals, `max_concurrency` and the budget of KV hold for each phase of requests, `modify_concurrency`
    and the budget for edits; edits while decoding are part of a request, and `modify_concurrency` bounds them, too.

    Where a run is taken up again, KV that the cache has lost is computed and edited again, outside of any phase's time.

    Args:
        options: The load.
        place: Engine and cache.
        samples: The prompts.
        editors: Editor by name of its run.
        ledger: What was done.
        live: Where progress is shown.

    Attributes:
        repeated: Prefills and edits that were done again because the cache had lost their KV.
    """

    options: ServeOptions
    place: Place
    samples: Sequence[Sample]
    editors: Mapping[str, Editor]
    ledger: Ledger
    live: Live
    repeated: int = 0
    _streams: dict[int, _Ready] = field(default_factory=dict)
    _edited: dict[tuple[str, int], _Ready] = field(default_factory=dict)
    _lost: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options, samples = self.options, self.samples
        self._params = options.sampling_params
        self._arrivals = arrival_times(len(samples), options.request_rate, options.burstiness, options.seed)
        self._budget = KVBudget(options.max_kv_bytes)
        self._edit_slots = asyncio.Semaphore(options.modify_concurrency)
        self._token_bytes = 0
        if options.max_kv_bytes is not None:
            self._token_bytes = self._bytes_per_token()
            self._check_budget(options.max_kv_bytes)
        if options.edit_every is not None:
            self._check_edit_every(options.edit_every)
        if self.editors and self.place.room is not None:
            self._check_room(self.place.room)

    async def run(self) -> None:
        """Run everything that is left to do."""
        everybody = range(len(self.samples))
        await self._warm_up()
        if not self.editors:
            await self._requests(GENERATE, "generate", everybody, self._complete, self._whole)
            return
        await self._requests(SHARED, "prefill", everybody, self._prefill, self._prompt)
        if self.options.compare_baseline:
            await self._decode_run(BASELINE, [*self._through(SHARED, "prefill", everybody)])
        for run, editor in self.editors.items():
            await self._edit_run(run, editor, [*self._through(SHARED, "prefill", everybody)])

    async def _edit_run(self, run: str, editor: Editor, indices: list[int]) -> None:
        await self._restore(self._restore_prefill, self.ledger.todo(run, "modify", indices))

        async def modify(index: int, queued: float, clock: Clock) -> Record:
            return await self._modify(run, editor, index, queued, clock)

        await self._phase(
            run,
            "modify",
            indices,
            modify,
            max_concurrency=self.options.modify_concurrency,
            kv_tokens=lambda index: 2 * self._prompt(index),
        )
        edited = [*self._through(run, "modify", indices)]

        async def restore(index: int) -> None:
            await self._restore_edit(run, editor, index)

        await self._restore(restore, self.ledger.todo(run, "decode", edited))
        await self._decode_run(run, edited)

    async def _decode_run(self, run: str, indices: list[int]) -> None:
        if run == BASELINE:
            await self._restore(self._restore_prefill, self.ledger.todo(run, "decode", indices))

        async def decode(index: int, queued: float, clock: Clock) -> Record:
            return await self._decode(run, index, queued, clock)

        def tokens(index: int) -> int:
            ready = self._edited.get((run, index)) or self._streams.get(index)
            return (ready.tokens if ready else self._prompt(index)) + self.samples[index].output_len

        await self._requests(run, "decode", indices, decode, tokens)

    async def _requests(
        self, run: str, phase: Phase, indices: Iterable[int], operation: _Operation, kv_tokens: Callable[[int], int]
    ) -> None:
        await self._phase(
            run,
            phase,
            indices,
            operation,
            max_concurrency=self.options.max_concurrency,
            kv_tokens=kv_tokens,
            arrivals=self._arrivals,
        )

    async def _phase(
        self,
        run: str,
        phase: Phase,
        indices: Iterable[int],
        operation: _Operation,
        *,
        max_concurrency: int | None,
        kv_tokens: Callable[[int], int],
        arrivals: Sequence[float] | None = None,
    ) -> None:
        indices = list(indices)
        todo = self.ledger.todo(run, phase, indices)
        if self.ledger.is_finished(run, phase) and not todo:
            return
        clock = Clock(self.ledger.duration(run, phase))
        name = phase if run in (GENERATE, SHARED) else f"{phase} {run}"
        with self.live.phase(name, len(indices), len(indices) - len(todo)) as show:

            async def one(index: int, queued: float) -> None:
                record = await operation(index, queued, clock)
                self.ledger.add(record)
                show(record.output_tokens if isinstance(record, RequestRecord) else 0, bool(record.error))

            await drive(
                todo,
                one,
                clock=clock,
                arrivals=arrivals,
                max_concurrency=max_concurrency,
                budget=self._budget,
                kv_bytes=lambda index: self._token_bytes * kv_tokens(index),
            )
        self.ledger.add(PhaseRecord(run, phase, clock.now()))
        await asyncio.to_thread(self.ledger.sync)

    async def _complete(self, index: int, queued: float, clock: Clock) -> Record:
        sample = self.samples[index]
        times: list[float] = []
        text: list[str] = []
        completion: Completion | None = None
        error = ""
        start = clock.now()
        sent = time.perf_counter()
        try:
            params = {**self._params, "max_tokens": sample.output_len}
            async with aclosing(self.place.engine.batches(sample.prompt_token_ids, params)) as batches:
                async for batch in batches:
                    if isinstance(batch, Completion):
                        completion = batch
                        continue
                    for token in batch:
                        text.append(token.text)
                        if token.token_id is not None:
                            times.append((token.time or time.perf_counter()) - sent)
        except Exception as failure:
            error = _reason(failure)
        duration = time.perf_counter() - sent
        if not error and completion is not None and completion.finish_reason in ("abort", "error"):
            error = f"the engine ended the request: {completion.finish_reason}"
        usage = completion.usage if completion else None
        return RequestRecord(
            run=GENERATE,
            phase="generate",
            index=index,
            start=start,
            duration=duration,
            queue=queued,
            input_tokens=len(sample.prompt_token_ids),
            events=grouped(times),
            text="".join(text),
            cached_tokens=usage.cached_tokens if usage else None,
            error=error or ("" if times else "no token came"),
        )

    async def _prefill(self, index: int, queued: float, clock: Clock) -> Record:
        ready = _Ready(self._stream(self.samples[index].prompt_token_ids))
        record = await self._pass(SHARED, "prefill", index, queued, clock, ready, 1)
        if not record.error:
            self._streams[index] = ready
        return record

    async def _modify(self, run: str, editor: Editor, index: int, queued: float, clock: Clock) -> Record:
        start = clock.now()
        sent = time.perf_counter()
        try:
            before = self._prefilled(index)
            stream = await before.stream.fork()
            receipt = await stream.modify_kv(editor, timeout=self.options.modify_timeout)
        except Exception as failure:
            duration = time.perf_counter() - sent
            return EditRecord(run, index, start, duration, queued, error=_reason(failure))
        stored = stream.tokens if receipt.stored else []
        self._edited[run, index] = _Ready(stream, before.suffix, len(stored))
        return EditRecord(
            run=run,
            index=index,
            start=start,
            duration=time.perf_counter() - sent,
            queue=queued,
            tokens_before=receipt.tokens_before,
            tokens_after=receipt.tokens_after,
            recomputed=receipt.recomputed,
            chunks_stored=receipt.chunks_stored,
            bytes_moved=receipt.bytes_moved,
            seconds=dict(receipt.seconds),
            stored=stored,
            suffix=[*stream.suffix_tokens(), *before.suffix],
            salt=receipt.salt,
        )

    async def _decode(self, run: str, index: int, queued: float, clock: Clock) -> Record:
        output_len = self.samples[index].output_len
        try:
            ready = self._edited.pop((run, index), None) if run != BASELINE else None
            if ready is None:
                before = self._prefilled(index)
                if run != BASELINE:
                    raise UsageError("the edit could not be repeated")
                ready = _Ready(await before.stream.fork(), before.suffix)
        except Exception as failure:
            return RequestRecord(run, "decode", index, clock.now(), 0.0, queued, error=_reason(failure))
        rounds = _Rounds(ready.stream, self._edit_slots) if run != BASELINE and self.options.edit_every else None
        return await self._pass(run, "decode", index, queued, clock, ready, output_len, rounds)

    async def _pass(
        self,
        run: str,
        phase: Any,
        index: int,
        queued: float,
        clock: Clock,
        ready: _Ready,
        max_tokens: int,
        rounds: _Rounds | None = None,
    ) -> RequestRecord:
        stream = ready.stream
        edits = None
        if rounds is not None and self.options.edit_every is not None:
            edits = EditsWhileDecoding(self.options.edit_every, self.editors[run], rounds)
        last, text, tokens = stream.last_metrics, len(stream.output_text()), len(stream.output_tokens())
        error = ""
        start = clock.now()
        sent = time.perf_counter()
        if rounds is not None:
            rounds.sent = sent
        try:
            await stream._generate({**self._params, "max_tokens": max_tokens}, ready.suffix, edits, None)
        except Exception as failure:
            error = _reason(failure)
        duration = time.perf_counter() - sent
        metrics = stream.last_metrics if stream.last_metrics is not last else None
        if not error and not (metrics and metrics.output_tokens):
            error = "no token came"
        return RequestRecord(
            run=run,
            phase=phase,
            index=index,
            start=start,
            duration=duration,
            queue=queued,
            input_tokens=metrics.input_tokens if metrics else 0,
            events=grouped(metrics.times) if metrics else [],
            text=stream.output_text()[text:],
            tokens=stream.output_tokens()[tokens:] if phase == "prefill" else [],
            cached_tokens=metrics.cached_tokens if metrics else None,
            edit_shortfall=rounds.lost + metrics.edit_shortfall
            if rounds and metrics
            else _shortfall(metrics, ready.stored),
            edits=rounds.edits if rounds else [],
            error=error,
        )

    async def _warm_up(self) -> None:
        count = self.options.num_warmups
        if not count:
            return
        sample = self.samples[0]
        with self.live.phase("warm-up", count) as show:

            async def one(_index: int, _queued: float) -> None:
                params = {**self._params, "max_tokens": sample.output_len}
                if not self.editors:
                    async for _ in self.place.engine(sample.prompt_token_ids, params, _WARM_UP_SALT):
                        pass
                else:
                    stream = self._stream(sample.prompt_token_ids, _WARM_UP_SALT)
                    editor = next(iter(self.editors.values()))
                    await stream.generate({**params, "max_tokens": 1})
                    await stream.modify_kv(editor, timeout=self.options.modify_timeout)
                    every = self.options.edit_every
                    await stream.generate(params, edit_every=every, editor=editor if every else None)
                show(sample.output_len, False)

            await drive(range(count), one, clock=Clock(), max_concurrency=self.options.max_concurrency)

    async def _restore(self, restore: Callable[[int], Awaitable[None]], indices: Sequence[int]) -> None:
        async def one(index: int, _queued: float) -> None:
            await restore(index)

        await drive(indices, one, clock=Clock(), max_concurrency=self.options.modify_concurrency)

    async def _restore_prefill(self, index: int) -> None:
        """Have a stream after the prefill that an earlier process did, from the cache if it still has its KV."""
        if index in self._streams or index in self._lost:
            return
        record = self.ledger.find(SHARED, "prefill", index)
        assert isinstance(record, RequestRecord)
        assert self.place.cache is not None
        stream = self._stream(self.samples[index].prompt_token_ids)
        whole = len(stream.tokens) // self.place.cache.chunk_size * self.place.cache.chunk_size
        try:
            if whole and await self.place.cache.lookup(stream.tokens[:whole]) >= whole:
                self._streams[index] = _Ready(stream, record.tokens)
                return
            await stream.generate({**self._params, "max_tokens": 1})
        except Exception as failure:
            self._lost[index] = f"the prefill could not be repeated: {_reason(failure)}"
            return
        self.repeated += 1
        self._streams[index] = _Ready(stream)

    async def _restore_edit(self, run: str, editor: Editor, index: int) -> None:
        """Have a stream after the edit that an earlier process did, from the cache if it still has its KV.

        With `edit_every` it is edited again: only a stream that edited knows in each pass what the engine must take.
        """
        if (run, index) in self._edited:
            return
        record = self.ledger.find(run, "modify", index)
        assert isinstance(record, EditRecord)
        assert self.place.cache is not None
        try:
            known = record.stored and self.options.edit_every is None
            if known and await self.place.cache.lookup(record.stored, record.salt) >= len(record.stored):
                stream = self._stream(record.stored, record.salt)
                self._edited[run, index] = _Ready(stream, record.suffix, len(record.stored))
                return
        except Exception as failure:
            self._lost[index] = f"the edit was not found: {_reason(failure)}"
            return
        await self._restore_prefill(index)
        repeated = await self._modify(run, editor, index, 0.0, Clock())
        self.repeated += bool(record.stored) and not repeated.error

    def _stream(self, ids: Sequence[int], salt: str = "") -> AsyncLMCacheStream:
        assert self.place.cache is not None
        return AsyncLMCacheStream(self.place.cache, self.place.engine, ids, salt, on_shortfall="report")

    def _prefilled(self, index: int) -> _Ready:
        if index in self._streams:
            return self._streams[index]
        raise UsageError(self._lost.get(index, "there was no prefill"))

    def _through(self, run: str, phase: Phase, indices: Iterable[int]) -> Iterable[int]:
        for index in indices:
            record = self.ledger.find(run, phase, index)
            if record is not None and not record.error:
                yield index

    def _prompt(self, index: int) -> int:
        return len(self.samples[index].prompt_token_ids)

    def _whole(self, index: int) -> int:
        return self._prompt(index) + self.samples[index].output_len

    def _bytes_per_token(self) -> int:
        geometry = self.place.geometry
        if geometry is None or geometry.dtype is None:
            raise UsageError(
                "--max-kv-bytes needs the shape of the KV: give --kv-url, or --model as the model's folder"
            )
        return geometry.planes * geometry.num_layers * geometry.hidden_dim * geometry.dtype.itemsize

    def _check_budget(self, max_bytes: int) -> None:
        factor = 2 if self.editors else 1
        tokens = max(max(self._whole(index), factor * self._prompt(index)) for index in range(len(self.samples)))
        if tokens * self._token_bytes > max_bytes:
            raise UsageError(
                f"--max-kv-bytes {max_bytes:,} is less than one request needs: {tokens * self._token_bytes:,} bytes"
            )

    def _check_edit_every(self, every: int) -> None:
        longest = max(sample.output_len for sample in self.samples)
        if longest <= every:
            raise UsageError(
                f"--edit-every {every} would edit nothing: no prompt has more than {longest} tokens to generate; take "
                "a smaller number, or longer answers"
            )

    def _check_room(self, room: int) -> None:
        """All prompts' KV lies in the embedded cache between the phases, and the edits of all runs beside it."""
        tokens = sum(map(self._prompt, range(len(self.samples))))
        edited = sum(
            self._tokens_stored(sample, getattr(editor, "keep", 1.0))
            for editor in self.editors.values()
            for sample in self.samples
        )
        needed = (tokens + edited) * self._bytes_per_token()
        if needed > room:
            raise UsageError(
                f"the KV of {len(self.samples)} prompts and their edits, {needed / 2**30:.1f} GiB, does not fit the "
                f"embedded cache of {room / 2**30:.1f} GiB: lower --num-prompts, or take a larger one with "
                f"--kv-url 'memory://bench?max_bytes={needed // 2**30 + 1}GiB'"
            )

    def _tokens_stored(self, sample: Sample, keep: float | int) -> int:
        """Tokens at most that the edits of a prompt leave in the cache; every round leaves some, and its prompt's."""
        prompt, every = len(sample.prompt_token_ids), self.options.edit_every
        kept = int(prompt * keep) if isinstance(keep, float) else min(prompt, keep)
        rounds = (sample.output_len - 1) // every if every else 0
        return kept + rounds * (int(keep) + (every or 0))


def _shortfall(metrics: StreamPerfMetrics | None, stored: int) -> int:
    """Tokens of a stored edit that the engine computed itself; 0 if it does not say. It always computes the last."""
    if metrics is None or metrics.cached_tokens is None:
        return 0
    return max(0, min(stored, metrics.input_tokens - 1) - metrics.cached_tokens)


def _reason(failure: Exception) -> str:
    return " ".join(f"{type(failure).__name__}: {failure}".split())
