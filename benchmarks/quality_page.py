"""Puts what `make quality` measured, in `quality.json`, between the markers of `README.md`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import between_markers, markdown_row

HERE = Path(__file__).parent
RESULTS, README = HERE / "quality.json", HERE / "README.md"
NAME = "quality"
"""What its markers are called."""


def section(found: dict[str, Any]) -> str:
    """Two tables in Markdown: what each variant keeps, and every comparison that is decided."""
    probe = found["plan"]["continuations"][0]
    groups = [task["group"] for task in found["tasks"] if task["counts"]]
    right = {(cell["variant"], cell["group"]): cell["accuracy"]["mean"] for cell in found["task_results"]}
    by_label = {variant["label"]: variant for variant in found["variants"]}
    lines = [
        markdown_row(["editor", "scope", "kept", "NLL against all KV", "same top token", *groups]),
        "|---|---|--:|--:|--:|" + "--:|" * len(groups),
        markdown_row(["all KV", "", "100 %", "", "", *(f"{task['accuracy']['mean']:.2f}" for task in found["tasks"])]),
    ]
    for cell in found["results"]:
        variant, nll = by_label[cell["variant"]], cell["nll"][probe]
        answers = [f"{right[cell['variant'], group]:.2f}" for group in groups]
        change = f"{nll['mean']:+.3f} ± {(nll['high'] - nll['low']) / 2:.3f}"
        same = f"{cell['agreement'][probe]['mean']:.0%}".replace("%", " %")
        kept = f"{cell['kept']:.0%}".replace("%", " %")
        lines.append(markdown_row([variant["method"], variant["scope"], kept, change, same, *answers]))
    decided = [one for one in found["comparisons"] if one["verdict"] != "undetermined"]
    lines += [
        "",
        markdown_row(["decided", "against", "on", "difference", "p after Holm", "it is"]),
        "|---|---|---|--:|--:|---|",
        *(markdown_row(_compared(one)) for one in decided),
        "",
        f"The other {len(found['comparisons']) - len(decided)} of {len(found['comparisons'])} are undetermined.",
        f"{found['statistics']}  ",
        f"{samples(found)}; {', '.join(f'{name} {value}' for name, value in found['conditions'].items())}; "
        f"{found['made'][:10]}.",
    ]
    return "\n".join(lines)


def samples(found: dict[str, Any]) -> str:
    """How many samples there were."""
    texts = sum(sample["group"] == "text" for sample in found["samples"])
    return f"{texts} texts of {found['corpus']['about']}, {found['plan']['task_samples']} questions a task and form"


def with_section(readme: str, found: dict[str, Any]) -> str:
    """The page with the tables of `found`."""
    return between_markers(readme, NAME, section(found))


def _compared(one: dict[str, Any]) -> list[str]:
    difference = one["difference"]
    half = (difference["high"] - difference["low"]) / 2
    p = f"{one['p_holm']:.3f}" if one["p_holm"] >= 0.001 else "< 0.001"
    return [one["variant"], one["against"], one["group"], f"{difference['mean']:+.3f} ± {half:.3f}", p, one["verdict"]]


def main() -> None:
    README.write_text(with_section(README.read_text(), json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
