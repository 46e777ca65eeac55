from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcache_stream.serving.doctor import limits
from tests.serving.doctor.stack import CONFIG


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ARRIVAL", 0.3)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that has a model's configuration."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)
