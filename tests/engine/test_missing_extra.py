from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lmcache_stream.engine import EmbeddedEngine, smollm2
from lmcache_stream.errors import UsageError
from lmcache_stream.testing.tiny import tiny_model


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for use in (
        lambda: EmbeddedEngine(tmp_path),
        lambda: tiny_model(tmp_path),
        lambda: smollm2.ensure_smollm2(tmp_path),
    ):
        with pytest.raises(UsageError, match=r"lmcache-stream\[engine\]"):
            use()
