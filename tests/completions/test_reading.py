from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.client_proto import ResponseHandler

from lmcache_stream.completions import CompletionsClient
from lmcache_stream.completions.reading import read_arrived, unread
from lmcache_stream.testing.fake_engine import FakeEngine, Reply
from lmcache_stream.types import TokenEvent

if TYPE_CHECKING:
    from collections.abc import Callable


class Protocol(BaseProtocol):
    """What a body's reader wants of its connection."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.resumed = 0
        self.paused = False

    @property
    def connected(self) -> bool:
        return True

    def pause_reading(self) -> None:
        self._reading_paused = self.paused = True

    def resume_reading(self, resume_parser: bool = True) -> None:
        self._reading_paused = self.paused = False
        self.resumed += 1


class PublicOnly:
    """A reader as a version of aiohttp may make it that keeps its chunks otherwise."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self.read = content.read
        self.read_nowait = content.read_nowait
        self.exception = content.exception


WAYS: dict[str, Callable[[aiohttp.StreamReader], Any]] = {
    "with its buffer": lambda content: content,
    "public": PublicOnly,
}


def made(limit: int = 2**20) -> tuple[Protocol, aiohttp.StreamReader]:
    protocol = Protocol()
    return protocol, aiohttp.StreamReader(protocol, limit, loop=asyncio.get_running_loop())


def feed(content: aiohttp.StreamReader, *chunks: bytes) -> None:
    for chunk in chunks:
        content.begin_http_chunk_receiving()
        content.feed_data(chunk, len(chunk))
        content.end_http_chunk_receiving()


def numbered(count: int, size: int) -> list[bytes]:
    return [(b"%d-" % index * size)[:size] for index in range(count)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 100, 511, 512, 513, 5000])
@pytest.mark.parametrize("count", [1, 2, 6, 300])
async def test_all_that_arrived_comes_at_once_and_in_order(way: str, size: int, count: int) -> None:
    _, content = made(2**24)
    chunks = numbered(count, size)
    feed(content, *chunks)
    reader = WAYS[way](content)
    assert await read_arrived(reader) == b"".join(chunks)
    feed(content, b"more")
    assert await read_arrived(reader) == b"more"
    content.feed_eof()
    assert await read_arrived(reader) == b""


@pytest.mark.parametrize("way", WAYS)
async def test_it_waits_for_the_next_bytes(way: str) -> None:
    _, content = made()
    waiting = asyncio.create_task(read_arrived(WAYS[way](content)))
    await asyncio.sleep(0)
    assert not waiting.done()
    feed(content, *numbered(9, 200))
    assert await waiting == b"".join(numbered(9, 200))


@pytest.mark.parametrize("way", WAYS)
async def test_cancellation_loses_nothing(way: str) -> None:
    _, content = made()
    reader = WAYS[way](content)
    waiting = asyncio.create_task(read_arrived(reader))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    feed(content, *numbered(9, 200))
    assert await read_arrived(reader) == b"".join(numbered(9, 200))


@pytest.mark.parametrize("way", WAYS)
async def test_reading_lets_a_paused_connection_go_on(way: str) -> None:
    protocol, content = made(2**10)
    reader = WAYS[way](content)
    for _ in range(3):
        feed(content, *numbered(30, 300))
        assert protocol.paused
        assert await read_arrived(reader) == b"".join(numbered(30, 300))
        assert not protocol.paused


async def test_what_was_read_before_an_error_counts_and_the_rest_is_unread() -> None:
    _, content = made()
    chunks = numbered(9, 200)
    waiting = asyncio.create_task(read_arrived(content))
    await asyncio.sleep(0)
    feed(content, *chunks)
    content.set_exception(aiohttp.ClientPayloadError("broken"))
    read = await waiting
    assert read
    with pytest.raises(aiohttp.ClientPayloadError):
        await read_arrived(content)
    assert read + unread(content) == b"".join(chunks)


async def test_a_pile_of_chunks_does_not_pass_the_parser_one_by_one() -> None:
    """Should it fail, this aiohttp keeps its chunks otherwise: reads are right, but slow."""
    protocol, content = made()
    assert isinstance(getattr(content, "_buffer", None), deque)
    feed(content, *numbered(500, 250))
    assert await read_arrived(content) == b"".join(numbered(500, 250))
    assert protocol.resumed <= 5


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("how", [{}, {"pace": 0.0}, {"write_size": 61}, {"chunked": False, "write_size": 1000}])
async def test_tokens_of_a_stream_come_on_both_ways(
    monkeypatch: pytest.MonkeyPatch, public: bool, how: dict[str, Any]
) -> None:
    if public:
        monkeypatch.setattr("lmcache_stream.completions.reading._buffer", lambda content: deque())
    async with FakeEngine(default=Reply(tokens=300, **how), model="tiny") as engine:
        async with CompletionsClient(engine.base_url, model="tiny") as client:
            items = [item async for item in client([1], {})]
        assert [item.token_id for item in items[:-1] if isinstance(item, TokenEvent)] == list(range(300))


async def test_more_than_the_read_buffer_piles_up_behind_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = asyncio.Event()
    pause = ResponseHandler.pause_reading

    def noticed(protocol: ResponseHandler) -> None:
        paused.set()
        pause(protocol)

    monkeypatch.setattr(ResponseHandler, "pause_reading", noticed)
    async with (
        FakeEngine(default=Reply(tokens=20_000), model="tiny") as engine,
        CompletionsClient(engine.base_url, model="tiny") as client,
    ):
        ids: list[int | None] = []
        async for batch in client.batches([1], {}):
            if isinstance(batch, list):
                await paused.wait()
                ids += [event.token_id for event in batch]
        assert ids == list(range(20_000))
