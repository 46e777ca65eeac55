from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from lmcache_stream.testing.tiny import tiny_model
from tests.bench.offloading import CHUNK, OffloadingEngine, geometry_of


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose configuration and tokenizer an `OffloadingEngine` pretends to serve."""
    folder = tmp_path_factory.mktemp("models") / "small"
    return tiny_model(folder, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32)


@pytest.fixture
def cache_server(small_model: Path) -> Iterator[FakeCacheServer]:
    with FakeCacheServer(chunk_size=CHUNK, pool_bytes=32 << 20) as server:
        server.serve(str(small_model), geometry_of(small_model))
        yield server


@pytest.fixture
def offloading_engine(cache_server: FakeCacheServer, small_model: Path) -> Iterator[OffloadingEngine]:
    with OffloadingEngine(cache_server, geometry_of(small_model), str(small_model)) as engine:
        yield engine
