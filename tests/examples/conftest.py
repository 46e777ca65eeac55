from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the examples, which import from it as scripts do."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return EXAMPLES
