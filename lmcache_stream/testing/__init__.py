"""Fakes that ship, for tests of code that uses this package, and their pytest fixtures (`plugin`).

A name is imported when it is first used: whoever has the package installed should not wait for it in every pytest run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_stream.testing.fake_cache_server import FakeCacheServer, Fault, FaultKind
    from lmcache_stream.testing.fake_engine import End, FakeEngine, RecordedRequest, Reply
    from lmcache_stream.testing.proxy import TcpProxy

__all__ = ["End", "FakeCacheServer", "FakeEngine", "Fault", "FaultKind", "RecordedRequest", "Reply", "TcpProxy"]

_MODULES = {
    "End": "fake_engine",
    "FakeCacheServer": "fake_cache_server",
    "FakeEngine": "fake_engine",
    "Fault": "fake_cache_server",
    "FaultKind": "fake_cache_server",
    "RecordedRequest": "fake_engine",
    "Reply": "fake_engine",
    "TcpProxy": "proxy",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
