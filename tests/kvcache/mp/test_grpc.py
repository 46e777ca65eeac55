from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import msgspec
import pytest

from lmcache_stream.errors import CacheConnectionError, CacheError, CacheProtocolError, CacheTimeout, UsageError
from lmcache_stream.kvcache.mp.grpc import CLIENT_ID, METHODS, GrpcTransport, decode_response, encode_request
from lmcache_stream.kvcache.mp.transport import UNHEARD, Transport, open_transport
from lmcache_stream.kvcache.mp.wire import (
    COMMIT_RETRIEVE,
    COMMIT_STORE,
    END_SESSION,
    FREE_LOOKUP_LOCKS,
    GET_CHUNK_SIZE,
    LOOKUP,
    NOOP,
    OPERATIONS,
    PING,
    PREPARE_RETRIEVE,
    PREPARE_STORE,
    QUERY_PREFETCH_STATUS,
    REGISTER,
    UNREGISTER,
    WAIT_PREFETCH_STATUS,
    CacheKey,
    Operation,
    PreparedRetrieve,
    PreparedStore,
    Registered,
    Registration,
    RetrieveSlots,
    Slot,
    StoreSlots,
)

from .sockets import patience, sockets_to

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    Handler = grpc.GenericRpcHandler[Any, Any]
    Answer = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[dict[str, Any]]]
else:
    Handler = grpc.GenericRpcHandler

KEY = CacheKey("m", 2, 1, (5, 2**40, 0), 0, 32, "r", cache_salt="s", num_kv_readers=2)
LOOKUP_KEY = CacheKey("m", 1, None, (), 0, 0, "r")
BY_PATH = {method.path: (name, method) for name, method in METHODS.items()}
OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0))


class Server(Handler):
    """Answers each operation with the fields that a test gives for it, and remembers what was asked."""

    def __init__(self, **answers: Answer | dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[Any] = []
        self.clients: list[tuple[str, bytes]] = []
        self.entered = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name, method = BY_PATH[str(details.method)]

        async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
            self.asked.append(request)
            self.clients.append((context.peer(), metadata[CLIENT_ID]))
            self.entered.set()
            answer = self.answers.get(name, {})
            response: Any = method.response
            return response(**(answer if isinstance(answer, dict) else await answer(request, context)))

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=method.request.FromString,
            response_serializer=method.response.SerializeToString,
        )


@contextlib.asynccontextmanager
async def serving(server: Server, address: str = "127.0.0.1:0", *, lanes: int = 2) -> AsyncIterator[GrpcTransport]:
    running = grpc.aio.server(options=OPTIONS)
    running.add_generic_rpc_handlers((server,))
    port = running.add_insecure_port(address)
    await running.start()
    url = f"grpc+unix://{address.removeprefix('unix:')}" if address.startswith("unix:") else f"grpc://127.0.0.1:{port}"
    transport = GrpcTransport(url, lanes=lanes)
    try:
        yield transport
    finally:
        await transport.close()
        await running.stop(None)


async def forever(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


def test_every_operation_has_its_method() -> None:
    assert set(METHODS) == {operation.name for operation in OPERATIONS}
    assert METHODS["prepare_store"].path == "/lmcache.mp.EngineDrivenService/PrepareStore"


# Written by hand from protobuf's wire format, so that field numbers and types are not taken from the code under test.
@pytest.mark.parametrize(
    ("operation", "args", "body"),
    [
        (NOOP, (), b""),
        (PING, (None,), b""),
        (PING, (0,), b"\x08\x00"),
        (END_SESSION, ("r",), b"\x0a\x01r"),
        (WAIT_PREFETCH_STATUS, ("r", 0.5), b"\x0a\x01r\x11" + b"\0\0\0\0\0\0\xe0\x3f"),
        (UNREGISTER, (2**62,), b"\x08" + b"\x80" * 8 + b"\x40"),
        (
            REGISTER,
            (Registration(1, "m", 2, 32, 4, 256, "float32", True),),
            b"\x08\x01\x12\x01m\x18\x02\x20\x20\x28\x04\x30\x80\x02\x3a\x07float32\x40\x01",
        ),
        (
            COMMIT_STORE,
            (KEY, 3, b"xy"),
            b"\x0a\x1b"
            + b"\x0a\x01m\x10\x02\x18\x01\x22\x08\x05" + b"\x80" * 5 + b"\x20\x00"
            + b"\x30\x20\x3a\x01r\x42\x01s\x50\x02"
            + b"\x10\x03\x1a\x02xy",
        ),
        (LOOKUP, (LOOKUP_KEY, 2), b"\x0a\x0a\x0a\x01m\x10\x01\x3a\x01r\x50\x01\x10\x02"),
    ],
)  # fmt: skip
def test_requests_byte_by_byte(operation: Operation[Any], args: tuple[Any, ...], body: bytes) -> None:
    assert encode_request(operation, args) == body


CONTEXT = msgspec.msgpack.encode(
    {"slots": [{"offset": 64, "length": 8, "shape": [2, 1], "dtype": "float32"}], "chunk_indices": [3]}
)
SLOT = Slot(offset=64, length=8, shape=(2, 1), dtype="float32")
RETRIEVED = PreparedRetrieve(True, b"", RetrieveSlots((SLOT,)))
REGISTRATION = Registration(1, "m", 1, 32, 4, 64, "float32", True, 9)


@pytest.mark.parametrize(
    ("operation", "args", "fields", "result"),
    [
        (LOOKUP, (LOOKUP_KEY, 1), {}, None),
        (QUERY_PREFETCH_STATUS, ("r",), {}, None),
        (QUERY_PREFETCH_STATUS, ("r",), {"chunk_count": 0}, 0),
        (WAIT_PREFETCH_STATUS, ("r", 1.0), {"chunk_count": 3}, 3),
        (FREE_LOOKUP_LOCKS, (LOOKUP_KEY, 1), {}, None),
        (END_SESSION, ("r",), {}, None),
        (REGISTER, (REGISTRATION,), {}, Registered("", 0)),
        (REGISTER, (REGISTRATION,), {"shm_name": "p", "pool_size": 7}, Registered("p", 7)),
        (UNREGISTER, (1,), {}, None),
        (PREPARE_STORE, (KEY, 1), {}, PreparedStore()),
        (PREPARE_STORE, (KEY, 1), {"encoded_context": CONTEXT}, PreparedStore(StoreSlots((SLOT,), (3,)))),
        (COMMIT_STORE, (KEY, 1, b"data"), {"success": True}, True),
        (PREPARE_RETRIEVE, (KEY, 1), {"success": True, "data": b"x"}, PreparedRetrieve(True, b"x")),
        (PREPARE_RETRIEVE, (KEY, 1), {"success": True, "encoded_context": CONTEXT}, RETRIEVED),
        (COMMIT_RETRIEVE, (KEY, 1), {"success": False}, False),
        (GET_CHUNK_SIZE, (), {"chunk_size": 256}, 256),
        (PING, (None,), {"ok": True}, True),
        (NOOP, (), {"message": "OK"}, "OK"),
    ],
)  # fmt: skip
async def test_calls(operation: Operation[Any], args: tuple[Any, ...], fields: dict[str, Any], result: Any) -> None:
    async with serving(Server(**{operation.name: fields})) as transport:
        assert isinstance(transport, Transport)
        assert await transport.call(operation, *args, timeout=10) == result


@pytest.mark.parametrize("operation", [REGISTER, PREPARE_STORE, GET_CHUNK_SIZE])
def test_a_response_that_makes_no_sense(operation: Operation[Any]) -> None:
    with pytest.raises(CacheProtocolError, match=operation.name):
        decode_response(operation, b"\xff")


def test_a_context_that_makes_no_sense() -> None:
    body = METHODS["prepare_store"].response(encoded_context=b"\x93").SerializeToString()
    with pytest.raises(CacheProtocolError, match="prepare_store"):
        decode_response(PREPARE_STORE, body)


async def test_over_a_unix_socket(tmp_path: Path) -> None:
    async with serving(Server(noop={"message": "OK"}), f"unix:{tmp_path}/s") as transport:
        assert await transport.call(NOOP, timeout=10) == "OK"


async def test_each_lane_is_a_client_and_a_connection_of_its_own() -> None:
    server = Server()
    async with serving(server, lanes=2) as transport:
        for lane in (0, 1, 2, 1):
            await transport.call(PREPARE_STORE, KEY, 1, timeout=10, lane=lane)
    peers, ids = zip(*server.clients, strict=True)
    assert len(set(peers)) == len(set(ids)) == 3
    assert server.clients[1] == server.clients[3]


async def test_messages_of_any_size() -> None:
    async def echo(request: Any, context: Any) -> dict[str, Any]:
        return {"success": True, "data": bytes(len(request.key.token_ids) * 1000)}

    server = Server(prepare_retrieve=echo)
    async with serving(server) as transport:
        data = bytes(9 << 20)
        await transport.call(COMMIT_STORE, KEY, 1, data, timeout=30, lane=1)
        assert server.asked[0].data == data
        many = CacheKey("m", 1, 0, tuple(range(9000)), 0, 32, "r")
        answer = await transport.call(PREPARE_RETRIEVE, many, 1, timeout=30, lane=2)
        assert len(answer.data) == 9_000_000


async def test_the_servers_own_words() -> None:
    async def refuse(request: Any, context: Any) -> dict[str, Any]:
        await context.abort(grpc.StatusCode.UNKNOWN, "Exception calling application: not registered for instance ID 5")
        raise AssertionError

    async with serving(Server(prepare_store=refuse)) as transport:
        with pytest.raises(CacheError, match=r"refused prepare_store: not registered for instance ID 5$"):
            await transport.call(PREPARE_STORE, KEY, 5, timeout=10)


async def test_an_operation_that_the_server_lacks() -> None:
    async def lacking(request: Any, context: Any) -> dict[str, Any]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not enabled on this server")
        raise AssertionError

    async with serving(Server(prepare_store=lacking)) as transport:
        with pytest.raises(CacheConnectionError, match=r"not enabled.*--supported-transfer-mode auto"):
            await transport.call(PREPARE_STORE, KEY, 5, timeout=10)


async def test_a_late_answer_is_a_timeout() -> None:
    async with serving(Server(prepare_store=forever)) as transport:
        with pytest.raises(CacheTimeout, match=r"prepare_store within 0.2 s"):
            await transport.call(PREPARE_STORE, KEY, 5, timeout=0.2)
        assert await transport.call(NOOP, timeout=10) == ""


async def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_stream.kvcache.mp.grpc.CONNECT_GRACE", 0.2)
    async with serving(Server()) as gone:
        url = gone.url
    transport = GrpcTransport(url)
    with pytest.raises(CacheConnectionError, match=rf"no cache server answers at {url} .*--transport grpc"):
        await transport.call(NOOP, timeout=30)
    await transport.close()


async def test_a_connection_that_nobody_acknowledges_is_given_up() -> None:
    async with serving(Server(), lanes=1) as transport:
        for lane in (0, 1):
            await transport.call(NOOP, timeout=10, lane=lane)
        kept = [patience(each) for each in sockets_to(int(transport.url.rpartition(":")[2]))]
        assert kept == [UNHEARD] * 2


async def test_a_server_that_went_away_and_came_back(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    first, second = Server(noop=forever), Server(noop={"message": "OK"})
    async with serving(first, address) as doomed:
        transport = GrpcTransport(doomed.url)
        call = asyncio.create_task(transport.call(NOOP, timeout=30))
        await first.entered.wait()
    with pytest.raises(CacheConnectionError, match="broke before noop was answered"):
        await call
    async with serving(second, address):
        assert await transport.call(NOOP, timeout=30) == "OK"
        await transport.close()


async def test_a_cancelled_call_is_cancelled_at_the_server_too() -> None:
    left = asyncio.Event()

    async def wait(request: Any, context: Any) -> dict[str, Any]:
        try:
            return await forever(request, context)
        finally:
            left.set()

    server = Server(prepare_store=wait)
    async with serving(server) as transport:
        call = asyncio.create_task(transport.call(PREPARE_STORE, KEY, 1, timeout=30))
        await server.entered.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await left.wait()
        assert await transport.call(NOOP, timeout=10) == ""


async def test_closing_fails_calls_in_flight_and_later_ones() -> None:
    server = Server(prepare_store=forever)
    async with serving(server) as transport:
        call = asyncio.create_task(transport.call(PREPARE_STORE, KEY, 1, timeout=30))
        await server.entered.wait()
        await transport.close()
        with pytest.raises(CacheConnectionError, match="is closed"):
            await call
        with pytest.raises(CacheConnectionError, match="is closed"):
            await transport.call(NOOP, timeout=30)
        await transport.close()


async def test_closing_fails_calls_that_wait_for_a_connection(tmp_path: Path) -> None:
    transport = GrpcTransport(f"grpc+unix://{tmp_path}/nobody")
    call = asyncio.create_task(transport.call(NOOP, timeout=30))
    await asyncio.sleep(0)
    await transport.close()
    with pytest.raises(CacheConnectionError, match="is closed"):
        await call


async def test_a_call_is_cancelled_while_it_waits_for_a_connection(tmp_path: Path) -> None:
    transport = GrpcTransport(f"grpc+unix://{tmp_path}/nobody")
    call = asyncio.create_task(transport.call(NOOP, timeout=30))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await transport.close()


@pytest.mark.skipif(tuple(map(int, grpc.__version__.split(".")[:2])) < (1, 70), reason="older grpcio keeps it itself")
async def test_a_cancelled_call_keeps_no_connection_alive(tmp_path: Path) -> None:
    transport = GrpcTransport(f"grpc+unix://{tmp_path}/nobody")
    alive = weakref.ref(transport)
    gc.disable()
    try:
        call = asyncio.create_task(transport.call(NOOP, timeout=30))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        await transport.close()
        del call, transport
        await asyncio.sleep(0)
        assert alive() is None
    finally:
        gc.enable()


async def test_belongs_to_one_loop() -> None:
    async with serving(Server()) as transport:
        await transport.call(NOOP, timeout=10)

        def elsewhere() -> None:
            asyncio.run(transport.call(NOOP, timeout=10))

        with pytest.raises(UsageError, match="another event loop"):
            await asyncio.to_thread(elsewhere)


@pytest.mark.parametrize("url", ["grpc://localhost", "grpc://", "grpc://h:99999", "grpc+unix://", "grpc://h:1/path"])
def test_a_url_that_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="grpc://host:port"):
        GrpcTransport(url)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lmcache_stream.kvcache.mp.grpc")
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(UsageError, match=r"lmcache-stream\[grpc\]"):
        open_transport("grpc://localhost:5555")


def test_leaves_the_default_descriptor_pool_alone() -> None:
    code = (
        "import lmcache_stream.kvcache.mp.grpc\n"
        "from google.protobuf import descriptor_pb2, descriptor_pool\n"
        "file = descriptor_pb2.FileDescriptorProto(name='common.proto', package='lmcache.mp', syntax='proto3')\n"
        "file.message_type.add(name='IpcCacheServerKey')\n"
        "descriptor_pool.Default().Add(file)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
