"""Puts what `make kvpress` measured, in `quality_vs_kvpress.json`, between the markers of both `README.md`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from common import markdown_row

HERE = Path(__file__).parent
RESULTS = HERE / "quality_vs_kvpress.json"
BEGIN, END = "<!-- kvpress -->", "<!-- end of kvpress -->"
COLUMNS = (
    *("method", "kept", "Jaccard", "ties by one rule", "all KV", "ours", "kvpress", "ours - kvpress"),
    *("same positions", "kept sets", "NLL"),
)
BY_DESIGN = "differ by design"


def every_case(found: Mapping[str, Any]) -> str:
    """The table of the benchmarks' page: a row for each method and ratio."""
    lines = [markdown_row(COLUMNS), "|---|--:|" + "--:|" * 7 + "---|---|"]
    lines += [
        markdown_row(
            [
                row["method"],
                row["keep"],
                f"{row['jaccard']:.3f} / {row['lowest_head']:.3f}",
                f"{row['same_rule']:.3f} / {row['same_rule_lowest_head']:.3f}",
                f"{row['full']:.3f}",
                f"{row['ours']:.3f}",
                f"{row['kvpress']:.3f}",
                interval(row["difference"]),
                interval(row["original"]),
                row["kept_sets"],
                row["nll"],
            ]
        )
        for row in found["rows"]
    ]
    return "\n".join([*lines, "", conditions(found)])


def every_method(found: Mapping[str, Any]) -> str:
    """README's table: a row for each method that means the same in both."""
    rows = [row for row in found["rows"] if row["kept_sets"] != BY_DESIGN]
    keeps = list(dict.fromkeys(row["keep"] for row in rows))
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
    for method, of_method in groupby(rows, key=lambda row: row["method"]):
        cells = list(of_method)
        sets = ", ".join(f"{row['jaccard']:.3f}" for row in cells)
        lines.append(markdown_row([method, sets, *(interval(row["difference"]) for row in cells)]))
    return "\n".join([*lines, "", conditions(found)])


def conditions(found: Mapping[str, Any]) -> str:
    """What was measured, with what, and the verdicts in figures."""
    counts = ", ".join(f"{len(cases)} {verdict}" for verdict, cases in found["nll"].items())
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{found['texts']} texts; NLL: {counts}. {found['model']}, {found['tokens']}; {versions}."


def interval(found: Mapping[str, Any] | None) -> str:
    """A mean and the half of its 95 % interval."""
    if found is None:
        return ""
    return f"{found['mean']:+.4f} ± {(found['high'] - found['low']) / 2:.4f}"


def with_section(page: str, text: str) -> str:
    """The page with `text` between its markers."""
    between = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    return between.sub(lambda _: f"{BEGIN}\n{text}\n{END}", page)


PAGES = {HERE / "README.md": every_case, HERE.parent / "README.md": every_method}


def main() -> None:
    found = json.loads(RESULTS.read_text())
    for path, section in PAGES.items():
        path.write_text(with_section(path.read_text(), section(found)))


if __name__ == "__main__":
    main()
