"""What a request took (`StreamPerfMetrics`), what a phase of a batch took (`Metrics`), and how a report is shown."""

from __future__ import annotations

import html
import itertools
import json
import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rich import box
from rich.table import Table
from rich.text import Text

from lmcache_stream.console import open_console
from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import IO, Self, TypeAlias

    Value: TypeAlias = int | float | str | None

__all__ = [
    "FORMATS",
    "Metrics",
    "ModifyReceiptLike",
    "Section",
    "StreamPerfMetrics",
    "check_format",
    "decode_metrics",
    "modify_metrics",
    "percentile",
    "prefill_metrics",
]

FORMATS = ("terminal", "json")
STATISTICS = ("mean", "p50", "p90", "p99")
STEPS = ("wait", "retrieve", "edit", "store")
MIN_WIDTH = 40


@dataclass(frozen=True)
class StreamPerfMetrics:
    """The performance of one request of one stream; times in seconds, throughputs in tokens a second.

    Args:
        duration: From the request to the end of its answer.
        input_tokens: Tokens of the prompt that was sent.
        output_tokens: Tokens that were generated.
        input_tput: `input_tokens / duration`; 0 when `duration` is 0.
        output_tput: `output_tokens / duration`; 0 when `duration` is 0.
        tpot: Time before each output token after the first, `output_tokens - 1` gaps (none for no tokens). Tokens that
            arrive in one event share its time: the gap before the event is spread evenly over them, and an opening
            event of k tokens gives k - 1 gaps of zero. The gaps sum to the time from the first to the last arrival.
        ttft: From the request to the arrival of the first token; 0 when none came.
        cached_tokens: Prompt tokens that the engine took from a cache; None if it does not say.
        edit_shortfall: Tokens of a stored edit that the engine did not take from the cache.
        times: Arrival of each token since the request.
        start: When the request was sent, in seconds of `time.perf_counter`.
    """

    duration: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    input_tput: float = 0.0
    output_tput: float = 0.0
    tpot: list[float] = field(default_factory=list)
    ttft: float = 0.0
    cached_tokens: int | None = None
    edit_shortfall: int = 0
    times: tuple[float, ...] = field(default=(), repr=False, compare=False)
    start: float = field(default=0.0, repr=False, compare=False)

    @classmethod
    def from_times(
        cls,
        *,
        start: float,
        end: float,
        times: Sequence[float],
        input_tokens: int,
        cached_tokens: int | None = None,
        edit_shortfall: int = 0,
    ) -> Self:
        """Measure a request by its clock.

        Args:
            start: When it was sent, in seconds of `time.perf_counter`.
            end: When its answer ended, on the same clock.
            times: When each token arrived, on the same clock, in order; equal neighbours are one event.
            input_tokens: Tokens of the prompt that was sent.
            cached_tokens: Prompt tokens that the engine took from a cache; None if it does not say.
            edit_shortfall: Tokens of a stored edit that the engine did not take from the cache.
        """
        duration = end - start
        return cls(
            duration=duration,
            input_tokens=input_tokens,
            output_tokens=len(times),
            input_tput=_rate(input_tokens, duration),
            output_tput=_rate(len(times), duration),
            tpot=_gaps(times),
            ttft=times[0] - start if times else 0.0,
            cached_tokens=cached_tokens,
            edit_shortfall=edit_shortfall,
            times=tuple(time - start for time in times),
            start=start,
        )


class ModifyReceiptLike(Protocol):
    """What a report over edits needs to know of each one."""

    @property
    def tokens_before(self) -> int:
        """Tokens whose KV was given to the edit."""

    @property
    def tokens_after(self) -> int:
        """Tokens that the edit gave back."""

    @property
    def bytes_moved(self) -> int:
        """Bytes of KV fetched and stored."""

    @property
    def recomputed(self) -> int:
        """Tokens of the edit that fill no chunk, so that the engine computes them anew."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by step: wait, retrieve, edit, store."""


def percentile(values: Iterable[float], q: float) -> float:
    """The `q`-th percentile, `q` from 0 to 100, with linear interpolation between neighbours (numpy's default)."""
    ordered = sorted(values)
    if not ordered:
        raise UsageError("no values: a percentile needs at least one")
    if not 0 <= q <= 100:
        raise UsageError(f"q must be between 0 and 100, not {q}")
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def check_format(fmt: str, width: int = 80) -> None:
    """Refuse a report format or a width that `Metrics` cannot show, with a `UsageError`."""
    if fmt not in FORMATS:
        raise UsageError(f"fmt must be one of {', '.join(map(repr, FORMATS))}, not {fmt!r}")
    if type(width) is not int or width < MIN_WIDTH:
        raise UsageError(f"width must be a whole number of at least {MIN_WIDTH} columns, not {width!r}")


class Section:
    """One titled group of values in a report, in the order in which they were added."""

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.title = title
        self.rows: list[tuple[str, dict[str, Value]]] = []

    def add(self, key: str, label: str, value: Value) -> Self:
        """Add a value: `key` names it in `Metrics.to_dict`, `label` in the table."""
        return self.add_row(label, {key: value})

    def add_row(self, label: str, values: Mapping[str, Value]) -> Self:
        """Add several values by key that the table shows in one row."""
        if twice := self.to_dict().keys() & values.keys():
            raise UsageError(f"section {self.name!r} has {sorted(twice)} already; give each value a key of its own")
        self.rows.append((label, dict(values)))
        return self

    def to_dict(self) -> dict[str, Value]:
        """Value by key."""
        return {key: value for _, values in self.rows for key, value in values.items()}


class Metrics:
    """A report: a title and sections of values.

    Args:
        title: The report's title.
        fmt: What `emit` writes: "terminal" for a table, "json" for one JSON document.
        width: Columns of the table.
    """

    def __init__(self, title: str, fmt: str = "terminal", width: int = 80) -> None:
        check_format(fmt, width)
        self.title = title
        self.fmt = fmt
        self.width = width
        self._sections: dict[str, Section] = {}

    def add_section(self, name: str, title: str) -> Section:
        """Open a section: `name` names it in `to_dict`, `title` in the table."""
        if name in self._sections:
            raise UsageError(f"the report has a section {name!r} already; add to that one")
        section = self._sections[name] = Section(name, title)
        return section

    def to_dict(self) -> dict[str, object]:
        """`{"title": title, "metrics": {section: {key: value}}}`, a new dictionary each time."""
        return {
            "title": self.title,
            "metrics": {section.name: section.to_dict() for section in self._sections.values()},
        }

    def emit(self, file: IO[str] | None = None) -> None:
        """Write the report to `file` (default: standard output) in its format.

        A table has colours and bold type only where `file` is a terminal and `NO_COLOR` is not set.
        """
        out = sys.stdout if file is None else file
        if self.fmt == "json":
            out.write(json.dumps(_finite(self.to_dict()), indent=2, allow_nan=False) + "\n")
        else:
            open_console(out, width=self.width).print(self._table())

    def _table(self) -> Table:
        table = Table(
            title=Text(self.title, style="bold"), title_justify="left", box=box.ROUNDED, show_header=False, expand=True
        )
        table.add_column(ratio=1, overflow="fold")
        table.add_column(ratio=1, overflow="fold", justify="right")
        for section in self._sections.values():
            table.add_row(Text(_printable(section.title), style="bold cyan"), "")
            for label, values in section.rows:
                cells = "".join(f"{_show(value):>9}" for value in values.values())
                table.add_row(Text("  " + _printable(label)), Text(cells.strip()))
            table.add_section()
        return table

    def _repr_html_(self) -> str:
        columns = max((len(values) for section in self._sections.values() for _, values in section.rows), default=1)
        lines = ["<table>", f"<caption>{html.escape(self.title)}</caption>"]
        for section in self._sections.values():
            title = html.escape(section.title)
            lines.append(f'<tr><th colspan="{columns + 1}" style="text-align: left">{title}</th></tr>')
            for label, values in section.rows:
                span = columns - len(values) + 1
                cells = [f'<td style="text-align: left">{html.escape(label)}</td>']
                for value in values.values():
                    cells.append(f'<td colspan="{span}" style="text-align: right">{html.escape(_show(value))}</td>')
                    span = 1
                lines.append(f"<tr>{''.join(cells)}</tr>")
        lines.append("</table>")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Metrics({self.title!r}, {self.to_dict()['metrics']!r})"


def prefill_metrics(
    streams: Sequence[StreamPerfMetrics],
    duration: float,
    *,
    num_streams: int,
    failures: Mapping[str, BaseException] | None = None,
    fmt: str = "terminal",
    width: int = 80,
) -> Metrics:
    """Report a batch's prefill phase.

    Args:
        streams: One for each stream that succeeded.
        duration: Wall time of the whole phase in seconds; throughput is over it.
        num_streams: Streams that were asked to run, failures included.
        failures: Exception by stream id.
        fmt: "terminal" or "json".
        width: Columns of the table.
    """
    metrics = _phase("Prefill", num_streams, fmt, width)
    tokens = sum(stream.input_tokens for stream in streams)
    results = metrics.add_section("results", "Results")
    results.add("duration", "Duration (s)", duration)
    results.add("input_tokens", "Input tokens", tokens)
    results.add("input_tput", "Input throughput (tok/s)", _rate(tokens, duration))
    _add_distribution(metrics, "ttft", "Time to first token", _ttfts(streams))
    _add_cache(metrics, streams)
    _add_failures(metrics, failures)
    return metrics


def decode_metrics(
    streams: Sequence[StreamPerfMetrics],
    duration: float,
    *,
    num_streams: int,
    failures: Mapping[str, BaseException] | None = None,
    fmt: str = "terminal",
    width: int = 80,
) -> Metrics:
    """Report a batch's decode phase; arguments as for `prefill_metrics`.

    TPOT is over streams, each with the mean of its gaps; ITL is over all gaps of all streams.
    """
    metrics = _phase("Decode", num_streams, fmt, width)
    tokens = sum(stream.output_tokens for stream in streams)
    results = metrics.add_section("results", "Results")
    results.add("duration", "Duration (s)", duration)
    results.add("output_tokens", "Output tokens", tokens)
    results.add("output_tput", "Output throughput (tok/s)", _rate(tokens, duration))
    means = [math.fsum(stream.tpot) / len(stream.tpot) for stream in streams if stream.tpot]
    gaps = [gap for stream in streams for gap in stream.tpot]
    _add_distribution(metrics, "ttft", "Time to first token", _ttfts(streams))
    _add_distribution(metrics, "tpot", "Time per output token", means)
    _add_distribution(metrics, "itl", "Inter-token latency", gaps)
    _add_cache(metrics, streams)
    _add_failures(metrics, failures)
    return metrics


def modify_metrics(
    receipts: Sequence[ModifyReceiptLike],
    duration: float,
    *,
    num_streams: int,
    failures: Mapping[str, BaseException] | None = None,
    fmt: str = "terminal",
    width: int = 80,
) -> Metrics:
    """Report a batch's modify phase; `receipts` has one for each stream that succeeded, the rest is as for the others.

    The kept ratio is tokens after over tokens before, summed over all streams; None when there were none before.
    """
    metrics = _phase("Modify", num_streams, fmt, width)
    metrics.add_section("results", "Results").add("duration", "Duration (s)", duration)
    before = sum(receipt.tokens_before for receipt in receipts)
    after = sum(receipt.tokens_after for receipt in receipts)
    edit = metrics.add_section("edit", "Edit")
    edit.add("tokens_before", "Tokens before", before)
    edit.add("tokens_after", "Tokens after", after)
    edit.add("kept_ratio", "Kept ratio", after / before if before else None)
    edit.add("recomputed", "Tokens left to recompute", sum(receipt.recomputed for receipt in receipts))
    edit.add("bytes_moved", "Bytes moved", sum(receipt.bytes_moved for receipt in receipts))
    steps = metrics.add_section("steps", f"Steps (s): {', '.join(STATISTICS)}")
    for step in STEPS:
        seconds = _distribution([receipt.seconds[step] for receipt in receipts if step in receipt.seconds])
        steps.add_row(step.capitalize(), {f"{step}_{key}": value for key, value in seconds.items()})
    _add_failures(metrics, failures)
    return metrics


def _phase(title: str, num_streams: int, fmt: str, width: int) -> Metrics:
    metrics = Metrics(title, fmt, width)
    metrics.add_section("config", "Config").add("num_streams", "Streams", num_streams)
    return metrics


def _ttfts(streams: Sequence[StreamPerfMetrics]) -> list[float]:
    return [stream.ttft for stream in streams if stream.output_tokens]


def _distribution(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(STATISTICS)
    return {"mean": math.fsum(values) / len(values), **{f"p{q}": percentile(values, q) for q in (50, 90, 99)}}


def _add_distribution(metrics: Metrics, name: str, title: str, values: Sequence[float]) -> None:
    metrics.add_section(name, f"{title} (s)").add_row(", ".join(STATISTICS), _distribution(values))


def _add_cache(metrics: Metrics, streams: Sequence[StreamPerfMetrics]) -> None:
    told = [stream.cached_tokens for stream in streams if stream.cached_tokens is not None]
    shortfall = sum(stream.edit_shortfall for stream in streams)
    if not told and not shortfall:
        return
    section = metrics.add_section("cache", "Cache")
    section.add("cached_tokens", "Prompt tokens taken from a cache", sum(told) if told else None)
    section.add("edit_shortfall", "Tokens of edits not taken", shortfall)


def _add_failures(metrics: Metrics, failures: Mapping[str, BaseException] | None) -> None:
    if not failures:
        return
    section = metrics.add_section("failures", "Failures").add("count", "Streams that failed", len(failures))
    for stream_id, error in failures.items():
        section.add(stream_id, stream_id, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _rate(tokens: int, duration: float) -> float:
    return tokens / duration if duration > 0 else 0.0


def _gaps(times: Sequence[float]) -> list[float]:
    events = [(time, len(list(tokens))) for time, tokens in itertools.groupby(times)]
    if not events:
        return []
    gaps = [0.0] * (events[0][1] - 1)
    for (before, _), (time, tokens) in itertools.pairwise(events):
        gaps.extend([(time - before) / tokens] * tokens)
    return gaps


def _show(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) >= 100 else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else _printable(value)


def _finite(value: object) -> object:
    """`value` with null for what JSON cannot say: infinity and not-a-number."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _printable(text: str) -> str:
    # A server's error text ends up here: it must not steer the terminal.
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
