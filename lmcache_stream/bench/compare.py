"""`lmcache-stream bench compare`: two results side by side."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.table import Table
from rich.text import Text

from lmcache_stream.bench.quality_lines import read_quality
from lmcache_stream.bench.result_file import read_result, write_result
from lmcache_stream.console import add_json_flag, open_console
from lmcache_stream.errors import UsageError

__all__ = ["Row", "add_arguments", "compare", "run"]

NORMAL_95: Final = 1.959963984540054
WIDE: Final = 80
"""Columns that a table takes with a column of its own for intervals."""

FIGURES: Final = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "total_input_tokens": "Input tokens",
    "total_output_tokens": "Generated tokens",
    "duration": "Duration (s)",
    "request_throughput": "Request throughput (req/s)",
    "request_goodput": "Request goodput (req/s)",
    "output_throughput": "Output throughput (tok/s)",
    "total_token_throughput": "Total throughput (tok/s)",
}
LATENCIES: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


@dataclass(frozen=True)
class Row:
    """One figure of both results.

    Args:
        label: What it is.
        first: In the first result.
        second: In the second one.
        ratio: The second over the first; None where there is none.
        interval: Bounds of the ratio, at 95 %; None where the results do not tell.
    """

    label: str
    first: float
    second: float
    ratio: float | None
    interval: tuple[float, float] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `lmcache-stream bench compare` takes."""
    parser.description = (
        "Show two results of `bench serve`, or of `vllm bench serve`, side by side. Ratios are the second over the\n"
        "first. The intervals of mean TTFT, TPOT and E2EL, at 95 %, take the requests of a run for independent: they\n"
        "hold for these runs, not for what another day would bring."
    )
    parser.add_argument("first", type=Path, metavar="A.json", help="a result")
    parser.add_argument("second", type=Path, metavar="B.json", help="what to compare with it")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write both as one HTML page")
    parser.add_argument(
        "--quality", type=Path, metavar="FILE", help="what bench quality --json wrote, to be drawn into that page"
    )
    add_json_flag(parser)


def run(options: argparse.Namespace) -> None:
    """Run `lmcache-stream bench compare`."""
    from lmcache_stream.bench.report import render_report

    if options.quality is not None and options.html is None:
        raise UsageError("--quality goes into the page of --html: name a file for it")
    quality = read_quality(options.quality) if options.quality is not None else None
    first, second = (read_result(path)[0] for path in (options.first, options.second))
    names = [options.first.name, options.second.name]
    if names[0] == names[1]:
        names = [str(options.first), str(options.second)]
    rows = compare(first, second)
    if options.json is not None:
        options.json.write({"first": names[0], "second": names[1], "rows": [asdict(row) for row in rows]})
    else:
        _show(names, rows)
    if options.html is not None:
        write_result(options.html, render_report(list(zip(names, (first, second), strict=True)), quality))


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Row]:
    """The figures that both results have, with ratios and, for means over requests, their intervals."""
    rows = [
        _row(label, first[key], second[key]) for key, label in FIGURES.items() if _has(first, key) and _has(second, key)
    ]
    for metric, label in LATENCIES.items():
        for key in (key for key in first if key.split("_", 1)[-1] == f"{metric}_ms" and _has(second, key)):
            statistic = key.split("_", 1)[0]
            if statistic == "std" or not _has(first, key):
                continue
            interval = _interval(metric, first, second) if statistic == "mean" and metric != "itl" else None
            rows.append(_row(f"{label} {statistic} (ms)", first[key], second[key], interval))
    ours = [result.get("lmcache_stream") or {} for result in (first, second)]
    for name, label in (("kept_ratio", "Kept ratio"), ("edit_time", "Edit time (s)"), ("bytes_moved", "Bytes moved")):
        if all(one.get(name) is not None for one in ours):
            rows.append(_row(label, ours[0][name], ours[1][name]))
    later = [one.get("edits_while_decoding") or {} for one in ours]
    for name, label in (("completed", "Edits while decoding"), ("seconds", "Time of edits while decoding (s)")):
        if all(name in one for one in later):
            rows.append(_row(label, later[0][name], later[1][name]))
    with_edit = [one.get("with_edit_time") for one in ours]
    if any(one.get("editor") for one in ours) and all(with_edit):
        rows.append(
            _row("Output throughput with edit time", *(one["output_tokens"] for one in with_edit if one is not None))
        )
    return rows


def _has(result: Mapping[str, Any], key: str) -> bool:
    return isinstance(result.get(key), int | float)


def _row(label: str, first: float, second: float, interval: tuple[float, float] | None = None) -> Row:
    return Row(label, first, second, second / first if first else None, interval)


def _interval(metric: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[float, float] | None:
    """Of the ratio of two means, by the delta method on its logarithm."""
    spread = 0.0
    means = []
    for result in (first, second):
        middle, std, count = (result.get(key) for key in (f"mean_{metric}_ms", f"std_{metric}_ms", "completed"))
        if not middle or std is None or not count or count < 2:
            return None
        means.append(middle)
        spread += (std / middle) ** 2 / (count - 1)
    ratio = means[1] / means[0]
    factor = math.exp(NORMAL_95 * math.sqrt(spread))
    return ratio / factor, ratio * factor


def _show(names: list[str], rows: list[Row]) -> None:
    console = open_console()
    for letter, name in zip("AB", names, strict=True):
        console.print(Text(f"{letter}  {name}"))
    table = Table(box=box.ROUNDED)
    wide = console.width >= WIDE
    for heading in ("", "A", "B", *(("B / A", "95 %") if wide else ("B / A\n95 %",))):
        table.add_column(
            heading, justify="right" if heading else "left", overflow="fold", no_wrap=heading in ("A", "B")
        )
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        interval = "-" if row.interval is None else f"{row.interval[0]:.3f} to {row.interval[1]:.3f}"
        of_both = [ratio, interval] if wide else [f"{ratio}\n{interval}" if row.interval else ratio]
        table.add_row(Text(row.label), _number(row.first), _number(row.second), *of_both)
    console.print(table)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"
