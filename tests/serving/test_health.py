from __future__ import annotations

import pytest

from lmcache_stream import bodies
from lmcache_stream.errors import CacheError
from lmcache_stream.serving.health import answers_healthy, get_json
from tests.serving.endless import endless


async def test_an_answer_without_end() -> None:
    async with endless() as url:
        assert not await answers_healthy(f"{url}/health")
        with pytest.raises(CacheError, match=rf"^{url}/status answers more than {bodies.MOST_BYTES} bytes$"):
            await get_json(f"{url}/status")
