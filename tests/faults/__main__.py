"""Run every fault and write the page of what was observed: `python -m tests.faults`."""

from __future__ import annotations

import sys
import traceback

from .outcome import Observation
from .page import PAGE, rendered
from .runs import run_all
from .table import FAULTS


def main() -> int:
    observed: dict[str, Observation] = {}
    failed = 0
    results = run_all((fault, transport) for fault in FAULTS for transport in fault.transports)
    for (name, transport), seen in results.items():
        if isinstance(seen, BaseException):
            failed += 1
            sys.stderr.write(f"\n{name} over {transport}:\n{''.join(traceback.format_exception(seen))}")
        elif observed.setdefault(name, seen) != seen:
            failed += 1
            sys.stderr.write(f"\n{name}: {seen} over {transport}, but {observed[name]} over the other\n")
    if failed:
        sys.stderr.write(f"{failed} of {len(results)} were not as they must be; {PAGE} is left as it was\n")
        return 1
    PAGE.write_text(rendered(observed))
    sys.stdout.write(f"{len(FAULTS)} faults, {len(results)} runs, all as they must be: {PAGE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
