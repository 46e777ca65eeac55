from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcache_stream.serving.doctor import limits
from tests.serving.doctor.stack import CONFIG


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly wait for KV that never comes; KV that does may take longer on a busy machine."""
    monkeypatch.setattr(limits, "ARRIVAL", 0.3)


@pytest.fixture(autouse=True)
def no_address_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that has a model's configuration."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)
