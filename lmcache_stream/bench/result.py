"""The result of a benchmark, made of its records: the keys of `vllm bench serve`, and one object of our own."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lmcache_stream.bench.flat_keys import flat_keys
from lmcache_stream.bench.records import GENERATE, EditRecord, EditWhileDecoding, Ledger, RequestRecord
from lmcache_stream.bench.result_file import (
    SCHEMA_VERSION,
    Distribution,
    EditsResult,
    EditsWhileDecodingResult,
    ModifyResult,
    PhaseResult,
    RunResult,
    StreamResult,
    Throughput,
    read_result,
    write_result,
)
from lmcache_stream.bench.runner import BASELINE, SHARED
from lmcache_stream.metrics.statistics import rate, rate_over_time

if TYPE_CHECKING:
    from lmcache_stream.bench.config import ServeOptions

__all__ = [
    "SCHEMA_VERSION",
    "Distribution",
    "EditsResult",
    "EditsWhileDecodingResult",
    "ModifyResult",
    "PhaseResult",
    "Run",
    "RunResult",
    "StreamResult",
    "Throughput",
    "build_result",
    "read_result",
    "write_result",
]

_POINTS: Final = 60


@dataclass(frozen=True)
class Run:
    """What a benchmark was, for its result.

    Args:
        options: What was asked for.
        editors: Names of the editors' runs, in order.
        model: The served model.
        tokenizer: The tokenizer's name.
        base_url: The engine's address.
        embedded: Whether it ran in this process.
        samples: Fingerprint of the prompts.
        count: How many there are.
        date: When it began, as `YYYYMMDD-HHMMSS`.
        version: Of the package.
        interrupted: Whether it ended before everything was done.
        repeated: Prefills and edits done again.
    """

    options: ServeOptions
    editors: Sequence[str]
    model: str
    tokenizer: str
    base_url: str
    embedded: bool
    samples: str
    count: int
    date: str
    version: str
    interrupted: bool = False
    repeated: int = 0


def build_result(run: Run, ledger: Ledger) -> dict[str, Any]:
    """The result as it is written; the flat keys describe the first editor's decode, or the only run."""
    options = run.options
    baseline = [BASELINE] if options.compare_baseline else []
    names = [*run.editors, *baseline] if run.editors else [GENERATE]
    outcomes = {name: _outcomes(ledger, name, run.count) for name in names}
    results = {name: _run_result(ledger, name, outcomes[name], options.edit_every) for name in names}
    if BASELINE in results:
        results = {name: _against(one, results[BASELINE]) for name, one in results.items()}
    first, *others = results.values()
    ours = StreamResult(
        **dict(first),
        version=run.version,
        base_url=run.base_url,
        embedded=run.embedded,
        itl_spread_ms=first.last.itl_spread_ms,
        other_runs=others,
        samples=run.samples,
        options=_told(options),
        interrupted=run.interrupted,
        unfinished=run.count - len(outcomes[first.run]),
        resumed=ledger.resumed,
        repeated=run.repeated,
    )
    return {
        "date": run.date,
        "endpoint_type": "vllm",
        "backend": "vllm",
        "label": None,
        "model_id": run.model,
        "tokenizer_id": run.tokenizer,
        "num_prompts": options.num_prompts,
        **options.metadata,
        "request_rate": options.request_rate if math.isfinite(options.request_rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        **flat_keys(outcomes[first.run], first.last.duration, options),
        "lmcache_stream": ours.model_dump(mode="json"),
    }


def _outcomes(ledger: Ledger, run: str, count: int) -> list[RequestRecord]:
    """What became of each prompt in the phase that generates: its record, or that of the phase that failed before."""
    if run == GENERATE:
        return ledger.requests(GENERATE, "generate")
    outcomes = []
    for index in range(count):
        decoded = ledger.find(run, "decode", index)
        if isinstance(decoded, RequestRecord):
            outcomes.append(decoded)
            continue
        before = [("prefill", ledger.find(SHARED, "prefill", index)), ("modify", ledger.find(run, "modify", index))]
        failed = next(((phase, one.error) for phase, one in before if one is not None and one.error), None)
        if failed is not None:
            outcomes.append(RequestRecord(run, "decode", index, 0.0, 0.0, error=f"{failed[0]}: {failed[1]}"))
    return outcomes


def _run_result(
    ledger: Ledger, name: str, outcomes: Sequence[RequestRecord], edit_every: int | None = None
) -> RunResult:
    if name == GENERATE:
        last = _phase_result(outcomes, ledger.duration(name, "generate"))
        whole = _throughput(last, last.duration)
        return RunResult(run=name, phases={"generate": last}, without_edit_time=whole, with_edit_time=whole)
    prefill = _phase_result(ledger.requests(SHARED, "prefill"), ledger.duration(SHARED, "prefill"))
    last = _phase_result(outcomes, ledger.duration(name, "decode"))
    edits = ledger.edits(name)
    modify = _modify_result(edits, ledger.duration(name, "modify")) if name != BASELINE else None
    while_decoding = _while_decoding(outcomes, edit_every) if modify and edit_every else None
    edit_time = modify.duration if modify else 0.0
    return RunResult(
        run=name,
        editor=name if modify else None,
        phases={"prefill": prefill, "decode": last},
        modify=modify,
        edits_while_decoding=while_decoding,
        kept_ratio=modify.tokens_after / modify.tokens_before if modify and modify.tokens_before else None,
        bytes_moved=sum(edits.bytes_moved for edits in (modify, while_decoding) if edits),
        edit_time=edit_time,
        without_edit_time=_throughput(last, last.duration),
        with_edit_time=_throughput(last, last.duration + edit_time),
        edit_taken_ratio=_taken(edits, outcomes),
    )


def _phase_result(outcomes: Sequence[RequestRecord], duration: float) -> PhaseResult:
    good = [one for one in outcomes if not one.error]
    cached = [one.cached_tokens for one in good if one.cached_tokens is not None]
    arrivals = ((one.start + at, count) for one in outcomes for at, count in one.events)
    return PhaseResult(
        duration=duration,
        completed=len(good),
        failed=len(outcomes) - len(good),
        input_tokens=sum(one.input_tokens for one in good),
        output_tokens=sum(one.output_tokens for one in good),
        cached_tokens=sum(cached) if cached else None,
        edit_shortfall=sum(one.edit_shortfall for one in good),
        ttft_ms=Distribution.of(one.ttft for one in good),
        tpot_ms=Distribution.of(one.tpot for one in good if one.tpot is not None),
        itl_ms=Distribution.of(gap for one in good for gap in one.itl),
        itl_spread_ms=Distribution.of(gap for one in good for gap in one.itl_spread),
        e2el_ms=Distribution.of(one.latency for one in good),
        throughput=rate_over_time(arrivals, duration, _POINTS),
    )


def _modify_result(edits: Sequence[EditRecord], duration: float) -> ModifyResult:
    good = [one for one in edits if not one.error]
    return ModifyResult(duration=duration, failed=len(edits) - len(good), **_edits_result(good))


def _while_decoding(outcomes: Sequence[RequestRecord], every: int) -> EditsWhileDecodingResult:
    good = [one for one in outcomes if not one.error]
    edits = [edit for one in good for edit in one.edits]
    seconds = math.fsum(edit.duration for edit in edits)
    share = rate(seconds, math.fsum(one.duration for one in good))
    return EditsWhileDecodingResult(every=every, seconds=seconds, share=share, **_edits_result(edits))


def _edits_result(edits: Sequence[EditRecord] | Sequence[EditWhileDecoding]) -> dict[str, Any]:
    """The fields of an `EditsResult` over edits that succeeded."""
    names = dict.fromkeys(step for one in edits for step in one.seconds)
    steps = {step: Distribution.of(one.seconds.get(step, 0.0) for one in edits) for step in names}
    return {
        "completed": len(edits),
        "tokens_before": sum(one.tokens_before for one in edits),
        "tokens_after": sum(one.tokens_after for one in edits),
        "recomputed": sum(one.recomputed for one in edits),
        "chunks_stored": sum(one.chunks_stored for one in edits),
        "bytes_moved": sum(one.bytes_moved for one in edits),
        "edit_ms": Distribution.of(one.duration for one in edits),
        "steps_ms": steps,
    }


def _throughput(last: PhaseResult, duration: float) -> Throughput:
    return Throughput(
        duration=duration,
        requests=rate(last.completed, duration),
        output_tokens=rate(last.output_tokens, duration),
    )


def _taken(edits: Sequence[EditRecord], outcomes: Sequence[RequestRecord]) -> float | None:
    stored = {one.index: len(one.stored) for one in edits if not one.error}
    taken = [
        (one.edit_shortfall, stored.get(one.index, 0) + sum(edit.tokens_stored for edit in one.edits))
        for one in outcomes
        if not one.error and one.cached_tokens is not None
    ]
    asked = sum(tokens for _, tokens in taken)
    return 1 - sum(shortfall for shortfall, _ in taken) / asked if asked else None


def _against(one: RunResult, baseline: RunResult) -> RunResult:
    base = baseline.without_edit_time.output_tokens
    if one is baseline or not base:
        return one
    return one.model_copy(
        update={
            "gain_without_edit_time": one.without_edit_time.output_tokens / base,
            "gain_with_edit_time": one.with_edit_time.output_tokens / base,
        }
    )


def _told(options: ServeOptions) -> dict[str, Any]:
    told = json.loads(options.model_dump_json(exclude_unset=True))
    return {name: value for name, value in told.items() if name not in ("resume", "disable_tqdm")}
