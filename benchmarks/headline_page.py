"""Puts what `make headline` measured, in `headline.json`, between the markers of `README.md`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import between_markers, markdown_row
from headline import EDITED, Arm, Repeat

HERE = Path(__file__).parent
RESULTS, README = HERE / "headline.json", HERE / "README.md"
NAME = "headline"
"""What its markers are called."""

COLUMNS = (
    *("repeat", "arm", "decode s", "tokens/s", "with the edits", "at once", "preempted", "other programs' cores"),
    *("KV MB a request", "edit from cache", "gain", "with the edits"),
)


def section(found: Mapping[str, Any]) -> str:
    """A table of all arms, and the medians."""
    workload = found["workload"]
    megabytes = workload["kv_bytes"] / workload["kv_tokens"] / workload["prompts"] / 1e6
    lines = [markdown_row(COLUMNS), "|---|---|" + "--:|" * (len(COLUMNS) - 2)]
    for number, repeat in enumerate(map(repeat_of, found["arms"]), start=1):
        for arm in repeat.arms:
            edited = arm.name == EDITED
            lines.append(
                markdown_row(
                    [
                        number,
                        arm.name,
                        f"{arm.decode:.1f}",
                        f"{arm.tput:.1f}",
                        f"{arm.tput_with_edit:.1f}" if edited else "",
                        f"{arm.running:.1f}",
                        arm.preemptions,
                        f"{arm.others:.2f}",
                        f"{arm.kv_tokens * megabytes:.1f}",
                        f"{100 * arm.taken / arm.cached:.0f} %" if edited else "",
                        f"{repeat.gain:.2f}" if edited else "",
                        f"{repeat.gain_with_edit:.2f}" if edited else "",
                    ]
                )
            )
    machine = found["machine"]
    return "\n".join(
        [
            *lines,
            "",
            f"Medians of {len(found['arms'])}: **{found['gain']:.2f}** times the decode throughput, "
            f"**{found['gain_with_edit']:.2f}** with the time of the edits. "
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Python {machine['python']}.",
        ]
    )


def repeat_of(saved: Mapping[str, Any]) -> Repeat:
    """A repeat as it was measured."""
    return Repeat(saved["prefill"], tuple(Arm(**arm) for arm in saved["arms"]))


def with_section(readme: str, found: Mapping[str, Any]) -> str:
    """The page with the table of `found`."""
    return between_markers(readme, NAME, section(found))


def main() -> None:
    README.write_text(with_section(README.read_text(), json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
