"""A cache server for tests: the LMCache MP server's manners without LMCache, and faults to order.

It has a real ZMQ ROUTER, a real POSIX shared-memory segment and a real HTTP API, and behaves as the real server does: a
request that fails is not answered; equal keys collide; what was reserved is published as it is when it is committed, or
when its client goes away; a lookup of a model that nobody has registered finds nothing.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
import zmq

from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.pickles import dump_tensors, load_tensors

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from lmcache_stream.geometry import KVGeometry

__all__ = ["FakeCacheServer", "Fault", "FaultKind"]

FaultKind = Literal[
    "ignore", "lose", "hold", "duplicate", "garble", "wrong-operation", "few", "outside", "overlap", "shape", "dtype"
]

UNWRITTEN = 0xA5
"""What the bytes of a reserved slot are before the client writes them."""

_ALIGNMENT = 4096
_ChunkId = tuple[str, int, int, str, tuple[int, ...]]
_Reply = Callable[[], None]


class _Refused(Exception):
    """A handler failed: there is no answer."""


@dataclass(eq=False)
class Fault:
    """What goes wrong with the next requests of one operation.

    Args:
        kind: "ignore": the request is dropped. "lose": it is worked on, but not answered. "hold": it is worked on and
            answered at `release`. "duplicate": it is answered twice. "garble": the answer is no MessagePack.
            "wrong-operation": the answer names another operation. "few": a slot is missing. "outside", "shape",
            "overlap", "shape", "dtype": the slots named lie outside the pool or on each other, or have another shape or
            dtype.
        times: How many requests it befalls; more come through.
    """

    kind: FaultKind
    times: int = 1
    struck: threading.Event = field(default_factory=threading.Event)
    _held: list[_Reply] = field(default_factory=list)
    _released: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, reply: _Reply) -> None:
        """Keep a reply back until `release`."""
        with self._lock:
            if not self._released:
                self._held.append(reply)
                return
        reply()

    def release(self) -> None:
        """Send the replies held back."""
        with self._lock:
            self._released = True
            held, self._held = self._held, []
        for reply in held:
            reply()


@dataclass
class _Chunk:
    offset: int
    length: int
    shape: tuple[int, ...]
    dtype: str
    read_locks: int = 0


@dataclass
class _Session:
    lookup: wire.CacheKey | None = None
    hit: int | None = None


class FakeCacheServer:
    """A cache server on 127.0.0.1, in threads of its own. Use it as a context manager, or call `start` and `stop`.

    Args:
        chunk_size: Tokens a chunk.
        pool_bytes: Bytes of the pool. It never evicts; what does not fit gets no slot.
        shared_memory: Whether chunks go through shared memory; else as pickles.
        transfer_mode: What `/config` says. In "lmcache_driven" the operations that move data are not answered.
        eviction_policy: What `/config` says.
        conf_route: Answer `/conf` and not `/config`.

    Attributes:
        calls: How often each operation was called.
        wrong_publications: Chunks published although nobody had written them.
        wrong_unlocks: Chunks unlocked more often than they were locked.
    """

    def __init__(
        self,
        *,
        chunk_size: int = 32,
        pool_bytes: int = 8 << 20,
        shared_memory: bool = True,
        transfer_mode: str = "auto",
        eviction_policy: str = "LRU",
        conf_route: bool = False,
    ) -> None:
        self.chunk_size = chunk_size
        self.pool_bytes = pool_bytes
        self.shm_name = f"lmcache_l1_pool_fake_{os.getpid()}_{secrets.token_hex(8)}" if shared_memory else ""
        self.transfer_mode = transfer_mode
        self.eviction_policy = eviction_policy
        self.http_status = 200
        self.calls: Counter[str] = Counter()
        self.wrong_publications = 0
        self.wrong_unlocks = 0
        self._conf_route = conf_route
        self._engines: list[wire.Registration] = []
        self._lock = threading.RLock()
        self._faults: dict[str, deque[Fault]] = {}
        self._port = 0
        self._router: _Router | None = None
        self._http: ThreadingHTTPServer | None = None
        self._segment: mmap.mmap | None = None
        self._reset()

    def _reset(self) -> None:
        self._registrations: dict[int, wire.Registration] = {}
        self._chunks: dict[_ChunkId, _Chunk] = {}
        self._reserved: dict[_ChunkId, _Chunk] = {}
        self._free = [(0, self.pool_bytes)]
        self._sessions: dict[str, _Session] = {}
        self._jobs: dict[str, tuple[wire.CacheKey, int]] = {}
        self._pending_writes: dict[Any, list[_ChunkId]] = {}
        self._pending_reads: dict[Any, list[_ChunkId]] = {}
        for engine in self._engines:
            self._registrations[engine.instance_id] = engine

    # Life.

    def start(self) -> Self:
        """Start to serve."""
        self._make_segment()
        self._router = _Router(self._handle, self._port)
        self._port = self._router.port
        self._http = _serve_http(self)
        return self

    def stop(self) -> None:
        """Stop, and unlink the segment. A second stop does nothing."""
        self.kill()
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None
        self._drop_segment()

    def kill(self) -> None:
        """Stop to answer requests, as a server that died; HTTP answers 503 from then on."""
        if self._router is not None:
            self._router.close()
            self._router = None
        self.http_status = 503

    def restart(self, *, engines_return: bool = True) -> None:
        """Come back on the same port with nothing in memory and a new segment of the same name.

        Args:
            engines_return: Whether the engines register again.
        """
        self.kill()
        with self._lock:
            self._drop_segment()
            self._make_segment()
            if not engines_return:
                self._engines.clear()
            self._reset()
        self._router = _Router(self._handle, self._port)
        self.http_status = 200

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The request endpoint."""
        return f"tcp://127.0.0.1:{self._port}"

    @property
    def http_url(self) -> str:
        """The HTTP address."""
        assert self._http is not None
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    # What a test orders.

    def serve(self, model_name: str, geometry: KVGeometry) -> None:
        """Register `model_name` as an engine would, with K and V apart, or one plane for MLA."""
        with self._lock:
            engine = wire.Registration(
                instance_id=len(self._engines) + 1,
                model_name=model_name,
                world_size=geometry.world_size,
                block_size=geometry.block_size or self.chunk_size,
                num_layers=geometry.num_layers,
                hidden_dim_size=geometry.hidden_dim // geometry.world_size,
                dtype_str=str(geometry.dtype or torch.float32).removeprefix("torch."),
                use_mla=geometry.planes == 1,
            )
            self._engines.append(engine)
            self._registrations[engine.instance_id] = engine

    def fault(self, operation: wire.Operation[Any], kind: FaultKind, *, times: int = 1) -> Fault:
        """Order a fault for the next `times` requests of `operation`."""
        fault = Fault(kind, times)
        with self._lock:
            self._faults.setdefault(operation.name, deque()).append(fault)
        return fault

    def forget(self) -> None:
        """Forget every client but the engines, as after a long silence."""
        with self._lock:
            for instance_id in self.clients:
                self._unregister(instance_id)

    def forget_engines(self) -> None:
        """Forget the engines."""
        with self._lock:
            for engine in self._engines:
                self._registrations.pop(engine.instance_id, None)
            self._engines.clear()

    def evict(self, chunks: int) -> None:
        """Drop the `chunks` oldest chunks that nobody reads."""
        with self._lock:
            idle = [name for name, chunk in self._chunks.items() if not chunk.read_locks]
            for name in idle[:chunks]:
                self._release(self._chunks.pop(name))

    # What a test looks at.

    @property
    def clients(self) -> list[int]:
        """Instance ids registered, engines left out."""
        with self._lock:
            engines = {engine.instance_id for engine in self._engines}
            return [instance_id for instance_id in self._registrations if instance_id not in engines]

    @property
    def read_locks(self) -> int:
        """Read locks held."""
        with self._lock:
            return sum(chunk.read_locks for chunk in self._chunks.values())

    @property
    def reservations(self) -> int:
        """Chunks reserved for writing."""
        with self._lock:
            return len(self._reserved)

    @property
    def sessions(self) -> int:
        """Sessions open."""
        with self._lock:
            return len(self._sessions)

    @property
    def jobs(self) -> int:
        """Lookups whose result nobody has fetched."""
        with self._lock:
            return len(self._jobs)

    @property
    def chunks(self) -> int:
        """Chunks held, one for each rank."""
        with self._lock:
            return len(self._chunks)

    @property
    def held(self) -> dict[str, int]:
        """Everything that a well-behaved client has let go of."""
        with self._lock:
            return {
                name: count
                for name, count in (
                    ("read locks", self.read_locks),
                    ("reservations", self.reservations),
                    ("sessions", self.sessions),
                    ("lookups", self.jobs),
                    ("reads", len(self._pending_reads)),
                    ("writes", len(self._pending_writes)),
                )
                if count
            }

    def config(self) -> dict[str, Any]:
        """What `/config` answers."""
        return {
            "mp": {
                "transport": "zmq",
                "chunk_size": self.chunk_size,
                "shm_name": self.shm_name,
                "supported_transfer_mode": self.transfer_mode,
            },
            "storage_manager": {"eviction_config": {"eviction_policy": self.eviction_policy}},
        }

    def status(self) -> dict[str, Any]:
        """What `/status` answers."""
        with self._lock:
            l1 = {
                "total_object_count": len(self._chunks) + len(self._reserved),
                "read_locked_count": sum(chunk.read_locks > 0 for chunk in self._chunks.values()),
                "write_locked_count": len(self._reserved),
            }
            return {
                "is_healthy": True,
                "chunk_size": self.chunk_size,
                "active_sessions": len(self._sessions),
                "active_prefetch_jobs": len(self._jobs),
                "storage_manager": {"l1_manager": l1},
                "cache_context_meta": {},
                "non_cuda_context_meta": {
                    str(instance_id): {
                        "model_name": registration.model_name,
                        "world_size": registration.world_size,
                        "block_size": registration.block_size,
                        "use_mla": registration.use_mla,
                    }
                    for instance_id, registration in self._registrations.items()
                },
            }

    def http_answer(self, path: str) -> Any:
        """What `path` answers; None: there is no such route."""
        if path == ("/conf" if self._conf_route else "/config"):
            return self.config()
        return self.status() if path == "/status" else None

    # Requests.

    def _handle(self, frames: list[bytes], reply: Callable[[list[bytes]], None]) -> None:
        uid, operation_id, *args = frames
        operation = _BY_ID[msgspec.msgpack.decode(operation_id)]
        with self._lock:
            self.calls[operation.name] += 1
            fault = self._next_fault(operation)
            if fault is not None and fault.kind == "ignore":
                fault.struck.set()
                return
            try:
                result = self._answer(operation, args)
            except _Refused:
                return
            if fault is not None and fault.kind in ("few", "outside", "overlap", "shape", "dtype"):
                result = _spoil(result, fault.kind, self.pool_bytes)
        answer = [uid, operation_id] if result is None else [uid, operation_id, msgspec.msgpack.encode(result)]
        if fault is None:
            reply(answer)
            return
        if fault.kind == "hold":
            fault.hold(lambda: reply(answer))
        elif fault.kind == "garble":
            reply([uid, operation_id, b"\xc1\xff"])
        elif fault.kind == "wrong-operation":
            reply([uid, msgspec.msgpack.encode(99), *answer[2:]])
        elif fault.kind != "lose":
            for _ in range(2 if fault.kind == "duplicate" else 1):
                reply(answer)
        fault.struck.set()

    def _next_fault(self, operation: wire.Operation[Any]) -> Fault | None:
        faults = self._faults.get(operation.name)
        if not faults:
            return None
        fault = faults[0]
        fault.times -= 1
        if fault.times <= 0:
            faults.popleft()
        return fault

    def _answer(self, operation: wire.Operation[Any], args: list[bytes]) -> Any:
        engine_driven = operation.moves_data or operation in (wire.REGISTER, wire.UNREGISTER)
        if engine_driven and self.transfer_mode == "lmcache_driven":
            raise _Refused
        types, handler = self._handlers()[operation.name]
        if len(args) != len(types):
            raise _Refused
        try:
            decoded = [msgspec.msgpack.decode(arg, type=type_) for arg, type_ in zip(args, types, strict=True)]
        except msgspec.MsgspecError as error:
            raise _Refused from error
        return handler(*decoded)

    def _handlers(self) -> dict[str, tuple[list[Any], Callable[..., Any]]]:
        key = wire.CacheKey
        return {
            "lookup": ([key, int], self._lookup),
            "query_prefetch_status": ([str], self._prefetched),
            "wait_prefetch_status": ([str, float], lambda request_id, _: self._prefetched(request_id)),
            "free_lookup_locks": ([key, int], self._free_lookup_locks),
            "end_session": ([str], self._end_session),
            wire.REGISTER.name: ([wire.Registration], self._register),
            wire.UNREGISTER.name: ([int], self._unregister),
            "prepare_store": ([key, int], self._prepare_store),
            "commit_store": ([key, int, bytes], self._commit_store),
            "prepare_retrieve": ([key, int], self._prepare_retrieve),
            "commit_retrieve": ([key, int], self._commit_retrieve),
            "get_chunk_size": ([], lambda: self.chunk_size),
            "ping": ([int | None], lambda _: True),
            "noop": ([], lambda: "OK"),
        }

    def _register(self, registration: wire.Registration) -> dict[str, Any]:
        self._registrations.setdefault(registration.instance_id, registration)
        return {"shm_name": self.shm_name, "pool_size": self.pool_bytes if self.shm_name else 0}

    def _unregister(self, instance_id: int) -> None:
        self._registrations.pop(instance_id, None)
        for names in [self._pending_writes.pop(key) for key in list(self._pending_writes) if key[0] == instance_id]:
            self._publish(names)
        for names in [self._pending_reads.pop(key) for key in list(self._pending_reads) if key[0] == instance_id]:
            self._unlock(names)

    def _served(self, model_name: str, world_size: int) -> bool:
        names = {(registration.model_name, registration.world_size) for registration in self._registrations.values()}
        return (model_name, world_size) in names

    def _lookup(self, key: wire.CacheKey, _: int) -> None:
        if key.num_kv_readers < 1:
            raise _Refused
        if not self._served(key.model_name, key.world_size):
            self._jobs[key.request_id] = key, 0
            return
        session = self._sessions.setdefault(key.request_id, _Session())
        session.lookup, session.hit = key, None
        hit = 0
        while (hit + 1) * self.chunk_size <= key.end and all(name in self._chunks for name in self._names(key, hit)):
            for name in self._names(key, hit):
                self._chunks[name].read_locks += 1
            hit += 1
        self._jobs[key.request_id] = key, hit

    def _prefetched(self, request_id: str) -> int:
        if request_id not in self._jobs:
            return 0
        _, hit = self._jobs.pop(request_id)
        self._sessions.setdefault(request_id, _Session()).hit = hit
        return hit

    def _free_lookup_locks(self, key: wire.CacheKey, _: int) -> None:
        session = self._sessions.setdefault(key.request_id, _Session())
        if key.request_id in self._jobs:
            self._prefetched(key.request_id)
        if session.hit:
            if not self._served(key.model_name, key.world_size):
                raise _Refused
            last = min(session.hit, key.end // self.chunk_size)
            for index in range(key.start // self.chunk_size, last):
                self._unlock(self._names(key, index))

    def _end_session(self, request_id: str) -> None:
        session = self._sessions.pop(request_id, None)
        key = session.lookup if session is not None else None
        if key is not None and not self._served(key.model_name, key.world_size):
            raise _Refused

    def _prepare_store(self, key: wire.CacheKey, instance_id: int) -> dict[str, Any]:
        registration, names = self._transfer(key, instance_id)
        if not self.shm_name:
            return {"context": {}}
        reserved = self._reserve(names, registration)
        if reserved:
            self._pending_writes[instance_id, _same(key)] = [names[index] for index in reserved]
        slots = [_slot(self._reserved[names[index]]) for index in reserved]
        return {"context": {"slots": slots, "chunk_indices": reserved}}

    def _commit_store(self, key: wire.CacheKey, instance_id: int, data: bytes) -> bool:
        registration, names = self._transfer(key, instance_id)
        if not data:
            reserved = self._pending_writes.pop((instance_id, _same(key)), None)
            if reserved is None:
                return False
            self._publish(reserved)
            return True
        chunks = load_tensors(data)
        for index in self._reserve(names, registration):
            chunk = self._reserved[names[index]]
            if index < len(chunks) and tuple(chunks[index].shape) == chunk.shape:
                self._view(chunk).copy_(chunks[index])
            self._publish([names[index]])
        return True

    def _prepare_retrieve(self, key: wire.CacheKey, instance_id: int) -> dict[str, Any]:
        _, names = self._transfer(key, instance_id)
        found = [name for name in names if name in self._chunks]
        if len(found) != len(names) or not names:
            self._unlock(found)
            return {"success": False, "data": b"", "context": {}}
        chunks = [self._chunks[name] for name in names]
        if not self.shm_name:
            self._unlock(names)
            tensors = [self._view(chunk).clone() for chunk in chunks]
            return {"success": True, "data": dump_tensors(tensors), "context": {}}
        self._pending_reads[instance_id, _same(key)] = names
        return {"success": True, "data": b"", "context": {"slots": [_slot(chunk) for chunk in chunks]}}

    def _commit_retrieve(self, key: wire.CacheKey, instance_id: int) -> bool:
        self._transfer(key, instance_id)
        self._unlock(self._pending_reads.pop((instance_id, _same(key)), []))
        return True

    def _transfer(self, key: wire.CacheKey, instance_id: int) -> tuple[wire.Registration, list[_ChunkId]]:
        registration = self._registrations.get(instance_id)
        if registration is None or key.worker_id is None or key.end > len(key.token_ids) or key.end % self.chunk_size:
            raise _Refused
        session = self._sessions.setdefault(key.request_id, _Session())
        session.lookup = session.lookup or key
        first, last = key.start // self.chunk_size, key.end // self.chunk_size
        return registration, [name for index in range(first, last) for name in self._names(key, index)]

    def _names(self, key: wire.CacheKey, index: int) -> list[_ChunkId]:
        prefix = key.token_ids[: (index + 1) * self.chunk_size]
        ranks = range(key.world_size) if key.worker_id is None else [key.worker_id]
        return [(key.model_name, key.world_size, rank, key.cache_salt, prefix) for rank in ranks]

    # The pool.

    def _reserve(self, names: list[_ChunkId], registration: wire.Registration) -> list[int]:
        shape: tuple[int, ...] = (registration.num_layers, self.chunk_size, registration.hidden_dim_size)
        if not registration.use_mla:
            shape = (2, *shape)
        dtype: torch.dtype = getattr(torch, registration.dtype_str)
        length = torch.Size(shape).numel() * dtype.itemsize
        wanted = [i for i, name in enumerate(names) if name not in self._chunks and name not in self._reserved]
        offsets = [self._allocate(length) for _ in wanted]
        if None in offsets:
            for offset in offsets:
                if offset is not None:
                    self._release(_Chunk(offset, length, shape, registration.dtype_str))
            return []
        for index, offset in zip(wanted, offsets, strict=True):
            assert offset is not None
            chunk = self._reserved[names[index]] = _Chunk(offset, length, shape, registration.dtype_str)
            self._bytes(chunk).fill_(UNWRITTEN)
        return wanted

    def _allocate(self, length: int) -> int | None:
        rounded = -(-length // _ALIGNMENT) * _ALIGNMENT
        for place, (offset, size) in enumerate(self._free):
            if size >= rounded:
                self._free[place] = offset + rounded, size - rounded
                return offset
        return None

    def _release(self, chunk: _Chunk) -> None:
        self._free.append((chunk.offset, -(-chunk.length // _ALIGNMENT) * _ALIGNMENT))

    def _publish(self, names: list[_ChunkId]) -> None:
        for name in names:
            chunk = self._chunks[name] = self._reserved.pop(name)
            self.wrong_publications += bool((self._bytes(chunk) == UNWRITTEN).all())

    def _unlock(self, names: list[_ChunkId]) -> None:
        for name in names:
            if name in self._chunks and self._chunks[name].read_locks:
                self._chunks[name].read_locks -= 1
            else:
                self.wrong_unlocks += 1

    def _bytes(self, chunk: _Chunk) -> torch.Tensor:
        assert self._segment is not None
        return torch.frombuffer(self._segment, dtype=torch.uint8, count=chunk.length, offset=chunk.offset)

    def _view(self, chunk: _Chunk) -> torch.Tensor:
        return self._bytes(chunk).view(getattr(torch, chunk.dtype)).view(chunk.shape)

    def _make_segment(self) -> None:
        if not self.shm_name:
            self._segment = mmap.mmap(-1, self.pool_bytes)
            return
        descriptor = os.open(f"/dev/shm/{self.shm_name}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.pool_bytes)
            self._segment = mmap.mmap(descriptor, self.pool_bytes)
        finally:
            os.close(descriptor)

    def _drop_segment(self) -> None:
        if self._segment is not None and self.shm_name:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"/dev/shm/{self.shm_name}")
        self._segment = None


_BY_ID = {operation.id: operation for operation in wire.OPERATIONS}


def _same(key: wire.CacheKey) -> wire.CacheKey:
    """The key as the server compares it: the request is no part of it."""
    return msgspec.structs.replace(key, request_id="", num_kv_readers=0)


def _slot(chunk: _Chunk) -> dict[str, Any]:
    return {"offset": chunk.offset, "length": chunk.length, "shape": list(chunk.shape), "dtype": chunk.dtype}


def _spoil(result: Any, kind: str, pool_bytes: int) -> Any:
    if kind == "few":
        result["context"]["slots"] = result["context"]["slots"][:-1]
    for slot in result["context"].get("slots", ()):
        if kind == "outside":
            slot["offset"] = pool_bytes
        elif kind == "overlap":
            slot["offset"] = result["context"]["slots"][0]["offset"]
        elif kind == "shape":
            slot["shape"] = [*slot["shape"][:-1], slot["shape"][-1] // 2]
        elif kind == "dtype":
            slot["dtype"] = "float13"
    return result


class _Router:
    """A ROUTER socket and its thread; replies may be sent from any thread."""

    def __init__(self, handle: Callable[[list[bytes], Callable[[list[bytes]], None]], None], port: int) -> None:
        self._handle = handle
        self._replies: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._bind(port)
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._thread = threading.Thread(target=self._run, name="fake cache server", daemon=True)
        self._thread.start()

    def _bind(self, port: int) -> None:
        deadline = time.monotonic() + 5
        while True:
            try:
                self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
            except zmq.ZMQError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)  # the port of a socket just closed is free in a moment
            else:
                return

    def close(self) -> None:
        self._send(None)
        self._thread.join()
        self._socket.close()
        self._context.term()
        self._wake.close()
        self._woken.close()

    def _send(self, frames: list[bytes] | None) -> None:
        self._replies.put(frames)
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while True:
            events = dict(poller.poll())
            if self._woken.fileno() in events:
                self._woken.recv(4096)
            if self._socket in events:
                identity, *frames = self._socket.recv_multipart()
                self._handle(frames, lambda reply, identity=identity: self._send([identity, *reply]))  # type: ignore[misc]
            while not self._replies.empty():
                reply = self._replies.get()
                if reply is None:
                    return
                self._socket.send_multipart(reply)


def _serve_http(server: FakeCacheServer) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = server.http_answer(self.path)
            status = server.http_status if answer is not None else 404
            body = json.dumps(answer if status == 200 else {"error": "not ready"}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, args=(0.05,), name="fake cache server HTTP", daemon=True).start()
    return http
