from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from lmcache_stream.errors import CacheConnectionError, CacheProtocolError, CacheTimeout, UsageError
from lmcache_stream.kvcache.mp import transport as transports
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.transport import UNHEARD, Transport, ZmqTransport, open_transport, schemes
from lmcache_stream.testing import TcpProxy
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

from .sockets import patience, sockets_to


@pytest.fixture
def server() -> Iterator[FakeCacheServer]:
    with FakeCacheServer() as server:
        yield server


@pytest.fixture
async def transport(server: FakeCacheServer) -> AsyncIterator[ZmqTransport]:
    transport = ZmqTransport(server.url)
    yield transport
    await transport.close()


def key(*tokens: int) -> wire.CacheKey:
    return wire.CacheKey("model", 1, None, tokens, 0, 0, "request")


async def test_calls(server: FakeCacheServer, transport: ZmqTransport) -> None:
    assert isinstance(transport, Transport)
    assert await transport.call(wire.NOOP, timeout=5) == "OK"
    assert await transport.call(wire.GET_CHUNK_SIZE, timeout=5) == 32
    await transport.call(wire.LOOKUP, key(1, 2), 1, timeout=5)
    assert await transport.call(wire.WAIT_PREFETCH_STATUS, "request", 0.1, timeout=5) == 0
    for lane in range(transport.lanes + 1):
        assert await transport.call(wire.NOOP, timeout=5, lane=lane) == "OK"
    assert not transport._pending


async def test_replies_come_in_any_order(server: FakeCacheServer, transport: ZmqTransport) -> None:
    fault = server.fault(wire.GET_CHUNK_SIZE, "hold")
    first = asyncio.create_task(transport.call(wire.GET_CHUNK_SIZE, timeout=5))
    await asyncio.to_thread(fault.struck.wait)
    assert await transport.call(wire.NOOP, timeout=5) == "OK"
    fault.release()
    assert await first == 32


async def test_many_at_once(transport: ZmqTransport) -> None:
    lanes = [number % 3 for number in range(500)]
    answers = await asyncio.gather(*(transport.call(wire.NOOP, timeout=20, lane=lane) for lane in lanes))
    assert answers == ["OK"] * 500
    assert not transport._pending


async def test_a_late_reply_is_dropped(server: FakeCacheServer, transport: ZmqTransport) -> None:
    fault = server.fault(wire.GET_CHUNK_SIZE, "hold")
    with pytest.raises(CacheTimeout, match=r"is up but did not answer get_chunk_size within 0.2 s: it refused"):
        await transport.call(wire.GET_CHUNK_SIZE, timeout=0.2)
    fault.release()
    assert await transport.call(wire.GET_CHUNK_SIZE, timeout=5) == 32
    assert transport.dropped == 1
    assert not transport._pending


async def test_a_duplicate_reply_is_dropped(server: FakeCacheServer, transport: ZmqTransport) -> None:
    server.fault(wire.GET_CHUNK_SIZE, "duplicate")
    assert await transport.call(wire.GET_CHUNK_SIZE, timeout=5) == 32
    assert await transport.call(wire.NOOP, timeout=5) == "OK"
    assert transport.dropped == 1


async def test_a_cancelled_call_is_forgotten(server: FakeCacheServer, transport: ZmqTransport) -> None:
    fault = server.fault(wire.GET_CHUNK_SIZE, "hold")
    call = asyncio.create_task(transport.call(wire.GET_CHUNK_SIZE, timeout=5))
    await asyncio.to_thread(fault.struck.wait)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not transport._pending
    fault.release()
    assert await transport.call(wire.NOOP, timeout=5) == "OK"
    assert transport.dropped == 1


@pytest.mark.parametrize(("kind", "words"), [("garble", "cannot be read"), ("wrong-operation", "99")])
async def test_a_reply_that_makes_no_sense(
    server: FakeCacheServer, transport: ZmqTransport, kind: Any, words: str
) -> None:
    server.fault(wire.GET_CHUNK_SIZE, kind)
    with pytest.raises(CacheProtocolError, match=words):
        await transport.call(wire.GET_CHUNK_SIZE, timeout=5)


async def test_a_silent_server_is_gone(server: FakeCacheServer, transport: ZmqTransport) -> None:
    server.fault(wire.GET_CHUNK_SIZE, "ignore")
    server.fault(wire.NOOP, "ignore")
    with pytest.raises(CacheConnectionError, match="neither get_chunk_size nor noop"):
        await transport.call(wire.GET_CHUNK_SIZE, timeout=0.2)


async def test_calls_in_flight_fail_when_the_connection_breaks(server: FakeCacheServer) -> None:
    transport = ZmqTransport(server.url)
    fault = server.fault(wire.GET_CHUNK_SIZE, "hold")
    call = asyncio.create_task(transport.call(wire.GET_CHUNK_SIZE, timeout=30))
    await asyncio.to_thread(fault.struck.wait)
    server.restart()
    with pytest.raises(CacheConnectionError, match="broke before get_chunk_size was answered"):
        await call
    assert await transport.call(wire.GET_CHUNK_SIZE, timeout=5) == 32
    await transport.close()


async def test_nothing_is_sent_between_two_connections(
    server: FakeCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an instant after a connection has gone, its socket takes what nobody will get."""
    async with TcpProxy(server.url) as proxy:
        transport = ZmqTransport(proxy.url, lanes=0)
        loop = asyncio.get_running_loop()
        log: list[str] = []
        calls: list[Future[str]] = []
        send_multipart = zmq.Socket.send_multipart

        def heard(*args: Any) -> Any:
            message = recv_monitor_message(*args)
            log.append("gone" if message["event"] == zmq.EVENT_DISCONNECTED else "back")
            if log[-1] == "gone":
                calls.append(asyncio.run_coroutine_threadsafe(transport.call(wire.NOOP, timeout=10), loop))
                while not transport._outbox and not calls[-1].done():
                    time.sleep(0.001)
            return message

        def sent(to: zmq.Socket[bytes], *args: Any, **more: Any) -> Any:
            if to.type == zmq.DEALER:
                log.append("sent")
            return send_multipart(to, *args, **more)

        await transport.call(wire.NOOP, timeout=5)
        monkeypatch.setattr(transports, "recv_monitor_message", heard)
        monkeypatch.setattr(zmq.Socket, "send_multipart", sent)
        await proxy.drop()
        while not calls:  # noqa: ASYNC110  (a thread says so)
            await asyncio.sleep(0.001)
        await asyncio.wrap_future(calls[0])
        await transport.close()
    assert log[:2] == ["gone", "back"]
    assert "sent" in log


async def test_a_connection_that_nobody_acknowledges_is_given_up(server: FakeCacheServer) -> None:
    """Where the other machine is gone without a word, the system would try for a quarter of an hour."""
    transport = ZmqTransport(server.url, lanes=1)
    for lane in (0, 1):
        await transport.call(wire.NOOP, timeout=5, lane=lane)
    kept = [
        (patience(each), each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        for each in sockets_to(int(server.url.rpartition(":")[2]))
    ]
    assert kept == [(UNHEARD, 1)] * 2
    await transport.close()


async def test_nobody_there_and_then_somebody() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    router.unbind(f"tcp://127.0.0.1:{port}")
    transport = ZmqTransport(f"tcp://127.0.0.1:{port}")
    with pytest.raises(CacheConnectionError, match=f"no cache server answers at tcp://127.0.0.1:{port} .for noop."):
        await transport.call(wire.NOOP, timeout=0.2)
    router.bind(f"tcp://127.0.0.1:{port}")

    def answer() -> list[bytes]:
        identity, *frames = router.recv_multipart()
        router.send_multipart([identity, frames[0], frames[1], msgspec.msgpack.encode("here")])
        return frames

    answering = asyncio.create_task(asyncio.to_thread(answer))
    assert await transport.call(wire.NOOP, timeout=10) == "here"
    # What timed out while nobody was there has not been sent after all.
    assert msgspec.msgpack.decode((await answering)[0]) == 2
    await transport.close()
    router.close()
    context.term()


async def test_frames_that_are_no_reply_are_dropped() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    transport = ZmqTransport(f"tcp://127.0.0.1:{port}", lanes=0)

    def answer() -> None:
        identity, *frames = router.recv_multipart()
        for wrong in ([b""], [b"\xc1", b"\xc1"], [*frames, b"1", b"2", b"3"], [b"\xa1x", *frames[1:]]):
            router.send_multipart([identity, *wrong])
        router.send_multipart([identity, frames[0], frames[1], msgspec.msgpack.encode("here")])

    answering = asyncio.create_task(asyncio.to_thread(answer))
    assert await transport.call(wire.NOOP, timeout=10) == "here"
    await answering
    assert transport.dropped == 4
    await transport.close()
    router.close()
    context.term()


async def test_close_fails_what_is_in_flight_and_leaves_nothing(server: FakeCacheServer) -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    transport = ZmqTransport(server.url)
    await transport.call(wire.NOOP, timeout=5)
    fault = server.fault(wire.GET_CHUNK_SIZE, "hold")
    call = asyncio.create_task(transport.call(wire.GET_CHUNK_SIZE, timeout=5))
    await asyncio.to_thread(fault.struck.wait)
    await transport.close()
    await transport.close()
    with pytest.raises(CacheConnectionError, match="closed"):
        await call
    with pytest.raises(CacheConnectionError, match="closed"):
        await transport.call(wire.NOOP, timeout=5)
    fault.release()
    gc.collect()
    assert not transport._thread.is_alive()
    # The server's sockets and asyncio's own worker threads come and go by themselves.
    assert threading.active_count() <= threads + 2
    async with asyncio.timeout(5):
        while len(os.listdir("/proc/self/fd")) > descriptors:  # noqa: ASYNC110  (nothing tells of it)
            await asyncio.sleep(0.01)


async def test_close_without_a_server_is_quick() -> None:
    transport = ZmqTransport("tcp://127.0.0.1:1")
    async with asyncio.timeout(5):
        await transport.close()


async def test_several_loops_may_use_one(server: FakeCacheServer, transport: ZmqTransport) -> None:
    async def call() -> str:
        return await transport.call(wire.NOOP, timeout=5)

    assert await asyncio.to_thread(asyncio.run, call()) == "OK"
    assert await call() == "OK"


async def test_large_frames(server: FakeCacheServer, transport: ZmqTransport) -> None:
    tokens = tuple(range(200_000))
    await transport.call(wire.LOOKUP, key(*tokens), 1, timeout=10)
    with pytest.raises(CacheTimeout):
        await transport.call(wire.COMMIT_STORE, key(), 1, bytes(2 * wire.LARGE), timeout=1, lane=1)
    assert server.calls["commit_store"] == 1


def test_schemes() -> None:
    assert set(schemes) == {"tcp", "ipc", "grpc", "grpc+unix"}
    with pytest.raises(UsageError, match="tcp://"):
        open_transport("http://localhost:5555")
    with pytest.raises(UsageError, match="tcp://"):
        open_transport("localhost:5555")
    with pytest.raises(UsageError, match="host:port"):
        open_transport("tcp://localhost")


async def test_ipc(tmp_path: Any) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.bind(f"ipc://{tmp_path}/s")
    transport = open_transport(f"ipc://{tmp_path}/s")

    def answer() -> None:
        identity, *frames = router.recv_multipart()
        router.send_multipart([identity, frames[0], frames[1], msgspec.msgpack.encode("here")])

    answering = asyncio.create_task(asyncio.to_thread(answer))
    assert await transport.call(wire.NOOP, timeout=5) == "here"
    await answering
    await transport.close()
    router.close()
    context.term()
