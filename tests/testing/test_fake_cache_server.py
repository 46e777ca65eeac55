from __future__ import annotations

import asyncio
import os
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
import torch

from lmcache_stream.errors import CacheError, CacheProtocolError, CacheTimeout, UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.pickles import dump_tensors, load_tensors
from lmcache_stream.kvcache.mp.pool import Pool
from lmcache_stream.kvcache.mp.transport import ZmqTransport
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

C = 4
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=1, head_dim=4, dtype=torch.float32)
US = wire.Registration(77, "scratch", 1, 4, 2, 4, "float32", False)
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8)


@pytest.fixture
def server() -> Iterator[FakeCacheServer]:
    with FakeCacheServer(chunk_size=C) as server:
        server.serve("model", GEOMETRY)
        yield server


@pytest.fixture
async def transport(server: FakeCacheServer) -> AsyncIterator[ZmqTransport]:
    transport = ZmqTransport(server.url)
    await transport.call(wire.REGISTER, US, timeout=5)
    yield transport
    await transport.close()


def key(tokens: tuple[int, ...] = TOKENS, *, worker_id: int | None = 0, request: str = "r", salt: str = "") -> Any:
    return wire.CacheKey("model", 1, worker_id, tokens, 0, len(tokens), request, salt)


async def lookup(transport: ZmqTransport, request: str = "r") -> int | None:
    await transport.call(wire.LOOKUP, key(worker_id=None, request=request), 1, timeout=5)
    return await transport.call(wire.WAIT_PREFETCH_STATUS, request, 1.0, timeout=5)


async def store(server: FakeCacheServer, transport: ZmqTransport, value: float, request: str = "r") -> Any:
    prepared = await transport.call(wire.PREPARE_STORE, key(request=request), US.instance_id, timeout=5)
    assert prepared.context.slots is not None
    with Pool(server.shm_name).lease() as lease:
        for slot in prepared.context.slots:
            lease.view(slot).fill_(value)
    if prepared.context.slots:
        assert await transport.call(wire.COMMIT_STORE, key(request=request), US.instance_id, b"", timeout=5)
    await transport.call(wire.END_SESSION, request, timeout=5)
    return prepared.context


async def refused(transport: ZmqTransport, operation: wire.Operation[Any], *args: Any) -> None:
    with pytest.raises(CacheTimeout):
        await transport.call(operation, *args, timeout=0.4)


async def test_store_and_retrieve(server: FakeCacheServer, transport: ZmqTransport) -> None:
    assert await lookup(transport) == 0
    await transport.call(wire.END_SESSION, "r", timeout=5)
    slots = await store(server, transport, 3.0)
    assert [slot.shape for slot in slots.slots] == [(2, 2, C, 4)] * 2
    assert server.chunks == 2
    assert (await store(server, transport, 4.0)).slots == ()

    assert await lookup(transport) == 2
    assert server.read_locks == 2
    prepared = await transport.call(wire.PREPARE_RETRIEVE, key(), US.instance_id, timeout=5)
    with Pool(server.shm_name).lease() as lease:
        assert all((lease.view(slot) == 3).all() for slot in prepared.context.slots)
    assert server.held == {"read locks": 2, "sessions": 1, "reads": 1}
    assert await transport.call(wire.COMMIT_RETRIEVE, key(), US.instance_id, timeout=5)
    await transport.call(wire.END_SESSION, "r", timeout=5)
    assert server.held == {}
    assert server.wrong_publications == server.wrong_unlocks == 0


async def test_pickles() -> None:
    with FakeCacheServer(chunk_size=C, shared_memory=False) as server:
        server.serve("model", GEOMETRY)
        transport = ZmqTransport(server.url)
        assert await transport.call(wire.REGISTER, US, timeout=5) == wire.Registered("", 0)
        prepared = await transport.call(wire.PREPARE_STORE, key(), US.instance_id, timeout=5)
        assert prepared.context.slots is None
        chunks = [torch.full((2, 2, C, 4), value) for value in (1.0, 2.0)]
        args = (key(), US.instance_id, dump_tensors(chunks))
        assert await transport.call(wire.COMMIT_STORE, *args, timeout=5)
        assert await lookup(transport) == 2
        found = await transport.call(wire.PREPARE_RETRIEVE, key(), US.instance_id, timeout=5)
        assert all(torch.equal(a, b) for a, b in zip(load_tensors(found.data), chunks, strict=True))
        assert server.read_locks == 0
        await transport.close()


async def test_a_request_that_fails_is_not_answered(server: FakeCacheServer, transport: ZmqTransport) -> None:
    await refused(transport, wire.PREPARE_STORE, key(), 1234)
    await refused(transport, wire.PREPARE_STORE, key(worker_id=None), US.instance_id)
    await refused(transport, wire.LOOKUP, "no key", 1)
    await refused(transport, wire.LOOKUP, key())
    assert await transport.call(wire.NOOP, timeout=5) == "OK"


async def test_a_lookup_of_a_model_that_nobody_serves_finds_nothing(
    server: FakeCacheServer, transport: ZmqTransport
) -> None:
    await store(server, transport, 1.0)
    server.forget_engines()
    assert await lookup(transport) == 0
    await transport.call(wire.END_SESSION, "r", timeout=5)
    await transport.call(wire.PREPARE_STORE, key(request="s"), US.instance_id, timeout=5)
    await refused(transport, wire.END_SESSION, "s")
    assert server.sessions == 0


async def test_a_prefetch_result_is_given_once(server: FakeCacheServer, transport: ZmqTransport) -> None:
    await store(server, transport, 1.0)
    assert await lookup(transport) == 2
    assert await transport.call(wire.QUERY_PREFETCH_STATUS, "r", timeout=5) == 0


async def test_ending_a_session_frees_no_lock(server: FakeCacheServer, transport: ZmqTransport) -> None:
    await store(server, transport, 1.0)
    await lookup(transport)
    await transport.call(wire.END_SESSION, "r", timeout=5)
    assert server.held == {"read locks": 2}
    await transport.call(wire.FREE_LOOKUP_LOCKS, key(worker_id=None), 1, timeout=5)
    assert server.read_locks == 2
    await lookup(transport)
    await transport.call(wire.FREE_LOOKUP_LOCKS, key(worker_id=None), 1, timeout=5)
    assert server.read_locks == 2


async def test_equal_keys_collide(server: FakeCacheServer, transport: ZmqTransport) -> None:
    first = await transport.call(wire.PREPARE_STORE, key(request="a"), US.instance_id, timeout=5)
    assert first.context.slots
    second = await transport.call(wire.PREPARE_STORE, key(request="b"), US.instance_id, timeout=5)
    assert second.context.slots == ()
    assert await transport.call(wire.COMMIT_STORE, key(request="b"), US.instance_id, b"", timeout=5)
    assert server.wrong_publications == 2


async def test_what_a_client_had_reserved_is_published_when_it_goes(
    server: FakeCacheServer, transport: ZmqTransport
) -> None:
    await transport.call(wire.PREPARE_STORE, key(), US.instance_id, timeout=5)
    assert server.reservations == 2
    await transport.call(wire.UNREGISTER, US.instance_id, timeout=5)
    assert server.reservations == 0
    assert server.wrong_publications == 2
    await refused(transport, wire.COMMIT_STORE, key(), US.instance_id, b"")


async def test_a_forgotten_client_is_refused(server: FakeCacheServer, transport: ZmqTransport) -> None:
    assert server.clients == [77]
    server.forget()
    assert server.clients == []
    await refused(transport, wire.PREPARE_RETRIEVE, key(), US.instance_id)


async def test_a_full_pool_offers_nothing() -> None:
    with FakeCacheServer(chunk_size=C, pool_bytes=4096) as server:
        transport = ZmqTransport(server.url)
        await transport.call(wire.REGISTER, US, timeout=5)
        prepared = await transport.call(wire.PREPARE_STORE, key(), US.instance_id, timeout=5)
        assert prepared.context.slots == ()
        prepared = await transport.call(wire.PREPARE_STORE, key(TOKENS[:C]), US.instance_id, timeout=5)
        assert prepared.context.slots
        assert await transport.call(wire.COMMIT_STORE, key(TOKENS[:C]), US.instance_id, b"", timeout=5)
        server.evict(1)
        assert server.chunks == 0
        prepared = await transport.call(wire.PREPARE_STORE, key(TOKENS[C:]), US.instance_id, timeout=5)
        assert prepared.context.slots
        await transport.close()


async def test_a_restart_forgets_everything_and_makes_a_new_segment(
    server: FakeCacheServer, transport: ZmqTransport
) -> None:
    await store(server, transport, 1.0)
    url, pool = server.url, Pool(server.shm_name)
    server.restart(engines_return=False)
    assert server.url == url
    assert not pool.is_current()
    assert (server.chunks, server.held, server.status()["non_cuda_context_meta"]) == (0, {}, {})
    with pytest.raises(CacheError):
        await transport.call(wire.PREPARE_STORE, key(), US.instance_id, timeout=0.2)


async def test_the_wrong_mode_has_no_such_operations() -> None:
    with FakeCacheServer(transfer_mode="lmcache_driven") as server:
        transport = ZmqTransport(server.url)
        await refused(transport, wire.REGISTER, US)
        assert await transport.call(wire.NOOP, timeout=5) == "OK"
        await transport.close()


async def test_faults_come_in_turn_and_then_stop(server: FakeCacheServer, transport: ZmqTransport) -> None:
    server.fault(wire.GET_CHUNK_SIZE, "ignore", times=2)
    fault = server.fault(wire.GET_CHUNK_SIZE, "hold")
    await refused(transport, wire.GET_CHUNK_SIZE)
    await refused(transport, wire.GET_CHUNK_SIZE)
    held = asyncio.create_task(transport.call(wire.GET_CHUNK_SIZE, timeout=5))
    await asyncio.to_thread(fault.struck.wait)
    assert await transport.call(wire.GET_CHUNK_SIZE, timeout=5) == C
    assert not held.done()
    fault.release()
    assert await held == C
    assert server.calls["get_chunk_size"] == 4


async def _get(url: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.json()


async def test_http(server: FakeCacheServer, transport: ZmqTransport) -> None:
    status, config = await _get(f"{server.http_url}/config")
    assert (status, config["mp"]["chunk_size"], config["mp"]["shm_name"]) == (200, C, server.shm_name)
    status, state = await _get(f"{server.http_url}/status")
    assert status == 200
    assert state["non_cuda_context_meta"]["77"] == {
        "model_name": "scratch",
        "world_size": 1,
        "block_size": 4,
        "use_mla": False,
    }
    assert state["storage_manager"]["l1_manager"]["read_locked_count"] == 0
    assert (await _get(f"{server.http_url}/conf"))[0] == 404
    server.http_status = 503
    assert (await _get(f"{server.http_url}/status"))[0] == 503


def test_nothing_is_left() -> None:
    server = FakeCacheServer().start()
    assert os.path.exists(f"/dev/shm/{server.shm_name}")
    server.stop()
    server.stop()
    assert not os.path.exists(f"/dev/shm/{server.shm_name}")
    assert not [thread for thread in threading.enumerate() if thread.name == "fake cache server"]


async def test_a_fault_may_come_later_and_a_reply_held_by_itself(
    server: FakeCacheServer, transport: ZmqTransport
) -> None:
    server.fault(wire.GET_CHUNK_SIZE, "ignore", after=1)
    held = server.fault(wire.PING, "hold", seconds=0.01)
    assert await transport.call(wire.GET_CHUNK_SIZE, timeout=5) == C
    await refused(transport, wire.GET_CHUNK_SIZE)
    assert await transport.call(wire.GET_CHUNK_SIZE, timeout=5) == C
    assert await transport.call(wire.PING, None, timeout=5)
    assert held.struck.is_set()


@pytest.mark.parametrize("kind", ["garble", "wrong-operation", "wrong-type", "nothing"])
async def test_answers_that_make_no_sense(server: FakeCacheServer, transport: ZmqTransport, kind: Any) -> None:
    server.fault(wire.GET_CHUNK_SIZE, kind)
    with pytest.raises(CacheProtocolError):
        await transport.call(wire.GET_CHUNK_SIZE, timeout=5)


@pytest.mark.parametrize("kind", ["frames", "unknown"])
async def test_answers_that_are_none(server: FakeCacheServer, transport: ZmqTransport, kind: Any) -> None:
    server.fault(wire.GET_CHUNK_SIZE, kind)
    await refused(transport, wire.GET_CHUNK_SIZE)
    assert transport.dropped == 1


async def test_more_chunks_than_asked_for(server: FakeCacheServer, transport: ZmqTransport) -> None:
    server.offload("model", TOKENS)
    server.fault(wire.WAIT_PREFETCH_STATUS, "too-many")
    assert await lookup(transport) == 1_000_002


async def test_no_room_for_one_request(server: FakeCacheServer, transport: ZmqTransport) -> None:
    server.fault(wire.PREPARE_STORE, "no-room")
    assert (await store(server, transport, 1.0)).slots == ()
    assert len((await store(server, transport, 1.0)).slots) == 2
    server.full = True
    server.offload("model", (9, *TOKENS))
    assert server.chunks == 2


async def test_evicted_between_lookup_and_read(server: FakeCacheServer, transport: ZmqTransport) -> None:
    server.offload("model", TOKENS)
    assert await lookup(transport) == 2
    server.fault(wire.PREPARE_RETRIEVE, "evict")
    prepared = await transport.call(wire.PREPARE_RETRIEVE, key(), US.instance_id, timeout=5)
    assert not prepared.success
    await transport.call(wire.FREE_LOOKUP_LOCKS, key(worker_id=None), 1, timeout=5)
    await transport.call(wire.END_SESSION, "r", timeout=5)
    assert (server.chunks, server.held, server.wrong_unlocks) == (0, {}, 0)


async def test_a_reservation_that_has_run_out(server: FakeCacheServer, transport: ZmqTransport) -> None:
    server.fault(wire.COMMIT_STORE, "evict")
    await transport.call(wire.PREPARE_STORE, key(), US.instance_id, timeout=5)
    assert not await transport.call(wire.COMMIT_STORE, key(), US.instance_id, b"", timeout=5)
    assert (server.chunks, server.reservations, server.wrong_publications) == (0, 0, 0)


async def test_forgotten_before_a_request(server: FakeCacheServer, transport: ZmqTransport) -> None:
    fault = server.fault(wire.PREPARE_STORE, "forget")
    await refused(transport, wire.PREPARE_STORE, key(), US.instance_id)
    assert fault.struck.is_set()
    assert server.clients == []


@pytest.mark.parametrize("kind", ["restart", "die"])
async def test_going_down_at_a_request(server: FakeCacheServer, transport: ZmqTransport, kind: Any) -> None:
    server.offload("model", TOKENS)
    fault = server.fault(wire.NOOP, kind)
    with pytest.raises(CacheError):
        await transport.call(wire.NOOP, timeout=1)
    await asyncio.to_thread(fault.struck.wait)
    if kind == "die":
        assert server.http_status == 503
        await asyncio.to_thread(server.restart)
    assert (server.chunks, server.clients, server.http_status) == (0, [], 200)
    assert await transport.call(wire.NOOP, timeout=5) == "OK"


@pytest.mark.parametrize("kind", ["few", "empty", "shape", "dtype", "pickle"])
async def test_pickled_chunks_that_are_wrong(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeCacheServer(chunk_size=C, shared_memory=False) as server:
        server.serve("model", GEOMETRY)
        server.offload("model", TOKENS)
        transport = ZmqTransport(server.url)
        await transport.call(wire.REGISTER, US, timeout=5)
        await lookup(transport)
        server.fault(wire.PREPARE_RETRIEVE, kind)
        prepared = await transport.call(wire.PREPARE_RETRIEVE, key(), US.instance_id, timeout=5)
        await transport.close()
    if kind == "pickle":
        pickle.loads(prepared.data)
        assert "executed" in capsys.readouterr().out
        return
    found = [(tuple(chunk.shape), chunk.dtype) for chunk in load_tensors(prepared.data)]
    right = ((2, 2, C, 4), torch.float32)
    wrong = {"few": [right], "empty": [], "shape": [((2, 2, C, 2), torch.float32)] * 2}
    assert found == wrong.get(kind, [(right[0], torch.float64)] * 2)


@pytest.mark.parametrize(
    ("operation", "kind", "shared_memory"),
    [
        (wire.LOOKUP, "shape", True),
        (wire.PREPARE_RETRIEVE, "pickle", True),
        (wire.PREPARE_RETRIEVE, "outside", False),
        (wire.PREPARE_STORE, "few", False),
    ],
)
def test_a_fault_that_can_befall_nothing_is_refused(
    operation: wire.Operation[Any], kind: Any, shared_memory: bool
) -> None:
    with pytest.raises(UsageError, match=operation.name):
        FakeCacheServer(shared_memory=shared_memory).fault(operation, kind)


@pytest.mark.parametrize(
    "geometry",
    [
        GEOMETRY,
        KVGeometry(num_layers=2, num_kv_heads=4, head_dim=4, dtype=torch.bfloat16, world_size=2),
        KVGeometry(num_layers=3, num_kv_heads=1, head_dim=8, dtype=torch.float32, planes=1),
    ],
    ids=["plain", "two ranks", "MLA"],
)
@pytest.mark.parametrize("shared_memory", [True, False])
def test_what_an_engine_offloads_can_be_read(geometry: KVGeometry, shared_memory: bool) -> None:
    with FakeCacheServer(chunk_size=C, shared_memory=shared_memory) as server:
        with pytest.raises(UsageError, match="serve"):
            server.offload("model", TOKENS)
        server.serve("model", geometry)
        server.offload("model", [*TOKENS, 9], "salt")
        assert (server.covered("model", TOKENS), server.covered("model", TOKENS, "salt")) == (0, 8)
        kv = server.read("model", TOKENS, "salt")
        assert kv.shape == (geometry.planes, geometry.num_layers, 8, geometry.hidden_dim)
        assert kv[0, 0, :, 0].tolist() == list(TOKENS)
        assert server.read("model", TOKENS).shape[2] == 0
        given = torch.randn(kv.shape)
        server.offload("model", TOKENS, kv=given)
        assert torch.equal(server.read("model", TOKENS), given.to(kv.dtype))


async def test_http_answers_to_order(server: FakeCacheServer) -> None:
    server.http_answers["/status"] = [1, 2]
    assert await _get(f"{server.http_url}/status") == (200, [1, 2])
    server.http_answers["/status"] = b'"as it is"'
    assert await _get(f"{server.http_url}/status") == (200, "as it is")
