"""The real servers: four stacks, of which one runs at a time, and cache servers of their own.

Everything here is skipped unless LMCACHE_STREAM_REAL_PYTHON names an interpreter that has vLLM and LMCache.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from lmcache_stream import portal
from lmcache_stream.errors import LMCacheError
from lmcache_stream.serving.options import PYTHON_VARIABLE, CacheOptions, StackOptions
from lmcache_stream.serving.up import CacheServer, ServingStack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STACKS = ("A", "B", "C", "D")
"""A: SmolLM2, float32, ZMQ, shared memory. B: tiny, float32, two ranks. C: tiny, bfloat16, the cache server pulls the
KV, prefix caching, pickled for clients. D: tiny, float32, gRPC end to end, prefix caching."""

TIMEOUT = 420
"""Seconds a test may take, the start of its stack included."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here, and order it so that each stack is started once."""
    here = [index for index, item in enumerate(items) if item.nodeid.startswith("tests/real/")]
    for item, index in zip(sorted((items[index] for index in here), key=stack_of), here, strict=True):
        item.add_marker(pytest.mark.real)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT))
        items[index] = item


def stack_of(item: pytest.Item) -> str:
    """The name of the stack that a test runs on; empty, so first, without one."""
    assert isinstance(item, pytest.Function)
    if hasattr(item, "callspec") and item.callspec.params.get("stack") in STACKS:
        return str(item.callspec.params["stack"])
    return next((name for name in STACKS if f"stack_{name.lower()}" in item.fixturenames), "")


class Stacks:
    """Starts a stack when it is asked for and stops the one before it."""

    def __init__(self, options: Callable[[str], StackOptions]) -> None:
        self.options = options
        self.name = ""
        self.running: ServingStack | None = None
        self.failed: dict[str, LMCacheError] = {}

    def get(self, name: str) -> ServingStack:
        if name in self.failed:
            raise self.failed[name]
        if self.running is None or self.name != name:
            self.stop()
            stack = ServingStack(self.options(name))
            try:
                portal.run(stack.start)
            except LMCacheError as error:
                self.failed[name] = error
                raise
            self.name, self.running = name, stack
        portal.run(self.running.check)
        return self.running

    def stop(self) -> None:
        if self.running is not None:
            stack, self.running = self.running, None
            portal.run(stack.stop)


@pytest.fixture(scope="session")
def real_python() -> str:
    """The interpreter that has the real servers."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        pytest.skip(f"no real servers: {PYTHON_VARIABLE} is not set (make test-real)")
    return python


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    from lmcache_stream.engine.smollm2 import ensure_smollm2

    return ensure_smollm2()


@pytest.fixture(scope="session")
def stacks(
    real_python: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stacks]:
    def options(name: str) -> StackOptions:
        special: dict[str, dict[str, Any]] = {
            "A": {"dtype": "float32", "prefix_caching": False, "l1_gib": 2.0, "max_model_len": 4096},
            "B": {"dtype": "float32", "prefix_caching": False, "tensor_parallel_size": 2},
            "C": {"dtype": "bfloat16", "lmcache_driven": True, "shared_memory": False},
            "D": {"dtype": "float32", "transport": "grpc"},
        }
        model: Path = request.getfixturevalue("smollm2_path" if name == "A" else "tiny_model_path")
        logs = tmp_path_factory.mktemp(f"stack-{name}-")
        common: dict[str, Any] = {"python": real_python, "log_dir": logs, "l1_gib": 1.0, "kv_gib": 1.0, "device": "cpu"}
        return StackOptions(**{"model": model, **common, **special[name]})

    stacks = Stacks(options)
    try:
        yield stacks
    finally:
        stacks.stop()


@pytest.fixture
def stack(stacks: Stacks, request: pytest.FixtureRequest) -> ServingStack:
    """The stack that the parameter names: `@pytest.mark.parametrize("stack", STACKS, indirect=True)`."""
    return stacks.get(request.param)


@pytest.fixture
def stack_a(stacks: Stacks) -> ServingStack:
    """SmolLM2, float32, ZMQ, shared memory."""
    return stacks.get("A")


@pytest.fixture
def stack_b(stacks: Stacks) -> ServingStack:
    """The tiny model, float32, two ranks."""
    return stacks.get("B")


@pytest.fixture
def stack_c(stacks: Stacks) -> ServingStack:
    """The tiny model, bfloat16, lmcache-driven, prefix caching, pickled for clients."""
    return stacks.get("C")


@pytest.fixture
def stack_d(stacks: Stacks) -> ServingStack:
    """The tiny model, float32, gRPC end to end, prefix caching."""
    return stacks.get("D")


class CacheServers:
    """Cache servers without an engine, one for each set of options, shared between tests."""

    def __init__(self, python: str, logs: Callable[[], Path]) -> None:
        self.python = python
        self.logs = logs
        self.running: dict[tuple[tuple[str, Any], ...], CacheServer] = {}

    def get(self, **options: Any) -> CacheServer:
        key = tuple(sorted(options.items()))
        if key not in self.running or not self.running[key].process.running:
            given = {"l1_gib": 0.25, "python": self.python, "log_dir": self.logs(), **options}
            server = CacheServer(CacheOptions(**given))
            portal.run(server.start)
            self.running[key] = server
        return self.running[key]

    def stop(self) -> None:
        for server in self.running.values():
            portal.run(server.stop)
        self.running.clear()


@pytest.fixture(scope="session")
def cache_servers(real_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServers]:
    servers = CacheServers(real_python, lambda: tmp_path_factory.mktemp("cache-"))
    try:
        yield servers
    finally:
        servers.stop()


@pytest.fixture
def cache_server(cache_servers: CacheServers, request: pytest.FixtureRequest) -> CacheServer:
    """A shared cache server without an engine: 0.25 GiB, chunks of 32; an indirect parameter is a dict of options.

    A test that kills or restarts one makes its own: `async with CacheServer(CacheOptions(l1_gib=0.25)) as server`.
    """
    return cache_servers.get(**getattr(request, "param", {}))
