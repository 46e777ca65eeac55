"""The messages of an LMCache MP server, and their MessagePack frames. No I/O.

A request is `[uid, operation, argument, ...]`, one frame each; its reply is `[uid, operation, result]`, or two frames
where the result is nothing. Replies come in any order. Source: the multiprocess protocol of LMCache 0.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np

from lmcache_stream.errors import CacheProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "COMMIT_RETRIEVE",
    "COMMIT_STORE",
    "END_SESSION",
    "FREE_LOOKUP_LOCKS",
    "GET_CHUNK_SIZE",
    "LOOKUP",
    "NOOP",
    "OPERATIONS",
    "PING",
    "PREPARE_RETRIEVE",
    "PREPARE_STORE",
    "QUERY_PREFETCH_STATUS",
    "REGISTER",
    "UNREGISTER",
    "WAIT_PREFETCH_STATUS",
    "CacheKey",
    "Operation",
    "PreparedRetrieve",
    "PreparedStore",
    "Registered",
    "Registration",
    "RetrieveSlots",
    "Slot",
    "StoreSlots",
    "decode_result",
    "encode_request",
    "is_large",
    "split_reply",
]

LARGE = 1 << 20
"""Bytes from which a message is better written and read off the event loop."""

R = TypeVar("R")
Buffer = bytes | bytearray | memoryview


class CacheKey(msgspec.Struct, frozen=True):
    """Which chunks of which sequence.

    Args:
        model_name: The model whose KV it is.
        world_size: Ranks that share the KV heads.
        worker_id: The rank; None for a lookup, which means all ranks.
        token_ids: The sequence.
        start: First token.
        end: One behind the last token, a multiple of the chunk size.
        request_id: Names the session; no part of the cache's identity.
        cache_salt: Part of the cache's identity; at most 128 characters without `@`, `/`, `\\` and NUL.
        request_configs: Nothing of ours.
        num_kv_readers: How many times each chunk found by a lookup will be read.
    """

    model_name: str
    world_size: int
    worker_id: int | None
    token_ids: tuple[int, ...]
    start: int
    end: int
    request_id: str
    cache_salt: str = ""
    request_configs: None = None
    num_kv_readers: int = 1


class Registration(msgspec.Struct, frozen=True):
    """What a client tells about the chunks that it will store.

    Args:
        instance_id: Unique per client, below 2**63.
        model_name: A name; chunks are addressed by the name in the key, not by this one.
        world_size: Ranks that share the KV heads.
        block_size: Tokens an engine block.
        num_layers: Layers, `L`.
        hidden_dim_size: Stored values a token and layer of one rank.
        dtype_str: Name of the dtype, without `torch.`.
        use_mla: A chunk is `[L, slots, width]` if true, else `[2, L, slots, width]`.
        num_physical_slots: Token slots a chunk; None: the server's chunk size.
    """

    instance_id: int
    model_name: str
    world_size: int
    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    use_mla: bool
    num_physical_slots: int | None = None


class Registered(msgspec.Struct, frozen=True):
    """The server's shared-memory segment: its name, empty without shared memory, and its bytes.

    The name has to be there: taken to have none, a server would publish slots that nobody writes.
    """

    shm_name: str
    pool_size: int = 0


class Slot(msgspec.Struct, frozen=True):
    """Where one chunk of one rank lies in the segment: byte offset and length, shape, dtype without `torch.`."""

    offset: int
    length: int
    shape: tuple[int, ...]
    dtype: str


class StoreSlots(msgspec.Struct, frozen=True):
    """Slots to write, and the index of the chunk that each is for; both None where chunks travel as pickles."""

    slots: tuple[Slot, ...] | None = None
    chunk_indices: tuple[int, ...] | None = None


class PreparedStore(msgspec.Struct, frozen=True):
    """The answer to `prepare_store`. Chunks that the cache has already, or has no room for, get no slot."""

    context: StoreSlots = msgspec.field(default_factory=StoreSlots)


class RetrieveSlots(msgspec.Struct, frozen=True):
    """Slots to read, one a chunk; empty where chunks travel as pickles."""

    slots: tuple[Slot, ...] = ()


class PreparedRetrieve(msgspec.Struct, frozen=True):
    """The answer to `prepare_retrieve`: slots, or a pickled list of tensors in `data`."""

    success: bool
    data: bytes | memoryview = b""
    context: RetrieveSlots = msgspec.field(default_factory=RetrieveSlots)


class _PreparedRetrieveFrame(msgspec.Struct, frozen=True):
    success: bool
    data: memoryview | None = None
    context: RetrieveSlots = msgspec.field(default_factory=RetrieveSlots)


@dataclass(frozen=True, slots=True)
class Operation(Generic[R]):
    """One remote procedure.

    Args:
        name: Its name.
        id: Its number on the wire.
        result: The type of its result.
        moves_data: Whether the server works on it in the order of its connection, on a thread of that connection.
    """

    name: str
    id: int
    result: Any
    moves_data: bool = False


LOOKUP: Operation[None] = Operation("lookup", 8, None)
QUERY_PREFETCH_STATUS: Operation[int | None] = Operation("query_prefetch_status", 9, int | None)
WAIT_PREFETCH_STATUS: Operation[int | None] = Operation("wait_prefetch_status", 10, int | None)
FREE_LOOKUP_LOCKS: Operation[None] = Operation("free_lookup_locks", 12, None)
END_SESSION: Operation[None] = Operation("end_session", 13, None)
REGISTER: Operation[Registered] = Operation("register_kv_cache_engine_driven_context", 14, Registered)
UNREGISTER: Operation[None] = Operation("unregister_kv_cache_engine_driven_context", 15, None)
PREPARE_STORE: Operation[PreparedStore] = Operation("prepare_store", 16, PreparedStore, moves_data=True)
COMMIT_STORE: Operation[bool] = Operation("commit_store", 17, bool, moves_data=True)
PREPARE_RETRIEVE: Operation[PreparedRetrieve] = Operation("prepare_retrieve", 18, PreparedRetrieve, moves_data=True)
COMMIT_RETRIEVE: Operation[bool] = Operation("commit_retrieve", 19, bool, moves_data=True)
GET_CHUNK_SIZE: Operation[int] = Operation("get_chunk_size", 21, int)
PING: Operation[bool] = Operation("ping", 22, bool)
NOOP: Operation[str] = Operation("noop", 24, str)

OPERATIONS: tuple[Operation[Any], ...] = (
    LOOKUP,
    QUERY_PREFETCH_STATUS,
    WAIT_PREFETCH_STATUS,
    FREE_LOOKUP_LOCKS,
    END_SESSION,
    REGISTER,
    UNREGISTER,
    PREPARE_STORE,
    COMMIT_STORE,
    PREPARE_RETRIEVE,
    COMMIT_RETRIEVE,
    GET_CHUNK_SIZE,
    PING,
    NOOP,
)

_encode = msgspec.msgpack.Encoder().encode
_decode_uid = msgspec.msgpack.Decoder(int).decode
_decode_operation = msgspec.msgpack.Decoder(int | str).decode
_decode_result = {
    operation.name: msgspec.msgpack.Decoder(
        _PreparedRetrieveFrame if operation is PREPARE_RETRIEVE else operation.result
    ).decode
    for operation in OPERATIONS
}


def encode_request(uid: int, operation: Operation[Any], args: Sequence[object]) -> list[Buffer]:
    """Write a request as frames, one an argument."""
    return [_encode(uid), _encode(operation.id), *map(_encode_argument, args)]


def is_large(parts: Sequence[object]) -> bool:
    """Tell whether writing, or reading, a message of these parts takes long."""
    return any(isinstance(part, bytes) and len(part) >= LARGE for part in parts)


def _encode_argument(arg: object) -> Buffer:
    if not isinstance(arg, bytes) or len(arg) < LARGE:
        return _encode(arg)
    # The one copy that a frame takes, without holding the interpreter's lock all the while.
    frame = np.empty(5 + len(arg), np.uint8)
    frame[:5] = np.frombuffer(b"\xc6" + len(arg).to_bytes(4, "big"), np.uint8)
    frame[5:] = np.frombuffer(arg, np.uint8)
    return frame.data


def split_reply(frames: Sequence[Buffer]) -> tuple[int, int | str, Buffer | None]:
    """Read a reply's uid and operation, and leave its result encoded; None: the result is nothing.

    Raises:
        CacheProtocolError: It is no reply.
    """
    if len(frames) not in (2, 3):
        raise CacheProtocolError(f"the cache server sent {len(frames)} frames where a reply has two or three")
    try:
        return _decode_uid(frames[0]), _decode_operation(frames[1]), frames[2] if len(frames) == 3 else None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CacheProtocolError(f"the cache server sent a reply that cannot be read: {error}") from error


def decode_result(operation: Operation[R], frame: Buffer | None) -> R:
    """Read the result of `operation` from its frame, without copying bytes in it.

    Raises:
        CacheProtocolError: It is not such a result.
    """
    result: Any = None
    try:
        if frame is not None:
            result = _decode_result[operation.name](frame)
        elif operation.result not in (None, int | None):
            raise CacheProtocolError(f"the cache server answered {operation.name} with nothing")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CacheProtocolError(f"the cache server's answer to {operation.name} cannot be read: {error}") from error
    if isinstance(result, _PreparedRetrieveFrame):
        result = PreparedRetrieve(result.success, b"" if result.data is None else result.data, result.context)
    return result  # type: ignore[no-any-return]
