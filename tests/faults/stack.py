"""A whole stack of fakes under one fault: engine, cache server, proxies, and the streams that run on them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import torch

from lmcache_stream import AsyncBatchedStream, AsyncKVCacheContext, AsyncLMCacheStream, CompletionsClient, KVGeometry
from lmcache_stream.kvcache import aconnect
from lmcache_stream.testing import FakeCacheServer, FakeEngine, Reply, TcpProxy
from lmcache_stream.testing.fake_cache_server import Fault as CacheFault

if TYPE_CHECKING:
    from lmcache_stream.kvcache.mp import wire
    from lmcache_stream.testing.fake_cache_server import FaultKind

MODEL = "a/model"
CHUNK = 8
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32)
PROMPT_TOKENS, KEPT, DECODED = 40, 16, 8
UNHURRIED = 30.0
"""Seconds for what should take milliseconds, on a busy machine, too."""


def answer(asked: Mapping[str, Any]) -> list[int]:
    """Tokens that each depend on all before: going on after some of them gives the same as not having stopped."""
    ids = list(asked["prompt"])
    for _ in range(asked.get("max_tokens", 16)):
        ids.append((sum(ids) * 31 + len(ids)) % 9973)
    return ids[len(asked["prompt"]) :]


def says(**options: Any) -> Reply:
    """A reply with the right tokens, each an event and a write of its own, and the faults in `options`."""
    return Reply(**{"tokens": answer, "text": "é{}".format, "pace": 0.0, **options})


def keep_first(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    """The edit: the first tokens, with other values than they had."""
    kv = kv[:, :, :KEPT].clone()
    kv[1].neg_()
    return kv, tokens[:KEPT]


class Stack:
    """The fakes, and one stream, or a batch of three, on top of them."""

    def __init__(self, server: FakeCacheServer, engine: FakeEngine, *, batch: bool) -> None:
        self.server = server
        self.engine = engine
        self.engine_proxy = TcpProxy(engine.base_url)
        self.cache_proxy = TcpProxy(server.url)
        self.http_proxy = TcpProxy(server.http_url)
        self.cache_faults: list[CacheFault] = []
        self.coverage_timeout = UNHURRIED
        self.call_timeout: float | None = None
        self.batched = batch
        self.ctx: AsyncKVCacheContext
        self.client: CompletionsClient

    # What a fault orders.

    def strike(self, operation: wire.Operation[Any], kind: FaultKind, **options: Any) -> CacheFault:
        fault = self.server.fault(operation, kind, **options)
        self.cache_faults.append(fault)
        return fault

    async def struck(self) -> None:
        """Wait until all faults ordered at the cache server have befallen something."""
        for fault in self.cache_faults:
            if not await asyncio.to_thread(fault.struck.wait, UNHURRIED):
                raise AssertionError(f"{fault.kind} befell nothing")

    # The phases.

    def make_streams(self) -> None:
        self.prompts = [
            list(range(1000 * number, 1000 * number + PROMPT_TOKENS)) for number in range(1, 4 if self.batched else 2)
        ]
        self.streams = [AsyncLMCacheStream(self.ctx, self.client, prompt) for prompt in self.prompts]
        self.batch = AsyncBatchedStream(progress=False)
        self.batch.extend(self.streams)

    async def run(self, phase: str, stream_ids: list[str] | None = None) -> None:
        """One phase, through the stream itself or through its batch."""
        if phase == "prefill":
            if self.batched:
                await self.batch.prefill({"temperature": 0}, stream_ids=stream_ids, timeout=self.call_timeout)
            else:
                await self.streams[0].generate({"max_tokens": 1}, timeout=self.call_timeout)
        elif phase == "modify":
            wait = self.coverage_timeout
            if self.batched:
                await self.batch.modify(keep_first, stream_ids=stream_ids, timeout=wait, poll_interval=0.02)
            else:
                await self.streams[0].modify_kv(keep_first, timeout=wait, poll_interval=0.02)
        elif self.batched:
            await self.batch.decode({"max_tokens": DECODED}, stream_ids=stream_ids, timeout=self.call_timeout)
        else:
            await self.streams[0].generate({"max_tokens": DECODED}, timeout=self.call_timeout)

    def snapshots(self) -> list[tuple[Any, ...]]:
        return [
            (stream.tokens, stream.suffix_tokens(), stream.output_tokens(), stream.cache_salt, stream.output_text())
            for stream in self.streams
        ]

    # What must hold in the end.

    def check_streams(self) -> None:
        """Every token was generated from what a run without faults has in front of it, and sent once."""
        for prompt, stream in zip(self.prompts, self.streams, strict=True):
            first = answer({"prompt": prompt, "max_tokens": 1})
            kept = [*prompt[:KEPT], *first]
            rest = answer({"prompt": kept, "max_tokens": DECODED})
            assert stream.output_tokens() == [*first, *rest]
            assert stream.tokens == [*kept, *rest]
            assert stream.suffix_tokens() == []
            stored = self.server.read(MODEL, prompt[:KEPT], stream.cache_salt)
            assert torch.equal(stored, keep_first(plain_kv(prompt), prompt)[0])
            assert stream.last_metrics is not None
            assert stream.last_metrics.edit_shortfall == 0

    async def until_let_go(self, leaves: Mapping[str, int]) -> None:
        async with asyncio.timeout(UNHURRIED):
            while self.server.held != leaves:  # noqa: ASYNC110  (another thread's state)
                await asyncio.sleep(0.005)


def plain_kv(ids: list[int]) -> torch.Tensor:
    """KV `[2, L, T, D]` as the fake cache server offloads it."""
    rows = torch.tensor([ids, range(len(ids))], dtype=torch.float32)
    return rows[:, None, :, None].expand(-1, GEOMETRY.num_layers, -1, GEOMETRY.hidden_dim).contiguous()


@asynccontextmanager
async def opened(
    *,
    shared_memory: bool,
    batch: bool = False,
    proxied: bool = False,
    client: Mapping[str, Any] | None = None,
    stays_registered: bool = False,
    connect: Callable[[Stack, Callable[[], Awaitable[AsyncKVCacheContext]]], Awaitable[AsyncKVCacheContext]],
) -> AsyncIterator[Stack]:
    """Everything up and connected; afterwards nothing of it may be left.

    Args:
        shared_memory: How chunks travel.
        batch: Three streams in a batch, not one.
        proxied: All connections go through proxies.
        client: Options of the completions client.
        stays_registered: Whether the connection to the cache leaves its registration behind.
        connect: Makes the connection to the cache, with what it is given.
    """
    options = {"idle_timeout": UNHURRIED, "connect_timeout": UNHURRIED, "retries": 1, **(client or {})}
    with FakeCacheServer(chunk_size=CHUNK, shared_memory=shared_memory) as server:
        server.serve(MODEL, GEOMETRY)
        async with AsyncExitStack() as held, FakeEngine(model=MODEL, default=says(), cache=server) as engine:
            stack = Stack(server, engine, batch=batch)
            for proxy in (stack.engine_proxy, stack.cache_proxy, stack.http_proxy):
                await held.enter_async_context(proxy)
            url, http_url, base_url = (
                (stack.cache_proxy.url, stack.http_proxy.url, stack.engine_proxy.url)
                if proxied
                else (server.url, server.http_url, engine.base_url)
            )

            async def connecting() -> AsyncKVCacheContext:
                return await aconnect(url, http_url, MODEL, UNHURRIED, geometry=GEOMETRY)

            async with CompletionsClient(base_url, **options) as stack.client:
                stack.ctx = await connect(stack, connecting)
                try:
                    stack.make_streams()
                    yield stack
                finally:
                    await stack.ctx.close()
            await engine.until(lambda: engine.connections == 0, timeout=UNHURRIED)
        assert len(server.clients) == stays_registered
    assert server.shm_name not in os.listdir("/dev/shm")
    assert not [thread for thread in threading.enumerate() if thread.name == f"lmcache-stream {url}"]
