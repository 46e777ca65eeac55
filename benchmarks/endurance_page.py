"""Records what soaks, fuzzing, mutation testing, coverage and repeats came to, and writes README's table of it.

Each make target leaves what it found in `build/endurance`; what is there replaces what `endurance.json` had of it.

    make soak-real SOAK_MINUTES=30 && make fuzz mutation coverage repeats && make endurance
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import between_markers, machine, markdown_row

HERE = Path(__file__).parent
FOUND = HERE.parent / "build" / "endurance"
RESULTS, README = HERE / "endurance.json", HERE.parent / "README.md"
NAME = "endurance"
"""What its markers are called."""

SOAKS = {"soak-real": "a real vLLM and a real LMCache server", "soak": "the fakes"}
FUZZED = {"sse": "bytes of an engine", "wire": "frames of a cache server"}
LAST_OF_SOAK = ("seconds", "rounds", "streams", "tokens_checked", "wrong_tokens", "wrong_states", "left", "ok")


def of_soak(path: Path) -> dict[str, Any]:
    """What `soak.py --json` counted."""
    found = json.loads(path.read_text())
    counts = {name: sum(found[name].values()) for name in ("operations", "faults", "unexpected_errors")}
    kept = {name: found[name] for name in LAST_OF_SOAK}
    memory = {name: found["memory"][name] for name in ("slope_mib_per_minute", "growth_mib")}
    ran_out = {"ran_out": sum(found["ran_out"].values())} if "ran_out" in found else {}
    return {**kept, **counts, **memory, "kinds_of_faults": len(found["faults"]), **ran_out}


def of_fuzz(path: Path) -> dict[str, Any]:
    """The last line of libFuzzer, and whether it found anything."""
    text = path.read_text(errors="replace")
    done = re.findall(r"Done (\d+) runs in (\d+) second", text)
    crashes = len(re.findall(r"^SUMMARY: libFuzzer", text, re.MULTILINE))
    runs, seconds = map(int, done[-1]) if done else (0, 0)
    return {"runs": runs, "seconds": seconds, "findings": crashes}


def of_mutation(path: Path) -> dict[str, Any]:
    """mutmut's counts; one that ran out of time was noticed, too."""
    stats = json.loads(path.read_text())
    return {"mutants": stats["total"], "killed": stats["killed"] + stats["timeout"]}


def of_coverage(path: Path) -> dict[str, Any]:
    """coverage.py's totals: lines and branches, in percent."""
    found = json.loads(path.read_text())
    return {"percent": found["totals"]["percent_covered"], "files": len(found["files"])}


def of_repeats(folder: Path) -> list[dict[str, Any]]:
    """pytest's counts of each round."""
    rounds = []
    for path in sorted(folder.glob("repeats-*.xml")):
        suite = ElementTree.parse(path).getroot()[0].attrib
        failed = int(suite["failures"]) + int(suite["errors"])
        passed = int(suite["tests"]) - failed - int(suite["skipped"])
        rounds.append({"passed": passed, "failed": failed, "seconds": round(float(suite["time"]))})
    return rounds


def read(folder: Path) -> dict[str, Any]:
    """What lies in `build/endurance`."""
    found: dict[str, Any] = {}
    readers = {f"{name}.json": (name, of_soak) for name in SOAKS}
    readers |= {f"fuzz-{name}.log": (f"fuzz-{name}", of_fuzz) for name in FUZZED}
    readers |= {"mutation.json": ("mutation", of_mutation)}
    readers |= {f"{name}.json": (name, of_coverage) for name in ("coverage", "coverage-core")}
    for file, (name, reader) in readers.items():
        if (folder / file).exists():
            found[name] = reader(folder / file)
    if rounds := of_repeats(folder):
        found["repeats"] = rounds
    return found


def section(found: Mapping[str, Any]) -> str:
    """README's table."""
    lines = [markdown_row(("what", "how much", "found")), "|---|---|---|"]
    for name, where in SOAKS.items():
        if name in found:
            lines.append(
                markdown_row((f"streams in random faults, on {where} (`make {name}`)", *of_one_soak(found[name])))
            )
    for name, what in FUZZED.items():
        if fuzz := found.get(f"fuzz-{name}"):
            much = f"{fuzz['runs'] / 1e6:.1f} million runs in {fuzz['seconds'] / 60:.0f} minutes"
            lines.append(markdown_row((f"any {what} (`make fuzz`)", much, f"{fuzz['findings']} failures")))
    if "mutation" in found:
        mutation = found["mutation"]
        share = mutation["killed"] / mutation["mutants"]
        much = f"{mutation['mutants']:,} faults in `stream/`, `sse.py` and `codec.py`"
        lines.append(
            markdown_row(("faults put into the code (`make mutation`)", much, f"{100 * share:.1f} % noticed by a test"))
        )
    if {"coverage", "coverage-core"} <= found.keys():
        whole, core = found["coverage"], found["coverage-core"]
        much = f"the package; {core['files']} files that must not be wrong"
        taken = f"{whole['percent']:.1f} %; {core['percent']:.1f} % taken by tests"
        lines.append(markdown_row(("lines and branches (`make coverage`)", much, taken)))
    if rounds := found.get("repeats"):
        much = f"{len(rounds)} times in a row, {sum(one['seconds'] for one in rounds) / 60:.0f} minutes"
        passed = sum(one["passed"] for one in rounds)
        failed = sum(one["failed"] for one in rounds)
        what = "all tests that need no other server, in another order each time, two at a time (`make repeats`)"
        lines.append(markdown_row((what, much, f"{passed:,} passed, {failed} failed")))
    return "\n".join([*lines, "", f"On {found['machine']['cpu']}, {found['machine']['cores']} cores."])


def of_one_soak(soak: Mapping[str, Any]) -> tuple[str, str]:
    much = (
        f"{soak['seconds'] / 60:.0f} minutes: {soak['operations']:,} operations, {soak['faults']:,} faults of "
        f"{soak['kinds_of_faults']} kinds, {soak['tokens_checked']:,} tokens checked"
    )
    came_to = (
        f"{soak['wrong_tokens']} wrong tokens, {soak['wrong_states']} wrong states, {soak['unexpected_errors']} other "
        f"errors, {len(soak['left'])} things left behind; memory {soak['slope_mib_per_minute']:+.2f} MiB a minute, "
        f"{soak['growth_mib']:+.1f} in all"
    )
    if ran_out := soak.get("ran_out"):
        came_to += (
            f"; {ran_out} locks, whose release a broken connection swallowed, the server let go of by its own clock"
        )
    return much, came_to


def with_section(page: str, found: Mapping[str, Any]) -> str:
    """The page with the table between its markers."""
    return between_markers(page, NAME, section(found))


def main() -> None:
    had = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found = {**had, **read(FOUND), "machine": machine()}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    README.write_text(with_section(README.read_text(), found))


if __name__ == "__main__":
    main()
