"""A second door to a fake cache server: the same requests, faults and answers as over ZMQ, over gRPC."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import msgspec

from lmcache_stream.kvcache.mp.grpc import METHODS
from lmcache_stream.kvcache.mp.wire import OPERATIONS, REGISTER, Operation

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from lmcache_stream.testing.fake_cache_server import FakeCacheServer

    Handler = grpc.GenericRpcHandler[Any, Any]
else:
    Handler = grpc.GenericRpcHandler

BY_PATH = {METHODS[operation.name].path: operation for operation in OPERATIONS}


class GrpcDoor(Handler):
    """gRPC on 127.0.0.1, in a thread of its own; a request that the server does not answer is refused.

    The server is running when it is entered.
    """

    def __init__(self, server: FakeCacheServer) -> None:
        self._server = server
        self._running = grpc.server(
            ThreadPoolExecutor(1), handlers=[self], options=(("grpc.max_receive_message_length", -1),)
        )
        self.url = f"grpc://127.0.0.1:{self._running.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._running.start()
        config = self._server.config()
        self._server.http_answers["/config"] = {**config, "mp": {**config["mp"], "transport": "grpc"}}
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._running.stop(None).wait()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        operation = BY_PATH[str(details.method)]
        method = METHODS[operation.name]

        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            frames = [b"", msgspec.msgpack.encode(operation.id), *arguments(operation, request)]
            replies: list[list[bytes]] = []
            self._server._handle(frames, replies.append)
            if not replies:
                context.abort(grpc.StatusCode.UNKNOWN, "Exception calling application: it failed")
            result = msgspec.msgpack.decode(replies[0][2]) if len(replies[0]) > 2 else None
            response: Any = method.response
            return response(**fields_of(result, response))

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=method.request.FromString,
            response_serializer=method.response.SerializeToString,
        )


def arguments(operation: Operation[Any], request: Any) -> list[bytes]:
    """The frames that stand for a request over ZMQ."""
    values = {field.name: value_of(request, field) for field in request.DESCRIPTOR.fields}
    return [msgspec.msgpack.encode(value) for value in ([values] if operation is REGISTER else values.values())]


def value_of(message: Any, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None:
        return {inner.name: value_of(value, inner) for inner in field.message_type.fields}
    if field.has_presence and not message.HasField(field.name):
        return None
    return value if field.type != field.TYPE_INT64 or isinstance(value, int) else list(value)


def fields_of(result: Any, response: Any) -> dict[str, Any]:
    if isinstance(result, dict):
        return {
            ("encoded_context" if name == "context" else name): (
                msgspec.msgpack.encode(value) if name == "context" else value
            )
            for name, value in result.items()
        }
    return {} if result is None else {response.DESCRIPTOR.fields[0].name: result}
