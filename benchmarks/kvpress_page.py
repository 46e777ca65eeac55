"""Puts what `make kvpress` measured, in `quality_vs_kvpress.json`, between the markers of both `README.md`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from bench_quality_vs_kvpress import Row, cells, interval_cell
from common import between_markers, markdown_row

from lmcache_stream.bench.statistics import Interval

HERE = Path(__file__).parent
RESULTS = HERE / "quality_vs_kvpress.json"
NAME = "kvpress"
"""What its markers are called."""

COLUMNS = (
    *("method", "kept", "Jaccard", "ties by one rule", "all KV", "ours", "kvpress", "ours - kvpress"),
    *("same positions", "both re-rotated", "kept sets", "NLL"),
)
BY_DESIGN = "differ by design"


def every_case(found: Mapping[str, Any]) -> str:
    """The table of the benchmarks' page: a row for each method and ratio."""
    lines = [markdown_row(COLUMNS), "|---|--:|" + "--:|" * 8 + "---|---|"]
    lines += [markdown_row(cells(row)) for row in map(row_of, found["rows"])]
    return "\n".join([*lines, "", conditions(found)])


def every_method(found: Mapping[str, Any]) -> str:
    """README's table: a row for each method that means the same in both."""
    rows = [row for row in map(row_of, found["rows"]) if row.kept_sets != BY_DESIGN]
    keeps = list(dict.fromkeys(row.keep for row in rows))
    lines = [
        markdown_row(
            [
                "method",
                f"kept sets: Jaccard at {', '.join(map(str, keeps))}",
                *(f"NLL, ours - kvpress: at {keep}" for keep in keeps),
            ]
        ),
        "|---|---|" + "--:|" * len(keeps),
    ]
    for method, of_method in groupby(rows, key=lambda row: row.method):
        of_keeps = list(of_method)
        sets = ", ".join(f"{row.jaccard:.3f}" for row in of_keeps)
        lines.append(markdown_row([method, sets, *(interval_cell(row.difference) for row in of_keeps)]))
    return "\n".join([*lines, "", conditions(found)])


def conditions(found: Mapping[str, Any]) -> str:
    """What was measured, with what, and the verdicts in figures."""
    counts = ", ".join(f"{len(cases)} {verdict}" for verdict, cases in found["nll"].items())
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{found['texts']} texts; NLL: {counts}. {found['model']}, {found['tokens']}; {versions}."


def row_of(saved: Mapping[str, Any]) -> Row:
    """A row as it was measured."""
    intervals = {name: saved[name] and Interval(**saved[name]) for name in ("difference", "original", "rerotated")}
    return Row(**{**saved, **intervals})


def with_section(page: str, text: str) -> str:
    """The page with `text` between its markers."""
    return between_markers(page, NAME, text)


PAGES = {HERE / "README.md": every_case, HERE.parent / "README.md": every_method}


def main() -> None:
    found = json.loads(RESULTS.read_text())
    for path, section in PAGES.items():
        path.write_text(with_section(path.read_text(), section(found)))


if __name__ == "__main__":
    main()
