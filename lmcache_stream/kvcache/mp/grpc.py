"""The same requests over gRPC: `grpc://host:port`, `grpc+unix:///path`. Needs the extra `grpc`."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import uuid
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import grpc
import grpc.aio
import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from lmcache_stream import observe
from lmcache_stream.errors import CacheConnectionError, CacheError, CacheProtocolError, CacheTimeout, UsageError
from lmcache_stream.kvcache.mp.transport import CONNECT_GRACE, UNHEARD
from lmcache_stream.kvcache.mp.wire import (
    OPERATIONS,
    PREPARE_RETRIEVE,
    PREPARE_STORE,
    REGISTER,
    Operation,
    PreparedRetrieve,
    PreparedStore,
    Registered,
    RetrieveSlots,
    StoreSlots,
    is_large,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from google.protobuf.message import Message

__all__ = ["GrpcTransport", "Method", "load_methods"]

R = TypeVar("R")

logger: logging.Logger = logging.getLogger(__name__)

LONGEST_REQUEST = (1 << 31) - (1 << 26)
"""Bytes of chunks in a request: protobuf has no message of 2 GiB, and one says more than the chunks."""

OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each channel
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    # The time-out also bounds how long the system waits for an acknowledgement, but only where there are pings. Servers
    # turn away who pings more often than every five minutes; calls are over by then.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", int(1000 * UNHEARD)),
)

SCALARS = dict(descriptor_pb2.FieldDescriptorProto.Type.items())

# The server works on data requests of one client id in order, on one thread.
CLIENT_ID = "lmcache-client-id-bin"


@dataclass(frozen=True, slots=True)
class Method:
    """One remote procedure: the path of its URL and the classes of its messages."""

    path: str
    request: type[Message]
    response: type[Message]


def load_methods() -> dict[str, Method]:
    """Read the interface from `lmcache_mp.proto`, by operation name (`prepare_store` for `PrepareStore`).

    The messages live in a descriptor pool of their own: `lmcache` may be imported in the same process.
    """
    source = resources.files(__package__).joinpath("lmcache_mp.proto").read_text("utf-8")
    package = re.findall(r"^package (\S+);", source, re.MULTILINE)[0]
    file = descriptor_pb2.FileDescriptorProto(name="lmcache_mp.proto", package=package, syntax="proto3")
    calls: list[tuple[str, str, str, str]] = []
    for kind, name, body in re.findall(r"^(message|service) (\w+) \{\n(.*?)^\}", source, re.MULTILINE | re.DOTALL):
        if kind == "message":
            _add_message(file, package, name, body)
        else:
            calls += [(name, *call) for call in re.findall(r"rpc (\w+)\((\w+)\) returns \((\w+)\);", body)]

    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)

    def message(name: str) -> type[Message]:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))

    return {
        re.sub(r"(?<!^)(?=[A-Z])", "_", call).lower(): Method(
            f"/{package}.{service}/{call}", message(request), message(response)
        )
        for service, call, request, response in calls
    }


def _add_message(file: descriptor_pb2.FileDescriptorProto, package: str, name: str, body: str) -> None:
    message = file.message_type.add(name=name)
    for label, type_name, field_name, number in re.findall(r"^\s*(?:(\w+) )?(\w+) (\w+) = (\d+);", body, re.MULTILINE):
        field = message.field.add(name=field_name, number=int(number))
        repeated = label == "repeated"
        field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
        scalar = f"TYPE_{type_name.upper()}"
        if scalar in SCALARS:
            field.type = SCALARS[scalar]
        else:
            field.type, field.type_name = field.TYPE_MESSAGE, f".{package}.{type_name}"
        if label == "optional":
            field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field_name}")


METHODS = load_methods()

_missing = {operation.name for operation in OPERATIONS} - METHODS.keys()
assert not _missing, _missing


def encode_request(operation: Operation[Any], args: tuple[Any, ...]) -> bytes:
    """Write a request: the arguments are its fields in order, or a single struct holds them all."""
    request: Any = METHODS[operation.name].request
    if len(args) == 1 and isinstance(args[0], msgspec.Struct):
        values = _fields(args[0])
    else:
        values = {
            field.name: _fields(value) if isinstance(value, msgspec.Struct) else value
            for field, value in zip(request.DESCRIPTOR.fields, args, strict=True)
            if value is not None
        }
    body: bytes = request(**values).SerializeToString()
    return body


def decode_response(operation: Operation[R], body: bytes) -> R:
    """Read a response.

    Raises:
        CacheProtocolError: It is no such response.
    """
    result: Any
    try:
        response: Any = METHODS[operation.name].response.FromString(body)
        if operation is REGISTER:
            result = Registered(response.shm_name, response.pool_size)
        elif operation is PREPARE_STORE:
            result = PreparedStore(_context(response, StoreSlots))
        elif operation is PREPARE_RETRIEVE:
            result = PreparedRetrieve(response.success, response.data, _context(response, RetrieveSlots))
        else:
            result = _only_field(response)
    except CacheError:
        raise
    except Exception as error:  # protobuf's DecodeError and msgspec's errors have no common base
        raise CacheProtocolError(f"the cache server's answer to {operation.name} cannot be read: {error}") from error
    return result  # type: ignore[no-any-return]


def _fields(struct: msgspec.Struct) -> Mapping[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}


C = TypeVar("C", StoreSlots, RetrieveSlots)


def _context(response: Any, kind: type[C]) -> C:
    return msgspec.msgpack.decode(response.encoded_context, type=kind) if response.encoded_context else kind()


def _only_field(response: Any) -> Any:
    fields = response.DESCRIPTOR.fields
    if not fields or (fields[0].has_presence and not response.HasField(fields[0].name)):
        return None
    return getattr(response, fields[0].name)


class GrpcTransport:
    """A `Transport` over gRPC channels: one for control, one for each lane. Belongs to the first loop that uses it.

    Args:
        url: `grpc://host:port` or `grpc+unix:///path`.
        lanes: Data connections beside the control connection.
    """

    def __init__(self, url: str, *, lanes: int = 2) -> None:
        self.url = url
        self.lanes = lanes
        self.longest_request = LONGEST_REQUEST
        self._target = _target(url)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: list[_Connection] = []
        self._under_way: set[grpc.aio.Call] = set()
        self._closed = False

    async def call(self, operation: Operation[R], *args: Any, timeout: float, lane: int = 0) -> R:
        """See `Transport.call`; a request that the server refuses raises `CacheError` with the server's own words."""
        with observe.rpc(operation.name, self.url, logger):
            return await self._call(operation, args, timeout, lane)

    async def _call(self, operation: Operation[R], args: tuple[Any, ...], timeout: float, lane: int) -> R:
        connection = self._connection(lane)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        if is_large(args):
            body = await asyncio.to_thread(encode_request, operation, args)
        else:
            body = encode_request(operation, args)
        try:
            await self._connected(connection, operation, min(CONNECT_GRACE, deadline - loop.time()))
            left = max(deadline - loop.time(), 0.001)
            under_way = connection.method(operation)(
                body, timeout=left if left < math.inf else None, metadata=connection.metadata
            )
            _outlive_the_loop(under_way)
            self._under_way.add(under_way)
            try:
                answer: bytes = await under_way
            finally:
                self._under_way.discard(under_way)
        except grpc.aio.AioRpcError as error:
            raise self._mapped(error, operation, timeout) from error
        except grpc.aio.UsageError:
            raise self._gone() from None
        except asyncio.CancelledError:
            # A channel that is closed cancels its calls, and a loop that ends those that it can see.
            if not _is_cancelled():
                raise self._gone() from None
            raise
        if is_large([answer]):
            return await asyncio.to_thread(decode_response, operation, answer)
        return decode_response(operation, answer)

    async def close(self) -> None:
        """See `Transport.close`."""
        if self._closed:
            return
        self._closed = True
        for call in tuple(self._under_way):  # which a channel of older versions waits for
            call.cancel()
        await asyncio.shield(asyncio.gather(*(connection.channel.close(None) for connection in self._connections)))

    def _connection(self, lane: int) -> _Connection:
        if self._closed:
            raise self._gone()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._connections = [_Connection(self._target) for _ in range(self.lanes + 1)]
        elif self._loop is not loop:
            raise UsageError(f"the connection to {self.url} belongs to another event loop: open one for each loop")
        return self._connections[lane]

    async def _connected(self, connection: _Connection, operation: Operation[Any], grace: float) -> None:
        try:
            async with asyncio.timeout(grace):
                await connection.channel.channel_ready()
        except TimeoutError:
            raise self._nobody(operation) from None

    def _gone(self) -> CacheConnectionError:
        return CacheConnectionError(f"the connection to {self.url} is closed")

    def _nobody(self, operation: Operation[Any]) -> CacheConnectionError:
        return CacheConnectionError(
            f"no cache server answers at {self.url} (for {operation.name}): start it with --transport grpc, or correct "
            "the URL (its --port, 5555 by default)"
        )

    def _mapped(self, error: grpc.aio.AioRpcError, operation: Operation[Any], timeout: float) -> CacheError:
        code, words = error.code(), error.details() or "no reason given"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CacheTimeout(f"the cache server at {self.url} did not answer {operation.name} within {timeout:g} s")
        if code is grpc.StatusCode.UNAVAILABLE:
            return CacheConnectionError(
                f"the connection to {self.url} broke before {operation.name} was answered ({words})"
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return CacheConnectionError(
                f"the cache server at {self.url} does not offer {operation.name} ({words}): start the LMCache server "
                "with --supported-transfer-mode auto"
            )
        words = words.removeprefix("Exception calling application: ")
        return CacheError(f"the cache server at {self.url} refused {operation.name}: {words}")


def _is_cancelled() -> bool:
    """Whether the task that asks is. A frame that held the task would be held by its error (see `finishing`)."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _outlive_the_loop(call: Any) -> None:
    """Hide the task of a call from the end of the loop, which would cancel it: its caller decides about it."""
    task = getattr(call, "_invocation_task", None)
    if isinstance(task, asyncio.Task):
        asyncio._unregister_task(task)


class _Connection:
    def __init__(self, target: str) -> None:
        self.channel = grpc.aio.insecure_channel(target, options=OPTIONS)
        self.metadata = ((CLIENT_ID, uuid.uuid4().bytes),)
        self._methods: dict[str, Callable[..., Any]] = {}

    def method(self, operation: Operation[Any]) -> Callable[..., Any]:
        if operation.name not in self._methods:
            self._methods[operation.name] = self.channel.unary_unary(
                METHODS[operation.name].path, request_serializer=None, response_deserializer=None
            )
        return self._methods[operation.name]


def _target(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "grpc+unix" and (parts.netloc or parts.path).strip("/"):
        return f"unix:{parts.netloc}{parts.path}"
    try:
        if parts.scheme == "grpc" and parts.hostname and parts.port and parts.path in ("", "/"):
            return f"dns:///{parts.netloc}"
    except ValueError:
        pass
    raise UsageError(f"{url!r} is no gRPC address: use grpc://host:port or grpc+unix:///path")
