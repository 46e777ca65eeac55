"""The page shows what `make quality` measured."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def quality_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("quality_page")


@pytest.mark.skipif(not (BENCHMARKS / "quality.json").exists(), reason="quality.json is not in the sdist")
def test_the_page_shows_what_was_measured(quality_page: ModuleType) -> None:
    page = (BENCHMARKS / "README.md").read_text()
    found = json.loads((BENCHMARKS / "quality.json").read_text())
    assert page.count(f"<!-- {quality_page.NAME} -->") == page.count(f"<!-- end of {quality_page.NAME} -->") == 1
    assert quality_page.with_section(page, found) == page
    found["results"][0]["nll"]["true"]["mean"] += 0.1
    assert quality_page.with_section(page, found) != page
