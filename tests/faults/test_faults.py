"""Every fault, end to end, over each way that KV may travel."""

from __future__ import annotations

from collections import Counter

import pytest

from .outcome import Fault, Observation, Raises, Transport
from .runs import run_all
from .table import FAULTS

CASES = [(fault, transport) for fault in FAULTS for transport in fault.transports]
Observed = dict[tuple[str, Transport], Observation | BaseException]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Observed:
    """The faults of all tests that were selected, run side by side; nothing where pytest-xdist does that."""
    if hasattr(request.config, "workerinput"):
        return {}
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return run_all((item.callspec.params["fault"], item.callspec.params["transport"]) for item in items)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("fault", "transport"), CASES, ids=lambda value: getattr(value, "name", value))
def test_fault(outcomes: Observed, fault: Fault, transport: Transport) -> None:
    seen = (outcomes or run_all([(fault, transport)]))[fault.name, transport]
    if isinstance(seen, BaseException):
        raise seen
    assert seen == Observation(fault.expect.described(), fault.afterwards)


def test_faults_are_many_and_distinct() -> None:
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1
    for transport in ("shared memory", "pickle"):
        assert sum(transport in fault.transports for fault in FAULTS) >= 60
    assert {fault.side for fault in FAULTS} == {"engine", "cache", "network", "two at once", "batch"}
    assert {fault.phase for fault in FAULTS} == {"connect", "prefill", "modify", "decode"}


def test_an_error_says_what_went_wrong() -> None:
    mute = [fault.name for fault in FAULTS if isinstance(fault.expect, Raises) and not fault.expect.words]
    assert [name for name in mute if "cancelled" not in name] == []
