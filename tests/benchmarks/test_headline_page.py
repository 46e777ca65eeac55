"""The page and README's picture show what `make headline` and `make quality` measured."""

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
def headline_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("headline_page")


@pytest.fixture
def overview(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("overview")


@pytest.fixture
def headline() -> Any:
    return json.loads((BENCHMARKS / "headline.json").read_text())


@pytest.fixture
def quality() -> Any:
    path = BENCHMARKS / "quality.json"
    if not path.exists():
        pytest.skip("quality.json is not in the sdist")
    return json.loads(path.read_text())


def test_the_page_shows_what_was_measured(headline_page: ModuleType, headline: Any) -> None:
    page = (BENCHMARKS / "README.md").read_text()
    assert page.count(f"<!-- {headline_page.NAME} -->") == page.count(f"<!-- end of {headline_page.NAME} -->") == 1
    assert headline_page.with_section(page, headline) == page
    headline["arms"][0]["arms"][0]["decode"] *= 2
    assert headline_page.with_section(page, headline) != page


def test_it_is_a_headline(headline: Any) -> None:
    assert headline["no_headline"] is None
    assert headline["edited"]["taken_from_cache"] == 1
    assert len(headline["arms"]) >= 3


def test_the_picture_shows_what_was_measured(overview: ModuleType, headline: Any, quality: Any, tmp_path: Path) -> None:
    same, kv, speed = overview.panels(quality, headline)
    [cell] = [cell for cell in quality["results"] if cell["variant"] == "streaming-llm/shared/0.5"]
    assert (same.all_kv, same.half) == (100, 100 * cell["agreement"]["true"]["mean"])
    assert 0.5 <= kv.half / kv.all_kv < 0.55
    assert speed.half / speed.all_kv == pytest.approx(headline["gain_with_edit"], rel=0.1)
    overview.draw([same, kv, speed], tmp_path / "overview.png")
    assert (tmp_path / "overview.png").stat().st_size > 10_000
    assert (BENCHMARKS / "overview.png").exists()
