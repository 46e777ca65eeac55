"""Runs prompts through their phases: generate, or prefill, modify and decode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lmcache_stream.bench.limits import bytes_per_token, check_budget, check_edit_every, check_room
from lmcache_stream.bench.load import Clock, KVBudget, arrival_times, drive
from lmcache_stream.bench.measure import Ready, Rounds, measure_passes, measure_request, reason_of
from lmcache_stream.bench.records import (
    GENERATE,
    EditRecord,
    Ledger,
    Phase,
    PhaseRecord,
    Record,
    RequestRecord,
)
from lmcache_stream.errors import UsageError
from lmcache_stream.stream import AsyncLMCacheStream

if TYPE_CHECKING:
    from lmcache_stream.bench.config import ServeOptions
    from lmcache_stream.bench.datasets import Sample
    from lmcache_stream.bench.live import Live
    from lmcache_stream.bench.place import Place
    from lmcache_stream.editors import Editor

__all__ = ["BASELINE", "SHARED", "Runner"]

BASELINE: Final = "baseline"
"""The run that decodes without an edit."""
SHARED: Final = "shared"
"""The prefill that all runs go on from."""

_WARM_UP_SALT: Final = "bench-warm-up"  # keeps the measured requests from finding the warm-up's KV

_Operation = Callable[[int, float, Clock], Awaitable[Record]]


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
    _streams: dict[int, Ready] = field(default_factory=dict)
    _edited: dict[tuple[str, int], Ready] = field(default_factory=dict)
    _lost: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options, samples = self.options, self.samples
        self._params = options.sampling_params
        self._arrivals = arrival_times(len(samples), options.request_rate, options.burstiness, options.seed)
        self._budget = KVBudget(options.max_kv_bytes)
        self._edit_slots = asyncio.Semaphore(options.modify_concurrency)
        self._token_bytes = 0
        if options.max_kv_bytes is not None:
            self._token_bytes = bytes_per_token(self.place.geometry)
            check_budget(options.max_kv_bytes, self._token_bytes, samples, with_edits=bool(self.editors))
        if options.edit_every is not None:
            check_edit_every(options.edit_every, samples)
        if self.editors and self.place.room is not None:
            token_bytes = bytes_per_token(self.place.geometry)
            check_room(self.place.room, token_bytes, samples, [*self.editors.values()], options.edit_every)

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
        return await measure_request(
            self.place.engine, self.samples[index], self._params, index=index, queued=queued, clock=clock
        )

    async def _prefill(self, index: int, queued: float, clock: Clock) -> Record:
        ready = Ready(self._stream(self.samples[index].prompt_token_ids))
        params = {**self._params, "max_tokens": 1}
        record = await measure_passes(
            ready, params, run=SHARED, phase="prefill", index=index, queued=queued, clock=clock
        )
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
            return EditRecord(run, index, start, duration, queued, error=reason_of(failure))
        stored = stream.tokens if receipt.stored else []
        self._edited[run, index] = Ready(stream, before.suffix, len(stored))
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
                ready = Ready(await before.stream.fork(), before.suffix)
        except Exception as failure:
            return RequestRecord(run, "decode", index, clock.now(), 0.0, queued, error=reason_of(failure))
        rounds = None
        if run != BASELINE and self.options.edit_every is not None:
            rounds = Rounds(ready.stream, self._edit_slots, self.options.edit_every, self.editors[run])
        params = {**self._params, "max_tokens": output_len}
        return await measure_passes(
            ready, params, rounds, run=run, phase="decode", index=index, queued=queued, clock=clock
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
                self._streams[index] = Ready(stream, record.tokens)
                return
            await stream.generate({**self._params, "max_tokens": 1})
        except Exception as failure:
            self._lost[index] = f"the prefill could not be repeated: {reason_of(failure)}"
            return
        self.repeated += 1
        self._streams[index] = Ready(stream)

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
                self._edited[run, index] = Ready(stream, record.suffix, len(record.stored))
                return
        except Exception as failure:
            self._lost[index] = f"the edit was not found: {reason_of(failure)}"
            return
        await self._restore_prefill(index)
        repeated = await self._modify(run, editor, index, 0.0, Clock())
        self.repeated += bool(record.stored) and not repeated.error

    def _stream(self, ids: Sequence[int], salt: str = "") -> AsyncLMCacheStream:
        assert self.place.cache is not None
        return AsyncLMCacheStream(self.place.cache, self.place.engine, ids, salt, on_shortfall="report")

    def _prefilled(self, index: int) -> Ready:
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
