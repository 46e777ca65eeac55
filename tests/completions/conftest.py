from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lmcache_stream.completions import CompletionsClient
from lmcache_stream.testing.fake_engine import FakeEngine
from tests.completions.asking import in_use

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(model="tiny") as engine:
        yield engine


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[CompletionsClient]:
    """A client that closes at once what is left; `test_lingering` has another."""
    async with CompletionsClient(engine.base_url, model="tiny", linger=0) as client:
        yield client
        assert in_use(client) == 0
