"""Fixtures for pytest: fakes and a proxy on free ports of 127.0.0.1, gone when the test ends.

They run in threads of their own, so that they serve async tests of any plugin, and plain ones. Nothing of this package
is imported before a test uses one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lmcache_stream.geometry import KVGeometry
    from lmcache_stream.testing.fake_cache_server import FakeCacheServer
    from lmcache_stream.testing.fake_engine import FakeEngine
    from lmcache_stream.testing.proxy import TcpProxy

__all__ = ["fake_cache_server", "fake_engine", "kv_geometry", "offloading_engine", "tcp_proxy", "tiny_model_path"]

_TRANSPORTS = {"shared memory": True, "pickle": False}


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers."""
    config.addinivalue_line(
        "markers", "fake_engine(**options): arguments of the FakeEngine of `fake_engine` and `offloading_engine`"
    )
    config.addinivalue_line(
        "markers", "fake_cache_server(**options): arguments of the FakeCacheServer of `fake_cache_server`"
    )


@pytest.fixture
def fake_engine(request: pytest.FixtureRequest) -> Iterator[FakeEngine]:
    """An engine that answers `/v1/completions` with what it is told to.

    `@pytest.mark.fake_engine(model="m")` gives arguments. `fake_engine.script(Reply(...))` queues answers and faults.
    """
    from lmcache_stream.testing.fake_engine import FakeEngine

    with FakeEngine(**_options(request, "fake_engine")) as engine:
        yield engine


@pytest.fixture
def fake_cache_server(request: pytest.FixtureRequest) -> Iterator[FakeCacheServer]:
    """A cache server: connect to its `url` and `http_url`.

    `@pytest.mark.fake_cache_server(chunk_size=16)` gives arguments. For both ways that KV may travel:
    `@pytest.mark.parametrize("fake_cache_server", ["shared memory", "pickle"], indirect=True)`.
    """
    from lmcache_stream.testing.fake_cache_server import FakeCacheServer

    options = _options(request, "fake_cache_server")
    transport = getattr(request, "param", None)
    if transport is not None:
        if transport not in _TRANSPORTS:
            pytest.fail(f'fake_cache_server goes over "shared memory" or "pickle", not {transport!r}', pytrace=False)
        options["shared_memory"] = _TRANSPORTS[transport]
    with FakeCacheServer(**options) as server:
        yield server


@pytest.fixture
def kv_geometry() -> KVGeometry:
    """Shape of the KV of the `offloading_engine`; override it to have another."""
    import torch

    from lmcache_stream.geometry import KVGeometry

    return KVGeometry(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32)


@pytest.fixture
def offloading_engine(
    request: pytest.FixtureRequest, fake_cache_server: FakeCacheServer, kv_geometry: KVGeometry
) -> Iterator[FakeEngine]:
    """A `fake_engine` that offloads the KV of its prompts to `fake_cache_server`, which knows its model.

    Connect with `aconnect(fake_cache_server.url, fake_cache_server.http_url, geometry=kv_geometry)`; prefill, modify
    and decode then go as with real servers.
    """
    from lmcache_stream.testing.fake_engine import FakeEngine

    with FakeEngine(**_options(request, "fake_engine"), cache=fake_cache_server) as engine:
        fake_cache_server.serve(engine.model, kv_geometry)
        yield engine


@pytest.fixture
def tcp_proxy() -> Iterator[Callable[[str], TcpProxy]]:
    """Puts a proxy before a server: `proxy = tcp_proxy(server_url)`; connect to `proxy.url`.

    `proxy.up` and `proxy.down` delay, throttle, hold and cut.
    """
    from contextlib import ExitStack

    from lmcache_stream.testing.proxy import TcpProxy

    with ExitStack() as proxies:
        yield lambda target: proxies.enter_context(TcpProxy(target))


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model and its tokenizer, for `EmbeddedEngine`; it needs the extra `engine`."""
    from lmcache_stream.testing.tiny import tiny_model

    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def _options(request: pytest.FixtureRequest, marker: str) -> dict[str, Any]:
    given = request.node.get_closest_marker(marker)
    return dict(given.kwargs) if given is not None else {}
