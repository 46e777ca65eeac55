"""The page of faults and outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .outcome import Fault, Observation
from .table import FAULTS

PAGE = Path(__file__).with_name("README.md")

HEAD = """# What goes wrong, and what comes of it

{count} faults, each ordered end to end against the fakes of `lmcache_stream.testing`: a stream prefills, has its KV
edited and decodes, with the fault in one phase. KV travels over shared memory and as pickles: {shared} faults there,
{pickled} here. Behind each row stands that the stream went on to the right end: every token sent once and each as
without the fault, decoded from the edit; that the server held nothing afterwards but what the row says; and that no
segment, thread, connection or registration was left.

“Nothing changed” means that the stream is as it was before the call, which was then repeated with success. “Gone on
with”: the tokens that came were kept, and the rest was generated behind them. “Begun anew”: the edit itself was gone,
so the user has to start from the prompt. What the server keeps where an answer was lost, it takes back by itself
(locks after 300 s, reservations after 600 s).

This page is written by `python -m tests.faults`, from what it observed.
"""

SIDES = {
    "engine": "The engine",
    "cache": "The cache server",
    "network": "The network",
    "two at once": "Two at once",
    "batch": "One stream of a batch, or all of it",
}


def rendered(observed: Mapping[str, Observation]) -> str:
    """The page of what was observed of each fault, by its name."""
    parts = [
        HEAD.format(
            count=len(FAULTS),
            shared=sum("shared memory" in fault.transports for fault in FAULTS),
            pickled=sum("pickle" in fault.transports for fault in FAULTS),
        )
    ]
    for side, title in SIDES.items():
        parts.append(f"## {title}\n")
        parts.append("| in | fault | over | the user sees | afterwards |\n| --- | --- | --- | --- | --- |")
        parts[-1] += "".join(f"\n{row(fault, observed[fault.name])}" for fault in FAULTS if fault.side == side) + "\n"
    return "\n".join(parts)


def row(fault: Fault, seen: Observation) -> str:
    over = "both" if len(fault.transports) == 2 else fault.transports[0]
    return "| " + " | ".join([fault.phase, fault.name, over, seen.outcome, seen.afterwards]) + " |"
