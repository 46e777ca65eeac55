"""README shows what soaks, fuzzing, mutation testing, coverage and repeats came to, and they came to what was asked."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
SOAK = {
    "seconds": 60.0,
    "rounds": 2,
    "streams": 3,
    "tokens_checked": 5,
    "wrong_tokens": 0,
    "wrong_states": 0,
    "left": [],
    "ok": True,
    "operations": {"modify": 3, "generate": 4},
    "faults": {"late": 2},
    "unexpected_errors": {},
    "memory": {"slope_mib_per_minute": 0.5, "growth_mib": 1.0, "samples": []},
}


@pytest.fixture
def endurance_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("endurance_page")


@pytest.fixture
def recorded() -> Any:
    return json.loads((ROOT / "benchmarks" / "endurance.json").read_text())


def test_the_page_shows_what_was_found(endurance_page: ModuleType, recorded: Any) -> None:
    page = (ROOT / "README.md").read_text()
    assert page.count(f"<!-- {endurance_page.NAME} -->") == page.count(f"<!-- end of {endurance_page.NAME} -->") == 1
    assert endurance_page.with_section(page, recorded) == page
    recorded["mutation"]["killed"] //= 2
    assert endurance_page.with_section(page, recorded) != page


def test_what_was_found_is_good_enough(recorded: Any) -> None:
    for name, minutes in {"soak-real": 30, "soak": 10}.items():
        soak = recorded[name]
        assert soak["ok"]
        assert soak["seconds"] >= 60 * minutes
    assert all(
        fuzz["seconds"] >= 600 and not fuzz["findings"] for fuzz in (recorded["fuzz-sse"], recorded["fuzz-wire"])
    )
    assert recorded["mutation"]["killed"] >= 0.85 * recorded["mutation"]["mutants"]
    assert recorded["coverage"]["percent"] >= 95
    assert recorded["coverage-core"]["percent"] == 100
    assert [one["failed"] for one in recorded["repeats"]] == [0] * 5
    assert all(one["passed"] >= 4000 for one in recorded["repeats"])


def test_what_the_targets_leave_is_read(endurance_page: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "soak.json").write_text(json.dumps(SOAK))
    (tmp_path / "fuzz-sse.log").write_text("#2 INITED\nDone 1200000 runs in 601 second(s)\n")
    (tmp_path / "fuzz-wire.log").write_text(
        "==1== ERROR: libFuzzer: out-of-memory\nSUMMARY: libFuzzer: out-of-memory\n"
    )
    (tmp_path / "mutation.json").write_text('{"total": 10, "killed": 8, "timeout": 1, "survived": 1}')
    for name in ("coverage", "coverage-core"):
        (tmp_path / f"{name}.json").write_text('{"totals": {"percent_covered": 97.0}, "files": {"a.py": {}}}')
    (tmp_path / "repeats-1.xml").write_text(
        '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2" time="61.4" /></testsuites>'
    )
    found = endurance_page.read(tmp_path)
    assert "ran out" not in endurance_page.section(found | {"machine": {"cpu": "a", "cores": 1}})
    (tmp_path / "soak.json").write_text(json.dumps(SOAK | {"ran_out": {"read_locked_count": 3}}))
    assert "; 3 locks" in endurance_page.section(endurance_page.read(tmp_path) | {"machine": {"cpu": "a", "cores": 1}})
    assert found["soak"] | {"operations": 7, "faults": 2, "kinds_of_faults": 1, "growth_mib": 1.0} == found["soak"]
    assert found["fuzz-sse"] == {"runs": 1_200_000, "seconds": 601, "findings": 0}
    assert found["fuzz-wire"] == {"runs": 0, "seconds": 0, "findings": 1}
    assert found["mutation"] == {"mutants": 10, "killed": 9}
    assert found["coverage"] == {"percent": 97.0, "files": 1}
    assert found["repeats"] == [{"passed": 5, "failed": 2, "seconds": 61}]
    table = endurance_page.section({**found, "machine": {"cpu": "a CPU", "cores": 2}})
    assert "7 operations, 2 faults of 1 kinds, 5 tokens checked | 0 wrong tokens" in table
    assert "90.0 % noticed by a test" in table
    assert "1.2 million runs in 10 minutes | 0 failures" in table
