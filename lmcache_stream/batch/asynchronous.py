"""One phase over many streams at a time: prefill, modify, decode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from lmcache_stream import observe
from lmcache_stream.batch.entries import describe
from lmcache_stream.batch.journal import BatchJournal, Call, JournaledPhase
from lmcache_stream.batch.members import Members
from lmcache_stream.editors.base import Editor
from lmcache_stream.errors import LMCacheBatchedStreamError, UsageError
from lmcache_stream.kvcache.context import check_poll_interval, check_timeout
from lmcache_stream.metrics import (
    Metrics,
    StreamPerfMetrics,
    check_format,
    decode_metrics,
    modify_metrics,
    prefill_metrics,
)
from lmcache_stream.progress import PhaseProgress, ProgressOption, watching
from lmcache_stream.stream import AsyncLMCacheStream, ModifyReceipt
from lmcache_stream.stream.edits import EditsWhileDecoding, ModifyFn, check_editor

if TYPE_CHECKING:
    import os

__all__ = ["AsyncBatchedStream", "OnError"]

OnError = Literal["raise", "collect"]
_Result = TypeVar("_Result")

_MODIFY_CONCURRENCY: Final = 4


class AsyncBatchedStream(Members[AsyncLMCacheStream]):
    """Many streams, each phase run over all of them with one `asyncio.gather`.

    Args:
        max_concurrency: Streams that run at once in a phase; None: all in prefill and decode, 4 in modify.
        on_error: When some streams fail, "raise" `LMCacheBatchedStreamError` at the end of the phase (`failures`,
            `metrics`), or "collect" them in the report's `failures` section. The others always keep their results.
        progress: Called with a `PhaseProgress` whenever a stream is through; None shows a bar where standard error is
            a terminal, False shows none.
        journal: A file to keep what became of each stream in each phase, so that the same program, run again after an
            exception, a signal or a kill, goes on where it stopped. It is begun if there is none.

    With a journal, streams are known by their place in the batch: add the same prompts in the same order, and ask for
    the same phases. What is different is a `UsageError`; further prompts at the end, and further phases, are welcome.
    A stream that was through with a phase has its tokens, text, metrics and receipt (without `kept_positions`) at once,
    and nothing is sent for it. One that was in the middle of a phase does that phase again, from where it was before;
    if the cache has lost its edit, or the KV that is to be edited, it does the earlier phases again, too. A failed one
    is tried again, unless it went on to a later phase. Only what the batch does is kept, not what is done with its
    streams besides. The file holds ids, text and figures, no KV. It is written whenever a stream is through, which
    outlives the process, and synced every few seconds and at the end of a phase; only one process at a time may run a
    phase with it.

    Attributes:
        perf_metrics: Metrics of each stream's last request, by stream id; of the last phase that sent any.
        receipts: Receipt of each stream's last edit, by stream id; of the last phase that edited.
        failures: Exception of each stream that failed in the last phase, by stream id.
        restored: Ids of the streams whose part in the last phase was taken from the journal.
    """

    _stream_type = AsyncLMCacheStream
    perf_metrics: dict[str, StreamPerfMetrics]
    receipts: dict[str, ModifyReceipt]
    failures: dict[str, BaseException]
    restored: frozenset[str]

    def __init__(
        self,
        *,
        max_concurrency: int | None = None,
        on_error: OnError = "raise",
        progress: ProgressOption = None,
        journal: str | os.PathLike[str] | None = None,
    ) -> None:
        _check_options(max_concurrency, on_error)
        self._streams: dict[str, AsyncLMCacheStream] = {}
        self._journal = BatchJournal(journal) if journal is not None else None
        self._max_concurrency = max_concurrency
        self._on_error: OnError = on_error
        self._progress = progress
        self.perf_metrics = {}
        self.receipts = {}
        self.failures = {}
        self.restored = frozenset()

    def add(self, stream: AsyncLMCacheStream) -> None:
        """Make `stream` part of the batch, keyed by `stream.stream_id()`.

        Raises:
            LMCacheBatchedStreamError: It is part of it already.
            TypeError: It is a stream of the other face.
        """
        super().add(stream)
        if self._journal is not None:
            self._journal.add(stream.stream_id(), stream._state)

    async def prefill(
        self,
        sampling_params: Mapping[str, Any],
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Sequence[str] | None = None,
        *,
        max_concurrency: int | None = None,
        timeout: float | None = None,
    ) -> Metrics:
        """Run every stream with `max_tokens` 1, so that the engine computes and offloads the prompts' KV.

        Args:
            sampling_params: The engine's; `max_tokens` is set to 1, and `min_tokens` left out.
            fmt: What the report's `emit` writes: "terminal" or "json".
            width: Columns of the report's table.
            stream_ids: Streams that take part; None: all.
            max_concurrency: Streams at once, instead of the batch's own bound.
            timeout: Seconds for each stream.

        Returns:
            The report: `num_streams`, `duration` (s), `input_tokens`, `input_tput` (tokens/s), TTFT (s).

        Raises:
            LMCacheBatchedStreamError: Some streams failed, or an id is not in the batch.
            UsageError: An unknown `fmt`, before anything runs.
        """
        _check_params(sampling_params)
        one_token = {name: value for name, value in sampling_params.items() if name != "min_tokens"} | {"max_tokens": 1}
        return await self._report_requests("prefill", one_token, fmt, width, stream_ids, max_concurrency, timeout)

    async def modify(
        self,
        fn: ModifyFn | Editor,
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Sequence[str] | None = None,
        *,
        max_concurrency: int | None = None,
        timeout: float = 30,
        poll_interval: float = 0.2,
    ) -> Metrics:
        """Edit every stream's KV with `modify_kv(fn)`.

        Args:
            fn: An `Editor` or `fn(kv [2, L, T, D], tokens) -> (new_kv, new_tokens)`.
            fmt: What the report's `emit` writes.
            width: Columns of the report's table.
            stream_ids: Streams that take part; None: all.
            max_concurrency: Streams at once, instead of the batch's own bound (4: an edit holds its KV in memory).
            timeout: Seconds that each stream waits until the cache covers what was sent.
            poll_interval: Seconds between two looks.

        Returns:
            The report: `duration` (s), seconds of each step, bytes moved, kept ratio.

        Raises:
            LMCacheBatchedStreamError, UsageError: As `prefill`.
        """
        check_format(fmt, width)
        selected = self._select(stream_ids)
        duration = await self._modify(fn, selected, max_concurrency, timeout, poll_interval)
        report = modify_metrics(
            [self.receipts[stream_id] for stream_id in selected if stream_id in self.receipts],
            duration,
            num_streams=len(selected),
            failures=self.failures,
            fmt=fmt,
            width=width,
        )
        self._raise_failures("modify", report)
        return report

    async def decode(
        self,
        sampling_params: Mapping[str, Any],
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Sequence[str] | None = None,
        *,
        edit_every: int | None = None,
        editor: ModifyFn | Editor | None = None,
        max_concurrency: int | None = None,
        timeout: float | None = None,
    ) -> Metrics:
        """Run every stream with `sampling_params`; arguments and errors are those of `prefill`.

        Args:
            sampling_params: The engine's.
            fmt: What the report's `emit` writes: "terminal" or "json".
            width: Columns of the report's table.
            stream_ids: Streams that take part; None: all.
            edit_every: Tokens that each stream decodes between two edits of its KV; None: no edits. A stream that is
                done takes no part in later rounds; at most 4 streams edit at once (see `AsyncLMCacheStream.generate`).
            editor: What edits.
            max_concurrency: Streams at once, instead of the batch's own bound.
            timeout: Seconds for each stream.

        Returns:
            The report: `num_streams`, `duration` (s), `output_tokens`, `output_tput` (tokens/s), TTFT, TPOT, ITL (s).
        """
        edits = EditsWhileDecoding.checked(edit_every, editor, asyncio.Semaphore(_MODIFY_CONCURRENCY))
        return await self._report_requests(
            "decode", sampling_params, fmt, width, stream_ids, max_concurrency, timeout, edits
        )

    async def run_streams(
        self,
        sampling_params: Mapping[str, Any],
        stream_ids: Sequence[str] | None = None,
        *,
        max_concurrency: int | None = None,
        timeout: float | None = None,
    ) -> float:
        """`generate(sampling_params)` on every stream; the results are in `perf_metrics`.

        Returns:
            Wall time in seconds; 0 without streams.

        Raises:
            LMCacheBatchedStreamError: Some streams failed (not with `on_error="collect"`), or an id is unknown.
        """
        _check_params(sampling_params)
        duration = await self._generate("run", sampling_params, self._select(stream_ids), max_concurrency, timeout)
        self._raise_failures("run", None)
        return duration

    async def modify_stream(
        self,
        fn: ModifyFn | Editor,
        stream_ids: Sequence[str] | None = None,
        *,
        max_concurrency: int | None = None,
        timeout: float = 30,
        poll_interval: float = 0.2,
    ) -> float:
        """`modify_kv(fn)` on every stream; the results are in `receipts`. Returns and errors as `run_streams`."""
        duration = await self._modify(fn, self._select(stream_ids), max_concurrency, timeout, poll_interval)
        self._raise_failures("modify", None)
        return duration

    def get_perf_metrics(
        self, duration: float, fmt: str, width: int, mode: str, stream_ids: Sequence[str] | None = None
    ) -> Metrics:
        """Report the `perf_metrics` of the selected streams.

        Args:
            duration: Wall time of the phase in seconds; throughputs are over it.
            fmt: "terminal" or "json".
            width: Columns of the table.
            mode: "prefill" or "decode".
            stream_ids: Streams to report; None: all.

        Raises:
            LMCacheBatchedStreamError: Another `mode`, or an id that is not in the batch.
        """
        builders = {"prefill": prefill_metrics, "decode": decode_metrics}
        if mode not in builders:
            raise LMCacheBatchedStreamError(f'mode must be "prefill" or "decode", not {mode!r}')
        selected = self._select(stream_ids)
        return builders[mode](
            [self.perf_metrics[stream_id] for stream_id in selected if stream_id in self.perf_metrics],
            duration,
            num_streams=len(selected),
            failures={stream_id: self.failures[stream_id] for stream_id in selected if stream_id in self.failures},
            fmt=fmt,
            width=width,
        )

    async def _report_requests(
        self,
        mode: str,
        sampling_params: Mapping[str, Any],
        fmt: str,
        width: int,
        stream_ids: Sequence[str] | None,
        max_concurrency: int | None,
        timeout: float | None,
        edits: EditsWhileDecoding | None = None,
    ) -> Metrics:
        check_format(fmt, width)
        _check_params(sampling_params)
        selected = self._select(stream_ids)
        duration = await self._generate(mode, sampling_params, selected, max_concurrency, timeout, edits)
        if edits is not None:
            receipts = {stream_id: stream.last_receipt for stream_id, stream in selected.items()}
            self.receipts = {stream_id: receipt for stream_id, receipt in receipts.items() if receipt is not None}
        report = self.get_perf_metrics(duration, fmt, width, mode, list(selected))
        self._raise_failures(mode, report)
        return report

    async def _generate(
        self,
        phase: str,
        sampling_params: Mapping[str, Any],
        selected: Mapping[str, AsyncLMCacheStream],
        max_concurrency: int | None,
        timeout: float | None,
        edits: EditsWhileDecoding | None = None,
    ) -> float:
        if timeout is not None:
            check_timeout(timeout)
        results: dict[str, StreamPerfMetrics] = {}
        self.perf_metrics = results
        asked: dict[str, Any] = {"generate": dict(sampling_params)}
        if edits is not None:
            asked |= {"edit_every": edits.every, "editor": describe(edits.editor)}
        return await self._run_phase(
            phase,
            selected,
            Call(False, asked),
            lambda stream: stream._generate(sampling_params, (), edits, timeout),
            self._bound(max_concurrency, None),
            results,
        )

    async def _modify(
        self,
        fn: ModifyFn | Editor,
        selected: Mapping[str, AsyncLMCacheStream],
        max_concurrency: int | None,
        timeout: float,
        poll_interval: float,
    ) -> float:
        check_editor(fn)
        check_timeout(timeout)
        check_poll_interval(poll_interval)
        results: dict[str, ModifyReceipt] = {}
        self.receipts = results
        return await self._run_phase(
            "modify",
            selected,
            Call(True, {"modify": describe(fn)}),
            lambda stream: stream.modify_kv(fn, timeout=timeout, poll_interval=poll_interval),
            self._bound(max_concurrency, _MODIFY_CONCURRENCY),
            results,
        )

    def _bound(self, of_phase: int | None, default: int | None) -> int | None:
        if of_phase is not None:
            _check_options(of_phase, self._on_error)
            return of_phase
        return default if self._max_concurrency is None else self._max_concurrency

    async def _run_phase(
        self,
        phase: str,
        selected: Mapping[str, AsyncLMCacheStream],
        call: Call,
        operation: Callable[[AsyncLMCacheStream], Awaitable[_Result]],
        max_concurrency: int | None,
        results: dict[str, _Result],
    ) -> float:
        """One gather over the selected streams, in seconds; `results` and `failures` fill as streams are through."""
        failures: dict[str, BaseException] = {}
        self.failures = failures
        self.restored = frozenset()
        if not selected:
            return 0.0
        async with self._kept(call) as kept:
            if kept is not None:
                results_before, failures_before = await kept.take(selected, operation)
                results.update(results_before)
                failures.update(failures_before)
                self.restored = frozenset({*results, *failures})
            left = {stream_id: stream for stream_id, stream in selected.items() if stream_id not in self.restored}
            slots = asyncio.Semaphore(max_concurrency or len(selected))

            with watching(self._progress, phase, len(selected)) as show:

                def tell() -> None:
                    show(PhaseProgress(phase, len(selected), len(results) + len(failures), len(failures)))

                async def run(stream_id: str, stream: AsyncLMCacheStream) -> None:
                    async with slots:
                        try:
                            results[stream_id] = await (kept.do(stream, operation) if kept else operation(stream))
                        except BaseException as error:
                            failures[stream_id] = error
                            raise
                        finally:
                            tell()

                if self.restored:
                    tell()
                start = time.perf_counter()
                with observe.span(
                    phase,
                    {"lmcache_stream.phase": phase, "lmcache_stream.streams": len(left)},
                    duration="lmcache_stream.phase.duration",
                    measured=("lmcache_stream.phase",),
                ) as span:
                    outcomes = await asyncio.gather(*(run(*member) for member in left.items()), return_exceptions=True)
                    span.set({"lmcache_stream.failures": len(failures)})
                duration = time.perf_counter() - start
                if kept is not None:
                    duration += kept.seconds

        failed = {of: error for of, error in zip(left, outcomes, strict=True) if isinstance(error, BaseException)}
        failed |= {stream_id: error for stream_id, error in failures.items() if stream_id in self.restored}
        self.failures = {stream_id: failed[stream_id] for stream_id in selected if stream_id in failed}
        return duration

    def _kept(self, call: Call) -> AbstractAsyncContextManager[JournaledPhase | None]:
        return self._journal.phase(call) if self._journal is not None else nullcontext()

    def _select(self, stream_ids: Sequence[str] | None) -> dict[str, AsyncLMCacheStream]:
        if stream_ids is None:
            return dict(self._streams)
        if isinstance(stream_ids, str):
            raise UsageError("stream_ids must be a sequence of ids, not one id: put it into a list")
        return {stream_id: self.get_stream(stream_id) for stream_id in stream_ids}

    def _raise_failures(self, phase: str, report: Metrics | None) -> None:
        if not self.failures or self._on_error == "collect":
            return
        stream_id, first = next(iter(self.failures.items()))
        raise LMCacheBatchedStreamError(
            f"{phase}: {len(self.failures)} streams failed, the first {stream_id}: {type(first).__name__}: {first}",
            failures=self.failures,
            metrics=report,
        ) from first


def _check_options(max_concurrency: int | None, on_error: str) -> None:
    if max_concurrency is not None and max_concurrency < 1:
        raise UsageError(f"max_concurrency must be at least 1, not {max_concurrency}")
    if on_error not in ("raise", "collect"):
        raise UsageError(f'on_error must be "raise" or "collect", not {on_error!r}')


def _check_params(sampling_params: Mapping[str, Any]) -> None:
    if not isinstance(sampling_params, Mapping):
        raise UsageError(f"sampling_params must be a mapping, not {type(sampling_params).__name__}")
