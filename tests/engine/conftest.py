from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_stream.engine import EmbeddedEngine


@pytest.fixture(scope="package")
def engine(tiny_model_path: Path) -> Iterator[EmbeddedEngine]:
    """The tiny model, served from the background loop."""
    with EmbeddedEngine(tiny_model_path, cache="memory://tests-engine", prefill_tokens=128) as running:
        yield running
