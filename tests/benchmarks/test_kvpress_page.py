"""The pages show what `make kvpress` measured."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def kvpress_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("kvpress_page")


@pytest.fixture
def found() -> Any:
    return json.loads((BENCHMARKS / "quality_vs_kvpress.json").read_text())


def test_the_pages_show_what_was_measured(kvpress_page: ModuleType, found: Any) -> None:
    for path, section in kvpress_page.PAGES.items():
        page = path.read_text()
        assert page.count(f"<!-- {kvpress_page.NAME} -->") == page.count(f"<!-- end of {kvpress_page.NAME} -->") == 1
        assert kvpress_page.with_section(page, section(found)) == page
    found["rows"][0]["difference"]["mean"] += 0.1
    for path, section in kvpress_page.PAGES.items():
        assert kvpress_page.with_section(path.read_text(), section(found)) != path.read_text()


def test_kept_sets_agree(found: Any) -> None:
    for row in found["rows"]:
        if row["kept_sets"] != "differ by design":
            assert row["same_rule_lowest_head"] >= 0.95, row["method"]
