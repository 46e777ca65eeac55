"""Fakes that ship, for tests of code that uses this package."""

from __future__ import annotations

from lmcache_stream.testing.fake_engine import End, FakeEngine, RecordedRequest, Reply

__all__ = ["End", "FakeEngine", "RecordedRequest", "Reply"]
