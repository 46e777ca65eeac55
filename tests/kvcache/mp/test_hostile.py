"""A server that answers what it should not must cost no more than an error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
import zmq
import zmq.asyncio

from lmcache_stream.errors import CacheConnectionError, CacheProtocolError
from lmcache_stream.kvcache.mp import transport as transport_module
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.pool import Pool
from lmcache_stream.kvcache.mp.transport import ZmqTransport
from lmcache_stream.kvcache.mp.wire import Operation, Slot, decode_result

from .test_pool import make_segment

NESTED = b"\x91" * 100_000


@contextlib.asynccontextmanager
async def answering(result: Callable[[], bytes]) -> AsyncIterator[str]:
    """A server that answers every request with the same frame; its URL."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")

    async def answer() -> None:
        while True:
            identity, uid, operation, *_ = await router.recv_multipart()
            await router.send_multipart([identity, uid, operation, result()])

    task = asyncio.create_task(answer())
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        task.cancel()
        await asyncio.wait([task])
        router.close()
        context.term()


async def test_an_answer_longer_than_any_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "LONGEST_ANSWER", 1000)
    monkeypatch.setattr(transport_module, "LONGEST_DATA", 2000)
    async with answering(lambda: msgspec.msgpack.encode("x" * 1500)) as url:
        transport = ZmqTransport(url, lanes=1)
        try:
            assert await transport.call(wire.NOOP, timeout=30, lane=1) == "x" * 1500
            with pytest.raises(CacheConnectionError, match="broke"):
                await transport.call(wire.NOOP, timeout=30)
        finally:
            await transport.close()


@pytest.mark.parametrize(
    "operation", [operation for operation in wire.OPERATIONS if operation.result is not None], ids=lambda one: one.name
)
@pytest.mark.parametrize(
    "frame",
    [
        NESTED,
        b"\x81\xa1x" + NESTED,
        b"\x83\xa7success\xc3\xa7context\x81\xa5slots" + NESTED,
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion keys
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion items
        b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes
        b"\xdb\xff\xff\xff\xff",  # 4 GB of text
    ],
)
def test_a_frame_that_promises_more_than_it_has(operation: Operation[object], frame: bytes) -> None:
    with pytest.raises(CacheProtocolError):
        decode_result(operation, frame)


def test_slots_that_hold_more_than_the_pool() -> None:
    name = f"test_hostile_{secrets.token_hex(8)}"
    segment = make_segment(name, 1 << 16)
    try:
        whole = Slot(0, 1 << 16, (1 << 16,), "uint8")
        pool = Pool(name, populate=None)
        with pool.lease() as lease:
            lease.view(whole)
            with pytest.raises(CacheProtocolError, match="more than the 65536 bytes"):
                lease.view(Slot(0, 1, (1,), "uint8"))
        with pool.lease() as lease:
            lease.view(whole)
        pool.close()
    finally:
        segment.close()
        os.unlink(f"/dev/shm/{name}")
