"""Where coroutines are run to be cancelled: caches, engines, and what they may be left holding."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import torch

from lmcache_stream.completions import CompletionsClient
from lmcache_stream.kvcache import AsyncKVCacheContext, aconnect
from lmcache_stream.kvcache.memory import EmbeddedCache
from lmcache_stream.stream import AsyncLMCacheStream
from lmcache_stream.testing import FakeEngine, Reply
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from lmcache_stream.types import Completion, TokenEvent, Usage
from tests.engines import GEOMETRY, MODEL, kv_of
from tests.grpc_door import GrpcDoor

CHUNK = 4
PROMPT = list(range(10, 28))
BLOCKED = dataclasses.replace(GEOMETRY, block_size=CHUNK)


def answer(ids: list[int], count: int) -> list[int]:
    """The next `count` tokens; each depends on all tokens before it."""
    told = list(ids)
    for _ in range(count):
        told.append((31 * sum(told) + 7 * len(told)) % 997)
    return told[len(ids) :]


class Cache:
    """A cache, a context on it, and a way to put KV there as an engine would."""

    ctx: AsyncKVCacheContext

    async def connect(self) -> AsyncKVCacheContext:
        """Another context."""
        raise NotImplementedError

    async def offload(self, ids: list[int], salt: str) -> None:
        """Put the KV of the whole chunks of `ids` there."""
        raise NotImplementedError

    def check(self) -> None:
        """Nothing was done to the cache that must not be."""

    @property
    def held(self) -> bool:
        """Whether something is held that a client lets go of."""
        return False

    @property
    def users(self) -> int:
        """Who is connected."""
        raise NotImplementedError


class MemoryCache(Cache):
    """The embedded cache."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.cache = EmbeddedCache.open(url)
        self.cache.register_model(MODEL, GEOMETRY)

    @property
    def users(self) -> int:
        return self.cache._references

    async def connect(self) -> AsyncKVCacheContext:
        return await aconnect(self.url)

    async def offload(self, ids: list[int], salt: str) -> None:
        offload(self.cache, ids, salt)

    @property
    def held(self) -> bool:
        return bool(self.cache._waiters)


def offload(cache: EmbeddedCache, ids: list[int], salt: str) -> None:
    """Put the KV of the whole chunks of `ids` into the embedded cache."""
    whole = len(ids) // CHUNK * CHUNK
    chunks = [kv_of(ids[:whole])[:, :, at : at + CHUNK].clone() for at in range(0, whole, CHUNK)]
    cache.put(MODEL, ids[:whole], chunks, salt)


class ServerCache(Cache):
    """A fake cache server on a real socket, behind ZMQ or gRPC."""

    def __init__(self, *, shared_memory: bool) -> None:
        self.server = FakeCacheServer(chunk_size=CHUNK, pool_bytes=32 << 20, shared_memory=shared_memory)
        self.feeder: AsyncKVCacheContext
        self.url: str

    async def connect(self) -> AsyncKVCacheContext:
        return await aconnect(self.url, self.server.http_url, MODEL, 10.0, geometry=BLOCKED)

    async def offload(self, ids: list[int], salt: str) -> None:
        whole = len(ids) // CHUNK * CHUNK
        assert (await self.feeder.put(kv_of(ids[:whole]), ids[:whole], salt)).complete

    def check(self) -> None:
        assert self.server.wrong_publications == 0
        assert self.server.wrong_unlocks == 0

    @property
    def held(self) -> bool:
        return bool(self.server.held)

    @property
    def users(self) -> int:
        return len(self.server.clients)


@asynccontextmanager
async def cache_at(backend: str) -> AsyncIterator[Cache]:
    """A cache: "memory", "shared memory", "pickle" or "grpc"."""
    if backend == "memory":
        memory = MemoryCache(f"memory://{uuid.uuid4().hex}?chunk_size={CHUNK}&max_bytes=64MiB")
        try:
            async with await memory.connect() as memory.ctx:
                yield memory
        finally:
            memory.cache.unregister_model(MODEL)
            memory.cache.close()
        return
    served = ServerCache(shared_memory=backend != "pickle")
    with served.server, GrpcDoor(served.server) if backend == "grpc" else nullcontext(served.server) as door:
        served.url = door.url
        served.server.serve(MODEL, BLOCKED)
        async with await served.connect() as served.feeder, await served.connect() as served.ctx:
            if backend == "grpc":
                await use_every_lane(served.feeder)
                await use_every_lane(served.ctx)
            yield served
        assert served.server.clients == []


async def use_every_lane(ctx: AsyncKVCacheContext) -> None:
    """gRPC connects a lane when it is first used, and a second one is used while the first is busy."""
    two = ([1] * CHUNK, [2] * CHUNK)
    await asyncio.gather(*(ctx.put(kv_of(ids), ids, uuid.uuid4().hex) for ids in two))


class Engine:
    """Generates `answer` and remembers what it was sent."""

    def __init__(self, cache: EmbeddedCache | None = None) -> None:
        self.cache = cache
        self.sent: list[list[int]] = []
        self.open = 0

    def items(self, ids: list[int], params: Mapping[str, Any], salt: str) -> Iterator[TokenEvent | Completion]:
        self.sent.append(list(ids))
        self.open += 1
        try:
            tokens = answer(ids, params["max_tokens"])
            for token in tokens:
                yield TokenEvent(token, f"<{token}>")
            if self.cache is not None:
                offload(self.cache, ids, salt)
            yield Completion("length", None, Usage(len(ids), len(tokens), len(ids) - 1))
        finally:
            self.open -= 1


class BlockingEngine(Engine):
    """A plain callable, iterated in a thread."""

    def __call__(self, ids: list[int], params: Mapping[str, Any], salt: str, /) -> Iterator[TokenEvent | Completion]:
        return self.items(ids, params, salt)


class AsyncEngine(Engine):
    """An async generator function."""

    async def __call__(
        self, ids: list[int], params: Mapping[str, Any], salt: str, /
    ) -> AsyncIterator[TokenEvent | Completion]:
        items = self.items(ids, params, salt)
        try:
            for item in items:
                await asyncio.sleep(0)
                yield item
        finally:
            items.close()  # type: ignore[attr-defined]


def served_answer() -> Reply:
    """A reply of `FakeEngine` with the tokens of `answer`, one event a pass of the loop."""
    return Reply(tokens=lambda asked: answer(asked["prompt"], asked["max_tokens"]), pace=0, cached_tokens=10**6)


class Place:
    """A cache and an engine.

    Args:
        cache: The cache.
        engine: What generates.
        http: The engine on a socket, where it is on one.
        client: Its client.
    """

    def __init__(
        self, cache: Cache, engine: Engine, http: FakeEngine | None = None, client: CompletionsClient | None = None
    ) -> None:
        self.cache = cache
        self.engine = engine
        self.http = http
        self.client = client
        self._idle = 1

    @property
    def sent(self) -> list[list[int]]:
        """Prompts sent to the engine."""
        return self.engine.sent if self.http is None else [asked.json["prompt"] for asked in self.http.completions]

    def stream(self, salt: str = "") -> AsyncLMCacheStream:
        """A stream that has not begun."""
        return AsyncLMCacheStream(self.cache.ctx, self.client or self.engine, PROMPT, salt)  # type: ignore[arg-type]

    async def prefilled(self, salt: str = "") -> AsyncLMCacheStream:
        """A stream whose prompt is in the cache."""
        stream = self.stream(salt)
        await stream.generate({"max_tokens": 1})
        await self.cache.offload(self.sent[-1], stream.cache_salt)
        return stream

    async def edited(self, salt: str = "") -> AsyncLMCacheStream:
        """A stream whose KV was edited."""
        stream = await self.prefilled(salt)
        await stream.modify_kv(drop_every_other)
        return stream

    def warm(self) -> None:
        """Take the connections that are kept alive now for the usual ones."""
        self._idle = self.http.connections if self.http is not None else 0

    @property
    def held(self) -> bool:
        """Whether something is held that a client lets go of."""
        return self.cache.held or self.engine.open > 0 or (self.http is not None and self.http.connections > self._idle)


@asynccontextmanager
async def place_at(backend: str, kind: str) -> AsyncIterator[Place]:
    """A cache, and an engine: "async", "blocking" or "http"."""
    async with cache_at(backend) as cache:
        memory = cache.cache if isinstance(cache, MemoryCache) else None
        if kind == "http":
            async with FakeEngine(default=served_answer()) as http, CompletionsClient(http.base_url) as client:
                yield Place(cache, Engine(), http, client)
        else:
            yield Place(cache, AsyncEngine(memory) if kind == "async" else BlockingEngine(memory))


def drop_every_other(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return kv[:, :, ::2], tokens[::2]


async def drop_after_a_while(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    await asyncio.sleep(0)
    return drop_every_other(kv, tokens)


def keep(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return kv, tokens
