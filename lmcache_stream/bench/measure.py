"""One request, or the passes of one stream, measured: the record of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lmcache_stream.bench.records import GENERATE, EditWhileDecoding, RequestRecord, grouped
from lmcache_stream.stream.edits import EditsWhileDecoding
from lmcache_stream.types import Completion

if TYPE_CHECKING:
    from types import TracebackType

    from lmcache_stream.bench.datasets import Sample
    from lmcache_stream.bench.load import Clock
    from lmcache_stream.completions import CompletionsClient
    from lmcache_stream.editors import Editor
    from lmcache_stream.metrics import StreamPerfMetrics
    from lmcache_stream.stream import AsyncLMCacheStream

__all__ = ["Ready", "Rounds", "measure_passes", "measure_request", "reason_of"]


@dataclass(frozen=True)
class Ready:
    """A stream between two phases, what it has to send besides, and how much of an edit backs it."""

    stream: AsyncLMCacheStream
    suffix: Sequence[int] = ()
    stored: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that the next request sends."""
        return len(self.stream.tokens) + len(self.stream.suffix_tokens()) + len(self.suffix)


@dataclass
class Rounds:
    """The edits of a stream while it decodes: each takes one of `slots` for its time, and leaves a record.

    Attributes:
        sent: When the decode was sent, in seconds of `time.perf_counter`.
        edits: Those that succeeded.
    """

    stream: AsyncLMCacheStream
    slots: asyncio.Semaphore
    every: int
    editor: Editor
    sent: float = 0.0
    edits: list[EditWhileDecoding] = field(default_factory=list)
    _begun: float = 0.0

    async def __aenter__(self) -> None:
        await self.slots.acquire()
        self._begun = time.perf_counter()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.slots.release()
        receipt = self.stream.last_receipt
        if exc_type is not None or receipt is None:
            return
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


async def measure_request(
    engine: CompletionsClient,
    sample: Sample,
    sampling_params: Mapping[str, Any],
    *,
    index: int,
    queued: float,
    clock: Clock,
) -> RequestRecord:
    """Send a prompt and take the answer to its end, or to its failure.

    Args:
        engine: Where it is sent.
        sample: The prompt.
        sampling_params: The engine's, but for `max_tokens`.
        index: Number of the prompt.
        queued: Seconds between its arrival and now.
        clock: The phase's.
    """
    times: list[float] = []
    text: list[str] = []
    completion: Completion | None = None
    error = ""
    start = clock.now()
    sent = time.perf_counter()
    try:
        params = {**sampling_params, "max_tokens": sample.output_len}
        async with aclosing(engine.batches(sample.prompt_token_ids, params)) as batches:
            async for batch in batches:
                if isinstance(batch, Completion):
                    completion = batch
                    continue
                for token in batch:
                    text.append(token.text)
                    if token.token_id is not None:
                        times.append((token.time or time.perf_counter()) - sent)
    except Exception as failure:
        error = reason_of(failure)
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


async def measure_passes(
    ready: Ready,
    sampling_params: Mapping[str, Any],
    rounds: Rounds | None = None,
    *,
    run: str,
    phase: Literal["prefill", "decode"],
    index: int,
    queued: float,
    clock: Clock,
) -> RequestRecord:
    """Let a stream generate, with edits in `rounds` if there are any, to its end or to its failure.

    Args:
        ready: The stream.
        sampling_params: The engine's.
        rounds: Its edits.
        run: The run that it belongs to.
        phase: Its phase.
        index: Number of the prompt.
        queued: Seconds between its arrival and now.
        clock: The phase's.
    """
    stream = ready.stream
    edits = EditsWhileDecoding(rounds.every, rounds.editor, rounds) if rounds is not None else None
    last, text, tokens = stream.last_metrics, len(stream.output_text()), len(stream.output_tokens())
    error = ""
    start = clock.now()
    sent = time.perf_counter()
    if rounds is not None:
        rounds.sent = sent
    try:
        await stream._generate(sampling_params, ready.suffix, edits, None)
    except Exception as failure:
        error = reason_of(failure)
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
        edit_shortfall=metrics.edit_shortfall if rounds and metrics else _shortfall(metrics, ready.stored),
        edits=rounds.edits if rounds else [],
        error=error,
    )


def reason_of(failure: Exception) -> str:
    """Why something failed, in one line."""
    return " ".join(f"{type(failure).__name__}: {failure}".split())


def _shortfall(metrics: StreamPerfMetrics | None, stored: int) -> int:
    """Tokens of a stored edit that the engine computed itself; 0 if it does not say. It always computes the last."""
    if metrics is None or metrics.cached_tokens is None:
        return 0
    return max(0, min(stored, metrics.input_tokens - 1) - metrics.cached_tokens)
