"""What can be ordered to go wrong with the requests of a fake cache server."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from lmcache_stream.errors import UsageError
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.pickles import dump_tensors, load_tensors

__all__ = ["Fault", "FaultKind", "check_kind", "replies", "spoiled"]

FaultKind = Literal[
    "ignore",
    "lose",
    "hold",
    "duplicate",
    "garble",
    "wrong-operation",
    "wrong-type",
    "nothing",
    "frames",
    "unknown",
    "too-many",
    "few",
    "empty",
    "outside",
    "overlap",
    "shape",
    "dtype",
    "pickle",
    "no-room",
    "evict",
    "forget",
    "restart",
    "die",
]
"""What goes wrong with a request, or with its answer.

The request: "ignore": it is dropped. "lose": it is worked on, but not answered. "hold": it is worked on and answered
at `release`, or after some seconds. "no-room": the pool is full for it. "evict": the chunks that it is about are
dropped before, locks and reservations and all. "forget": all clients are forgotten before. "restart": it is dropped,
and the server restarts. "die": it is dropped, and the server is gone.

The answer: "duplicate": it comes twice. "garble": it is no MessagePack. "wrong-operation": it names another operation.
"wrong-type": its result is of another type. "nothing": it has no result. "frames": it has too few frames.
"unknown": it answers a request that nobody made. "too-many": it counts more chunks than were asked for.

The chunks in the answer, slots or pickled: "few": one is missing. "empty": all are. "shape", "dtype": they have another
one. "outside", "overlap": slots lie outside the pool, or on each other. "pickle": the pickle calls a function.
"""

_Reply = Callable[[], None]
_OF_SLOTS = ("outside", "overlap")
_OF_PICKLES = ("pickle",)
_OF_CHUNKS = ("few", "empty", "shape", "dtype", *_OF_SLOTS, *_OF_PICKLES)


@dataclass(eq=False)
class Fault:
    """What goes wrong with the next requests of one operation.

    Args:
        kind: See `FaultKind`.
        times: How many requests it befalls; more come through.
        after: How many requests come through before.
        seconds: After which a reply that is held is sent by itself; None: at `release`.

    Attributes:
        struck: Set when it has befallen a request.
    """

    kind: FaultKind
    times: int = 1
    after: int = 0
    seconds: float | None = None
    struck: threading.Event = field(default_factory=threading.Event)
    _held: list[_Reply] = field(default_factory=list)
    _released: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, reply: _Reply) -> None:
        """Keep a reply back until `release`."""
        with self._lock:
            if not self._released:
                self._held.append(reply)
                if self.seconds is not None:
                    timer = threading.Timer(self.seconds, self.release)
                    timer.daemon = True
                    timer.start()
                return
        reply()

    def release(self) -> None:
        """Send the replies held back."""
        with self._lock:
            self._released = True
            held, self._held = self._held, []
        for reply in held:
            reply()


def check_kind(kind: FaultKind, operation: wire.Operation[Any], *, shared_memory: bool) -> None:
    """Refuse a fault that could befall no request.

    Raises:
        UsageError: There is nothing that could go wrong so.
    """
    if kind not in _OF_CHUNKS:
        return
    if operation not in (wire.PREPARE_STORE, wire.PREPARE_RETRIEVE):
        raise UsageError(f"{operation.name} answers no chunks: order {kind!r} for prepare_store or prepare_retrieve")
    if kind in _OF_PICKLES if shared_memory else kind in _OF_SLOTS or operation is wire.PREPARE_STORE:
        transport = "over shared memory" if shared_memory else "as pickles"
        raise UsageError(f"{operation.name} has nothing of the kind {kind!r} where chunks go {transport}")


def spoiled(result: Any, kind: FaultKind, pool_bytes: int) -> Any:
    """The result of a request that found chunks, or slots for them, with the fault in it."""
    if kind == "too-many":
        return result + 1_000_000 if isinstance(result, int) else result
    if kind == "wrong-type":
        return {"surprise": ["a", "b"]}
    if kind not in _OF_CHUNKS:
        return result
    if result.get("data"):
        return {**result, "data": _spoiled_pickle(result["data"], kind)}
    slots = result["context"].get("slots", [])
    if kind in ("few", "empty"):
        result["context"]["slots"] = [] if kind == "empty" else slots[:-1]
    for slot in slots:
        if kind == "outside":
            slot["offset"] += pool_bytes
        elif kind == "overlap":
            slot["offset"] = slots[0]["offset"]
        elif kind == "shape":
            slot["shape"] = [*slot["shape"][:-1], slot["shape"][-1] // 2]
        elif kind == "dtype":
            slot["dtype"] = "float13"
    return result


def replies(frames: list[bytes], kind: FaultKind) -> list[list[bytes]]:
    """What is sent in place of an answer, at once."""
    uid, operation = frames[:2]
    if kind in ("ignore", "lose"):
        return []
    if kind == "duplicate":
        return [frames, frames]
    if kind == "garble":
        return [[uid, operation, b"\xc1\xff"]]
    if kind == "wrong-operation":
        return [[uid, msgspec.msgpack.encode(99), *frames[2:]]]
    if kind == "nothing":
        return [[uid, operation]]
    if kind == "frames":
        return [[uid]]
    if kind == "unknown":
        return [[msgspec.msgpack.encode(2**62), operation, *frames[2:]]]
    return [frames]


class _Malicious:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return print, ("a pickle of the cache server was executed",)


def _spoiled_pickle(data: bytes, kind: FaultKind) -> bytes:
    if kind == "pickle":
        return pickle.dumps([_Malicious()])
    tensors = load_tensors(data)
    if kind in ("few", "empty"):
        tensors = [] if kind == "empty" else tensors[:-1]
    elif kind == "shape":
        tensors = [tensor[..., : tensor.shape[-1] // 2].clone() for tensor in tensors]
    elif kind == "dtype":
        tensors = [tensor.double() for tensor in tensors]
    return dump_tensors(tensors)
