"""How a fake cache server works on requests: no sockets and no faults.

It behaves as the real server does: equal keys collide; what was reserved is published as it is when it is committed, or
when its client goes away; a lookup of a model that nobody has registered finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.pickles import dump_tensors, load_tensors
from lmcache_stream.testing.cache_memory import CacheMemory, Chunk, ChunkId, Session

__all__ = ["CacheRequests", "Refused"]


class Refused(Exception):
    """A handler failed: there is no answer."""


class CacheRequests(CacheMemory):
    """The operations of an LMCache MP server on what it holds."""

    def answer(self, operation: wire.Operation[Any], args: list[bytes]) -> Any:
        """Work on a request.

        Raises:
            Refused: It failed: there is no answer.
        """
        engine_driven = operation.moves_data or operation in (wire.REGISTER, wire.UNREGISTER)
        if engine_driven and self.transfer_mode == "lmcache_driven":
            raise Refused
        types, handler = self._handlers()[operation.name]
        if len(args) != len(types):
            raise Refused
        try:
            decoded = [msgspec.msgpack.decode(arg, type=type_) for arg, type_ in zip(args, types, strict=True)]
        except msgspec.MsgspecError as error:
            raise Refused from error
        return handler(*decoded)

    def lose_chunks_of(self, args: list[bytes]) -> None:
        """Drop the chunks that a request with these arguments is about, whoever reads or writes them."""
        try:
            key = msgspec.msgpack.decode(args[0], type=wire.CacheKey)
        except (msgspec.MsgspecError, IndexError):
            return
        names = [name for index in range(key.end // self.chunk_size) for name in self._names(key, index)]
        for held in (self._chunks, self._reserved):
            for name in names:
                if name in held:
                    self._lost.add(name)
                    self._release(held.pop(name))
        for pending in (self._pending_reads, self._pending_writes):
            for call in [call for call, about in pending.items() if set(about) & set(names)]:
                del pending[call]

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

    def _served(self, model_name: str, world_size: int) -> bool:
        names = {(registration.model_name, registration.world_size) for registration in self._registrations.values()}
        return (model_name, world_size) in names

    def _lookup(self, key: wire.CacheKey, _: int) -> None:
        if key.num_kv_readers < 1:
            raise Refused
        if not self._served(key.model_name, key.world_size):
            self._jobs[key.request_id] = key, 0
            return
        session = self._sessions.setdefault(key.request_id, Session())
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
        self._sessions.setdefault(request_id, Session()).hit = hit
        return hit

    def _free_lookup_locks(self, key: wire.CacheKey, _: int) -> None:
        session = self._sessions.setdefault(key.request_id, Session())
        if key.request_id in self._jobs:
            self._prefetched(key.request_id)
        if session.hit:
            if not self._served(key.model_name, key.world_size):
                raise Refused
            last = min(session.hit, key.end // self.chunk_size)
            for index in range(key.start // self.chunk_size, last):
                self._unlock(self._names(key, index))

    def _end_session(self, request_id: str) -> None:
        session = self._sessions.pop(request_id, None)
        key = session.lookup if session is not None else None
        if key is not None and not self._served(key.model_name, key.world_size):
            raise Refused

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

    def _transfer(self, key: wire.CacheKey, instance_id: int) -> tuple[wire.Registration, list[ChunkId]]:
        registration = self._registrations.get(instance_id)
        if registration is None or key.worker_id is None or key.end > len(key.token_ids) or key.end % self.chunk_size:
            raise Refused
        session = self._sessions.setdefault(key.request_id, Session())
        session.lookup = session.lookup or key
        first, last = key.start // self.chunk_size, key.end // self.chunk_size
        return registration, [name for index in range(first, last) for name in self._names(key, index)]


def _same(key: wire.CacheKey) -> wire.CacheKey:
    """The key as the server compares it: the request is no part of it."""
    return msgspec.structs.replace(key, request_id="", num_kv_readers=0)


def _slot(chunk: Chunk) -> dict[str, Any]:
    return {"offset": chunk.offset, "length": chunk.length, "shape": list(chunk.shape), "dtype": chunk.dtype}
