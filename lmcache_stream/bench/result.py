"""The result of a benchmark: the keys of `vllm bench serve`, and one object of our own.

Times in the keys of `vllm bench serve` are in milliseconds where the key ends in `_ms`, in seconds elsewhere; a
request ends with its last token. ITL there is the gap between two events, whatever number of tokens each brings; all
tokens that one read of the socket brings are one event here. `itl_spread_ms` has each gap spread over the tokens of its
event.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from lmcache_stream.bench.records import GENERATE, EditRecord, EditWhileDecoding, Ledger, RequestRecord
from lmcache_stream.bench.runner import BASELINE, SHARED
from lmcache_stream.errors import UsageError
from lmcache_stream.metrics import percentile

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

SCHEMA_VERSION: Final = 1
DETAILS: Final = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
_POINTS: Final = 60
_MS: Final = 1000.0


class _Part(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True)


class Distribution(_Part):
    """How values spread, in milliseconds.

    Args:
        count: Values.
        mean: Their mean.
        median: Their median.
        std: Their standard deviation (of a population).
        p90: Their 90th percentile.
        p99: Their 99th percentile.
        quantiles: Their percentiles 0, 1, ... 100.
    """

    count: int
    mean: float
    median: float
    std: float
    p90: float
    p99: float
    quantiles: list[float]

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Distribution | None:
        """The distribution of values in seconds; None of none."""
        values = sorted(seconds)
        if not values:
            return None
        quantiles = [percentile_of_sorted(values, q) * _MS for q in range(101)]
        return cls(
            count=len(values),
            mean=mean(values) * _MS,
            std=deviation(values) * _MS,
            median=quantiles[50],
            p90=quantiles[90],
            p99=quantiles[99],
            quantiles=quantiles,
        )


class Throughput(_Part):
    """What came out over a time.

    Args:
        duration: Seconds.
        requests: Requests a second.
        output_tokens: Generated tokens a second.
    """

    duration: float
    requests: float
    output_tokens: float


class PhaseResult(_Part):
    """A phase of requests.

    Args:
        duration: Seconds.
        completed: Requests that succeeded.
        failed: Requests that failed.
        input_tokens: Tokens of the prompts that were sent, of successful requests, as are all below.
        output_tokens: Tokens generated.
        cached_tokens: Prompt tokens that the engine took from a cache; None if it does not say.
        edit_shortfall: Tokens of stored edits that it did not.
        ttft_ms: Time to the first token.
        tpot_ms: Each request's mean time per token after the first.
        itl_ms: Gaps between events.
        itl_spread_ms: Gaps between tokens: an event's gap spread over its tokens.
        e2el_ms: Time to the last token.
        throughput: `[second, generated tokens a second]` over the phase, of all requests.
    """

    duration: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    edit_shortfall: int = 0
    ttft_ms: Distribution | None = None
    tpot_ms: Distribution | None = None
    itl_ms: Distribution | None = None
    itl_spread_ms: Distribution | None = None
    e2el_ms: Distribution | None = None
    throughput: list[tuple[float, float]] = []


class EditsResult(_Part):
    """Edits.

    Args:
        completed: Edits that succeeded.
        tokens_before: Tokens whose KV was edited.
        tokens_after: Tokens that the edits gave back.
        recomputed: Tokens of them that fill no chunk, so that the engine computes them anew.
        chunks_stored: Chunks stored.
        bytes_moved: Bytes of KV read and written.
        edit_ms: Time of an edit, with waiting, reading and storing.
        steps_ms: The same by step: wait, retrieve, edit, store.
    """

    completed: int
    tokens_before: int
    tokens_after: int
    recomputed: int
    chunks_stored: int
    bytes_moved: int
    edit_ms: Distribution | None = None
    steps_ms: dict[str, Distribution] = {}


class ModifyResult(EditsResult):
    """A phase of edits.

    Args:
        duration: Seconds.
        failed: Edits that failed.
    """

    duration: float
    failed: int


class EditsWhileDecodingResult(EditsResult):
    """Edits between the passes of decodes; one that fails ends its request.

    Args:
        every: Tokens between two edits of a request.
        seconds: Time of all edits together; in each request's own time, and in `without_edit_time` too.
        share: That, over the time of all requests that succeeded together.
    """

    every: int
    seconds: float
    share: float


class RunResult(_Part):
    """A run over all prompts.

    Args:
        run: Its name: "generate", "baseline", or the editor as it was asked for.
        editor: The editor; None without one.
        phases: Its phases of requests by name: generate, or prefill and decode. The prefill is common to all runs.
        modify: Its phase of edits; None without one.
        edits_while_decoding: Edits between the passes of its decodes; None without `edit_every`.
        kept_ratio: Tokens after the edits over tokens before, in the phase of edits; None without one.
        bytes_moved: Bytes of KV read and written by all edits.
        edit_time: Seconds of the phase of edits.
        without_edit_time: Throughput over the time of the last phase; edits while decoding are part of that.
        with_edit_time: Throughput over that and the time of the phase of edits.
        edit_taken_ratio: Share of the stored edits' tokens that the engine took from the cache; None if it does not
            say, or without edits. Below 1, this run measures something else than decoding from edits.
        gain_without_edit_time: Output throughput over the baseline's; None without one.
        gain_with_edit_time: The same, with edit time counted.
    """

    run: str
    editor: str | None = None
    phases: dict[str, PhaseResult]
    modify: ModifyResult | None = None
    edits_while_decoding: EditsWhileDecodingResult | None = None
    kept_ratio: float | None = None
    bytes_moved: int = 0
    edit_time: float = 0.0
    without_edit_time: Throughput
    with_edit_time: Throughput
    edit_taken_ratio: float | None = None
    gain_without_edit_time: float | None = None
    gain_with_edit_time: float | None = None

    @property
    def last(self) -> PhaseResult:
        """The phase that generates."""
        return self.phases.get("decode") or self.phases["generate"]


class StreamResult(RunResult):
    """What a result file has under "lmcache_stream": the run that the flat keys describe, and all others.

    Args:
        schema_version: Of this object.
        version: Of the package.
        base_url: The engine's address.
        embedded: Whether engine and cache ran in the benchmark's own process.
        itl_spread_ms: The run's gaps between tokens, beside the flat `*_itl_ms`.
        other_runs: The baseline, and further editors.
        samples: Fingerprint of the prompts.
        options: What was asked for.
        interrupted: Whether it ended before everything was done.
        unfinished: Requests of the run that are neither completed nor failed.
        resumed: Records taken over from an earlier process.
        repeated: Prefills and edits done again because the cache had lost their KV; in no figure.
    """

    schema_version: int = SCHEMA_VERSION
    version: str
    base_url: str
    embedded: bool
    itl_spread_ms: Distribution | None = None
    other_runs: list[RunResult] = []
    samples: str
    options: dict[str, Any] = {}
    interrupted: bool = False
    unfinished: int = 0
    resumed: int = 0
    repeated: int = 0


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


def flat_keys(outcomes: Sequence[RequestRecord], duration: float, options: ServeOptions) -> dict[str, Any]:
    """The keys of `vllm bench serve` that describe requests, from their records and the seconds of their phase."""
    good = [one for one in outcomes if not one.error]
    total_input, total_output = sum(one.input_tokens for one in good), sum(one.output_tokens for one in good)
    flat: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": rate(len(good), duration),
        "request_goodput": rate(_good_enough(good, options.goodput), duration) if options.goodput else None,
        "output_throughput": rate(total_output, duration),
        "total_token_throughput": rate(total_input + total_output, duration),
        "input_lens": [one.input_tokens for one in outcomes],
        "output_lens": [0 if one.error else one.output_tokens for one in outcomes],
        "ttfts": [one.ttft for one in outcomes],
        "itls": [one.itl for one in outcomes],
        "latencies": [one.latency for one in outcomes],
        "start_times": [one.start for one in outcomes],
        "queue_times": [one.queue for one in outcomes],
        "generated_texts": [one.text for one in outcomes],
        "errors": [one.error for one in outcomes],
        **_peaks(good),
        "rtfx": 0.0,
    }
    values = {
        "ttft": [one.ttft for one in good],
        "tpot": [one.tpot for one in good if one.tpot is not None],
        "itl": [gap for one in good for gap in one.itl],
        "e2el": [one.latency for one in good],
    }
    if options.max_concurrency is not None:
        values["client_queue_time"] = [one.queue for one in good]
        if math.isfinite(options.request_rate):
            values["e2el_including_client_queue"] = [one.latency + one.queue for one in good]
    for metric in values:
        if metric in options.percentile_metrics:
            flat |= _statistics(metric, values[metric], options.metric_percentiles)
    return flat if options.save_detailed else {key: value for key, value in flat.items() if key not in DETAILS}


def write_result(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        UsageError: There is no such folder, or it cannot be written to.
        OSError: The file cannot be written.
    """
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_result(path: Path) -> tuple[dict[str, Any], StreamResult | None]:
    """Read a result file: its content, and our own object, which a file of `vllm bench serve` lacks.

    Raises:
        UsageError: It cannot be read, or is no such result.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read the result {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or not {"duration", "completed", "output_throughput"} <= content.keys():
        raise UsageError(f"{path} is no result of bench serve")
    ours = content.get("lmcache_stream")
    try:
        return content, None if ours is None else StreamResult.model_validate(ours)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path}: lmcache_stream.{place}: {first['msg'].lower()}") from error


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of none."""
    return math.fsum(values) / len(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a population; 0 of none."""
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values)) if values else 0.0


def percentile_of_sorted(values: Sequence[float], q: float) -> float:
    """`metrics.percentile` of values in order."""
    position = (len(values) - 1) * q / 100
    low = math.floor(position)
    return values[low] + (values[min(low + 1, len(values) - 1)] - values[low]) * (position - low)


def rate(amount: float, seconds: float) -> float:
    """`amount` a second; 0 of no time."""
    return amount / seconds if seconds > 0 else 0.0


def _statistics(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = sorted(values)
    known = values or [0.0]
    return {
        f"mean_{metric}_ms": mean(values) * _MS,
        f"median_{metric}_ms": percentile(known, 50) * _MS,
        f"std_{metric}_ms": deviation(values) * _MS,
        **{f"p{q:g}_{metric}_ms": percentile(known, q) * _MS for q in percentiles},
    }


def _good_enough(records: Sequence[RequestRecord], objectives: dict[str, float]) -> int:
    """Requests that meet all objectives (ms); one of a single token has a TPOT of 0."""
    return sum(
        all(
            {"ttft": one.ttft, "tpot": one.tpot or 0.0, "e2el": one.latency}[name] <= limit / _MS
            for name, limit in objectives.items()
        )
        for one in records
    )


def _peaks(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """The most tokens in a second, and the most requests that were under way in one, by whole seconds."""
    first = min((one.start for one in records), default=0.0)
    tokens: dict[int, int] = {}
    requests: dict[int, int] = {}
    for one in records:
        for at, count in one.events:
            second = int(one.start - first + at)
            tokens[second] = tokens.get(second, 0) + count
        for second in range(int(one.start - first), int(one.start - first + one.latency) + 1):
            requests[second] = requests.get(second, 0) + 1
    return {
        "max_output_tokens_per_s": float(max(tokens.values(), default=0)),
        "max_concurrent_requests": max(requests.values(), default=0),
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
        throughput=_over_time(outcomes, duration),
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


def _over_time(records: Sequence[RequestRecord], duration: float) -> list[tuple[float, float]]:
    if duration <= 0:
        return []
    width = duration / _POINTS
    bins = [0] * _POINTS
    for one in records:
        for at, count in one.events:
            bins[min(int((one.start + at) / width), _POINTS - 1)] += count
    return [((index + 0.5) * width, count / width) for index, count in enumerate(bins)]


def _told(options: ServeOptions) -> dict[str, Any]:
    told = json.loads(options.model_dump_json(exclude_unset=True))
    return {name: value for name, value in told.items() if name not in ("resume", "disable_tqdm")}
