"""Runs every benchmark, writes `results.json` and puts its tables between the markers of `README.md`.

A script that needs what is not here is left out, with the reason; what an earlier run, perhaps on another machine,
found stays. Every result has its own command, machine and date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import between_markers, markdown_row

HERE = Path(__file__).parent
RESULTS, README = HERE / "results.json", HERE / "README.md"
REAL_PYTHON = "LMCACHE_STREAM_REAL_PYTHON"
REAL_VENV = HERE.parent / ".venv-real" / "bin" / "python"

SCRIPTS: dict[str, str] = {
    "bench_sse.py": "--repeats 2 --mode burst --mode single --streams 256",
    "bench_batch.py": "--repeats 2 --streams 10 --streams 1000 --threads 256",
    "bench_portal.py": "--repeats 2 --count 1000",
    "bench_rpc.py": "--repeats 2 --calls 500",
    "bench_kv.py": "--repeats 2 --no-pickle",
    "bench_editors.py": "--repeats 2 --tokens 2048 --slow-tokens 512",
    "bench_cuda_lanes.py": "--repeats 2 --streams 8",
}
"""The scripts in the order in which they run, and the options of a quick run."""


@dataclass(frozen=True)
class Outcome:
    """What became of one script: its last line, or why there is none."""

    result: dict[str, Any] | None = None
    left_out: str | None = None
    failed: str | None = None


def run(script: Path, options: Sequence[str] = ()) -> Outcome:
    """Runs a script, shows what it prints and reads the object in its last line."""
    environment = dict(os.environ)
    if REAL_PYTHON not in environment and REAL_VENV.exists():
        environment[REAL_PYTHON] = str(REAL_VENV)
    command = [sys.executable, str(script), "--json", *options]
    found, last = None, ""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                continue
            print(line, end="", flush=True)
            last = line.strip() or last
    if process.returncode != 0 or found is None:
        return Outcome(failed=last or f"exit code {process.returncode}")
    if "skipped" in found:
        return Outcome(left_out=found["skipped"])
    return Outcome(result=found)


def merged(before: Mapping[str, Any], outcomes: Mapping[str, Outcome], date: str) -> dict[str, Any]:
    """The results so far, with those that are new in place of theirs."""
    results = dict(before["results"])
    left_out = {name: reason for name, reason in before["left_out"].items() if name not in outcomes}
    for name, outcome in outcomes.items():
        if outcome.result is not None:
            results[name] = {"date": date, **outcome.result}
        elif name not in results:
            left_out[name] = outcome.left_out or f"it failed: {outcome.failed}"
    order = {name: index for index, name in enumerate(SCRIPTS)}
    return {
        "results": {name: results[name] for name in sorted(results, key=lambda name: order.get(name, len(order)))},
        "left_out": left_out,
    }


def table(result: Mapping[str, Any]) -> str:
    """A result as Markdown: its table, its notes, and how it came about."""
    rows: list[dict[str, Any]] = result["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row))
    numbers = [all(isinstance(row.get(name, 0), int | float | None) for row in rows) for name in names]
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines = [
        markdown_row(names),
        "|" + "|".join("--:" if number else "---" for number in numbers) + "|",
        *(markdown_row(cell(row.get(name)) for name in names) for row in rows),
        "",
        *(f"{note.rstrip('.')}.  " for note in result["notes"]),
        f"`{result['command']}`, medians of {result['repeats']} interleaved rounds, {result['date'][:10]}; "
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}, "
        f"Python {machine['python']}, {versions}.",
    ]
    return "\n".join(lines)


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", r"\|")


def with_tables(readme: str, results: Mapping[str, Any]) -> str:
    """The page with a table between `<!-- NAME -->` and `<!-- end of NAME -->`, for each script that has a result."""
    tables = {name: table(result) for name, result in results["results"].items()}
    tables |= {name: f"Not measured: {reason}." for name, reason in results["left_out"].items()}
    for name, text in tables.items():
        readme = between_markers(readme, name, text)
    return readme


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="those to run, such as bench_sse.py; default: all")
    parser.add_argument("--quick", action="store_true", help="few repeats and small loads: minutes, and rough figures")
    parser.add_argument("--tables", action="store_true", help="only write the tables of the results that are there")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file with the results")
    parser.add_argument("--readme", type=Path, default=README, help="the page with the markers")
    args = parser.parse_args()
    if unknown := [name for name in args.scripts if name not in SCRIPTS]:
        parser.error(f"no such script: {', '.join(unknown)}; there are {', '.join(SCRIPTS)}")

    results = json.loads(args.results.read_text()) if args.results.exists() else {"results": {}, "left_out": {}}
    failed = {}
    for name in () if args.tables else args.scripts or SCRIPTS:
        print(f"\n{name}", flush=True)
        begin = time.monotonic()
        outcome = run(HERE / name, SCRIPTS[name].split() if args.quick else ())
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        results = merged(results, {name: outcome}, date)
        args.results.write_text(json.dumps(results, indent=1) + "\n")
        if outcome.failed is not None:
            failed[name] = outcome.failed
        said = outcome.left_out or outcome.failed or "done"
        print(f"{name}: {said} ({time.monotonic() - begin:.0f} s)", flush=True)
    args.readme.write_text(with_tables(args.readme.read_text(), results))
    if failed:
        raise SystemExit("\n".join(f"{name} failed: {reason}" for name, reason in failed.items()))


if __name__ == "__main__":
    main()
