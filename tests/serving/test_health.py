from __future__ import annotations

import pytest

from lmcache_stream import bodies
from lmcache_stream.errors import CacheError
from lmcache_stream.serving import health
from lmcache_stream.serving.health import answers_healthy, get_json
from lmcache_stream.testing import FakeEngine, Reply
from tests.serving.endless import endless


async def test_an_answer_without_end() -> None:
    async with endless() as url:
        assert not await answers_healthy(f"{url}/health")
        with pytest.raises(CacheError, match=rf"^{url}/status answers more than {bodies.MOST_BYTES} bytes$"):
            await get_json(f"{url}/status")


async def test_no_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "ANSWER", 0.2)
    async with FakeEngine() as engine:
        engine.script(Reply(header_delay=60), Reply(header_delay=60), path="/health")
        assert not await answers_healthy(f"{engine.base_url}/health")
        with pytest.raises(CacheError, match=r"/health did not answer in time$"):
            await get_json(f"{engine.base_url}/health")
