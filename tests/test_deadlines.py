"""A time given at the top bounds everything below, and what is closed has come to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

from lmcache_stream.completions import CompletionsClient
from lmcache_stream.errors import CacheConnectionError, EngineError, LMCacheError, StreamTimeout
from lmcache_stream.kvcache import StoreOutcome, aconnect
from lmcache_stream.kvcache.memory import EmbeddedCache
from lmcache_stream.kvcache.mp import connect as connect_module
from lmcache_stream.kvcache.mp import errand as errand_module
from lmcache_stream.kvcache.mp import lifetime as lifetime_module
from lmcache_stream.kvcache.mp import registry as registry_module
from lmcache_stream.kvcache.mp import session as session_module
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.kvcache.mp.discovery import discover
from lmcache_stream.stream import AsyncLMCacheStream
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from lmcache_stream.testing.fake_engine import End, FakeEngine, Reply

from .engines import GEOMETRY, MODEL, AsyncCountingEngine
from .streams import CHUNK, embedded_cache

ANY_MACHINE = 120.0


class Asked:
    """The timeouts that calls of one object were given."""

    def __init__(self, of: Any, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, float | None]] = []
        for name in names:
            monkeypatch.setattr(of, name, self._spied(name, getattr(of, name)))

    def _spied(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((args[0].name if isinstance(args[0], wire.Operation) else name, options.get("timeout")))
            return method(*args, **options)

        return call


class Setup:
    def __init__(self, ctx: Any, cache: EmbeddedCache) -> None:
        self.ctx, self.cache = ctx, cache

    def stream(self, **options: Any) -> AsyncLMCacheStream:
        return AsyncLMCacheStream(self.ctx, AsyncCountingEngine(self.cache, **options), list(range(16)))


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    with embedded_cache() as (cache, url):
        async with aconnect(url) as ctx:
            yield Setup(ctx, cache)


@pytest.fixture
def server() -> Iterator[FakeCacheServer]:
    with FakeCacheServer(chunk_size=CHUNK) as server:
        server.serve(MODEL, GEOMETRY)
        yield server


def halve(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return kv[:, :, ::2], tokens[::2]


@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream_tells_the_cache_what_is_left(
    setup: Setup, usage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = setup.stream(usage=usage)
    await stream.generate({"max_tokens": 1})
    await stream.modify_kv(halve)
    await stream.generate({"max_tokens": 1})
    asked = Asked(setup.ctx, ("lookup", "retrieve", "put", "wait_for"), monkeypatch)
    await stream.generate({"max_tokens": 12}, edit_every=4, editor=halve, timeout=30)
    assert {name for name, _ in asked.calls} == {"lookup", "retrieve", "put", "wait_for"}
    given = [timeout for _, timeout in asked.calls]
    assert all(timeout is not None and 0 < timeout <= 30 for timeout in given)
    asked.calls.clear()
    await stream.generate({"max_tokens": 1}, timeout=10_000)
    assert all(timeout is not None and timeout <= setup.ctx.timeout for _, timeout in asked.calls)


async def test_an_edit_while_decoding_is_bounded_too(setup: Setup) -> None:
    stream = setup.stream()
    before = stream.cache_salt

    async def hang(kv: torch.Tensor, tokens: list[int]) -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(ANY_MACHINE):
        with pytest.raises(StreamTimeout) as caught:
            await stream.generate({"max_tokens": 8}, edit_every=4, editor=hang, timeout=0.5)
    assert (caught.value.arrived, caught.value.suffix_consumed) == (4, True)
    assert stream.cache_salt == before
    assert (await stream.generate({"max_tokens": 1})).output_tokens == 1


async def test_a_time_out_of_an_editor_is_its_own(setup: Setup) -> None:
    async def fail(kv: torch.Tensor, tokens: list[int]) -> None:
        raise TimeoutError("mine")

    stream = setup.stream()
    with pytest.raises(TimeoutError, match="mine"):
        await stream.generate({"max_tokens": 8}, edit_every=4, editor=fail, timeout=60)


OPERATIONS = ["lookup", "wait_prefetch_status", "prepare_retrieve", "prepare_store", "commit_retrieve"]


async def test_a_context_tells_its_transport_what_is_left(
    server: FakeCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, kv = list(range(2 * CHUNK)), torch.randn(2, 2, 2 * CHUNK, 8)
    async with await open_context(server.url, http_url=server.http_url, model_name=MODEL, geometry=GEOMETRY) as ctx:
        asked = Asked(ctx._transport, ("call",), monkeypatch)
        await ctx.put(kv, ids, timeout=20)
        await ctx.retrieve(ids, timeout=20)
        await ctx.lookup(ids, timeout=20)
        await ctx.wait_for(ids, timeout=20)
    told = dict(asked.calls)
    assert set(OPERATIONS) <= told.keys()
    # What may take locks is waited for a little longer, in the background, so that they can be let go of.
    most = {wire.LOOKUP.name: 30.0, wire.PREPARE_STORE.name: 30.0, wire.PREPARE_RETRIEVE.name: 21.0}
    for name, timeout in asked.calls:
        assert timeout is not None
        assert timeout <= most.get(name, 20.0)


async def test_a_connection_is_made_in_time_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    given: list[float] = []

    async def spied(http_url: str, *names: str | None, url: str | None = None, timeout: float = 99.0) -> Any:
        given.append(timeout)
        return await discover(http_url, *names, url=url, timeout=timeout)

    monkeypatch.setattr(connect_module, "discover", spied)
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with asyncio.timeout(ANY_MACHINE):
            with pytest.raises(CacheConnectionError, match="did not answer in time"):
                await open_context(f"tcp://127.0.0.1:{port}", http_url=f"http://127.0.0.1:{port}", timeout=0.2)
    assert given
    assert all(timeout <= 0.2 for timeout in given)


async def test_questions_while_connecting_share_the_time(
    server: FakeCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache_stream.kvcache.mp.transport import ZmqTransport

    given: list[tuple[str, float]] = []
    call = ZmqTransport.call

    async def spied(self: Any, operation: Any, *args: Any, timeout: float, lane: int = 0) -> Any:
        given.append((operation.name, timeout))
        return await call(self, operation, *args, timeout=timeout, lane=lane)

    monkeypatch.setattr(ZmqTransport, "call", spied)
    async with await open_context(
        server.url, http_url=server.http_url, model_name=MODEL, geometry=GEOMETRY, timeout=2.5
    ):
        connecting = dict(given)
    assert connecting.keys() == {wire.GET_CHUNK_SIZE.name, wire.REGISTER.name}
    assert connecting[wire.REGISTER.name] < connecting[wire.GET_CHUNK_SIZE.name] < 2.5


# After a close


class Running:
    """What was begun since: tasks, also those that the loop does not know, threads and sockets of ours."""

    def __init__(self) -> None:
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._sockets = _sockets()
        asyncio.get_running_loop().set_task_factory(self._made)

    def _made(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
        self._tasks.add(task)
        return task

    async def ended(self) -> None:
        """Wait until nothing of it runs any more; the other end of a socket takes a moment to close."""
        async with asyncio.timeout(ANY_MACHINE):
            while self._left() or _sockets() > self._sockets:  # noqa: ASYNC110  (nothing tells of it)
                await asyncio.sleep(0.02)

    def _left(self) -> list[str]:
        tasks = [repr(task) for task in self._tasks if not task.done()]
        return tasks + [one.name for one in threading.enumerate() if one.name.startswith("lmcache-stream tcp")]


def _sockets() -> int:
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return count


@pytest.mark.parametrize("silent", [[wire.LOOKUP], [wire.PREPARE_STORE], [wire.NOOP], list(wire.OPERATIONS)])
async def test_nothing_runs_after_a_context_was_closed_that_waits_for_a_silent_server(
    silent: list[wire.Operation[Any]], server: FakeCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (lifetime_module, "CLOSE_TIMEOUT"),
        (lifetime_module, "LAST_TIMEOUT"),
        (registry_module, "REGISTER_TIMEOUT"),
        (lifetime_module, "CLEAN_UP"),
        (errand_module, "CLEAN_UP"),
        (session_module, "CLEAN_UP"),
        (session_module, "LINGER"),
        (session_module, "END_TIMEOUT"),
    ):
        monkeypatch.setattr(module, name, 0.2)
    running = Running()
    ctx = await open_context(server.url, http_url=server.http_url, model_name=MODEL, geometry=GEOMETRY, timeout=60)
    faults = [server.fault(operation, "lose", times=100) for operation in silent]
    ids, kv = list(range(2 * CHUNK)), torch.randn(2, 2, 2 * CHUNK, 8)
    calls = [asyncio.create_task(ctx.put(kv, ids)), asyncio.create_task(ctx.retrieve(list(range(50, 58))))]
    if silent != [wire.NOOP]:
        assert await asyncio.to_thread(faults[0].struck.wait, ANY_MACHINE)
    async with asyncio.timeout(ANY_MACHINE):
        await ctx.close()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert not [outcome for outcome in outcomes if not isinstance(outcome, LMCacheError | StoreOutcome | None)]
    await running.ended()


@pytest.mark.parametrize(
    "reply", [Reply(header_delay=600), Reply(end_after=1, end=End.STALL), Reply(status=503, body=b"", end=End.STALL)]
)
async def test_nothing_runs_after_a_client_was_closed_that_waits_for_a_silent_engine(reply: Reply) -> None:
    async with FakeEngine(model="tiny") as engine:
        engine.default = reply
        running = Running()
        client = CompletionsClient(engine.base_url, model="tiny", retries=0)

        async def consume() -> None:
            async for _ in client([1], {}):
                pass

        task = asyncio.create_task(consume())
        await engine.until(lambda: len(engine.completions) == 1)
        await client.aclose()
        async with asyncio.timeout(ANY_MACHINE):
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, EngineError | LMCacheError)
        await engine.disconnected()
        await running.ended()
