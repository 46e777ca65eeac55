from __future__ import annotations

from .outcome import Observation
from .page import PAGE, rendered
from .table import FAULTS


def test_the_page_has_every_fault_with_its_expected_outcome() -> None:
    expected = {fault.name: Observation(fault.expect.described(), fault.afterwards) for fault in FAULTS}
    assert PAGE.read_text() == rendered(expected), "run: python -m tests.faults"


def test_the_readme_counts_them() -> None:
    readme = PAGE.parents[2].joinpath("README.md").read_text()
    assert f"What {len(FAULTS)} ordered faults lead to" in readme
