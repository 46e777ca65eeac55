"""What a fake cache server holds: registrations, chunks, locks, reservations and sessions, and the pool of slots."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lmcache_stream.errors import UsageError
from lmcache_stream.kvcache.mp import wire

if TYPE_CHECKING:
    from lmcache_stream.geometry import KVGeometry

__all__ = ["CacheMemory", "Chunk", "ChunkId", "Session"]

UNWRITTEN = 0xA5
"""What the bytes of a reserved slot are before the client writes them."""

_ALIGNMENT = 4096
ChunkId = tuple[str, int, int, str, tuple[int, ...]]


@dataclass
class Chunk:
    """Where a chunk lies in the pool, in bytes, what it looks like, and how many read it."""

    offset: int
    length: int
    shape: tuple[int, ...]
    dtype: str
    read_locks: int = 0


@dataclass
class Session:
    """What a request id stands for: what it looked up, and how many chunks were found."""

    lookup: wire.CacheKey | None = None
    hit: int | None = None


class CacheMemory:
    """Registrations, chunks, locks, reservations and sessions, as an LMCache MP server keeps them.

    Args:
        chunk_size: Tokens a chunk.
        pool_bytes: Bytes of the pool. It never evicts; what does not fit gets no slot.
        shared_memory: Whether chunks go through shared memory; else as pickles.
        transfer_mode: In "lmcache_driven" the operations that move data are not answered.

    Attributes:
        full: Whether the pool takes nothing more; a test may change it.
        wrong_publications: Chunks published although nobody had written them.
        wrong_unlocks: Chunks unlocked more often than they were locked.
    """

    def __init__(self, *, chunk_size: int, pool_bytes: int, shared_memory: bool, transfer_mode: str) -> None:
        self.chunk_size = chunk_size
        self.pool_bytes = pool_bytes
        self.shm_name: str = f"lmcache_l1_pool_fake_{os.getpid()}_{secrets.token_hex(8)}" if shared_memory else ""
        self.transfer_mode = transfer_mode
        self.full: bool = False
        self.wrong_publications: int = 0
        self.wrong_unlocks: int = 0
        self._engines: list[wire.Registration] = []
        self._lock = threading.RLock()
        self._segment: mmap.mmap | None = None
        self._reset()

    def _reset(self) -> None:
        self._registrations: dict[int, wire.Registration] = {}
        self._lost: set[ChunkId] = set()
        self._chunks: dict[ChunkId, Chunk] = {}
        self._reserved: dict[ChunkId, Chunk] = {}
        self._free = [(0, self.pool_bytes)]
        self._sessions: dict[str, Session] = {}
        self._jobs: dict[str, tuple[wire.CacheKey, int]] = {}
        self._pending_writes: dict[Any, list[ChunkId]] = {}
        self._pending_reads: dict[Any, list[ChunkId]] = {}
        for engine in self._engines:
            self._registrations[engine.instance_id] = engine

    # What an engine does.

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

    def covered(self, model_name: str, token_ids: Sequence[int], cache_salt: str = "") -> int:
        """Tokens of the longest prefix in the cache."""
        with self._lock:
            key, count = self._key(model_name, token_ids, cache_salt), 0
            while (count + 1) * self.chunk_size <= key.end:
                if not all(name in self._chunks for name in self._names(key, count)):
                    break
                count += 1
            return count * self.chunk_size

    def offload(
        self, model_name: str, token_ids: Sequence[int], cache_salt: str = "", kv: torch.Tensor | None = None
    ) -> None:
        """Keep the KV of the whole chunks of a prompt, as an engine does after it answered; a full pool takes none.

        Args:
            model_name: A model that is served.
            token_ids: The prompt.
            cache_salt: Its salt.
            kv: `[2, L, T, D]`, one plane for MLA; None: each token's id as its key, its position as its value.
        """
        with self._lock:
            engine = self._engine(model_name)
            key = self._key(model_name, token_ids, cache_salt)
            if kv is None:
                kv = _plain_kv(key.token_ids[: key.end], engine)
            width = engine.hidden_dim_size
            for rank in range(engine.world_size):
                names = [name for index in range(key.end // self.chunk_size) for name in self._names(key, index)]
                names = [name for name in names if name[2] == rank]
                part = kv[..., rank * width : (rank + 1) * width]
                for index in self._reserve(names, engine):
                    chunk = part[:, :, index * self.chunk_size : (index + 1) * self.chunk_size]
                    view = self._view(self._reserved[names[index]])
                    view.copy_(chunk.reshape(view.shape))
                    self._publish([names[index]])

    def read(self, model_name: str, token_ids: Sequence[int], cache_salt: str = "") -> torch.Tensor:
        """KV `[2, L, T, D]` (one plane for MLA) of the longest prefix in the cache; `T` may be 0."""
        with self._lock:
            engine = self._engine(model_name)
            key = self._key(model_name, token_ids, cache_salt)
            count = self.covered(model_name, token_ids, cache_salt) // self.chunk_size
            planes = 1 if engine.use_mla else 2
            empty = torch.empty(planes, engine.num_layers, 0, engine.hidden_dim_size * engine.world_size)
            chunks = [
                torch.cat([self._view(self._chunks[name]).clone() for name in self._names(key, index)], dim=-1)
                for index in range(count)
            ]
            whole = [chunk.reshape(planes, engine.num_layers, self.chunk_size, -1) for chunk in chunks]
            return torch.cat(whole, dim=2) if whole else empty

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

    def _names(self, key: wire.CacheKey, index: int) -> list[ChunkId]:
        prefix = key.token_ids[: (index + 1) * self.chunk_size]
        ranks = range(key.world_size) if key.worker_id is None else [key.worker_id]
        return [(key.model_name, key.world_size, rank, key.cache_salt, prefix) for rank in ranks]

    def _key(self, model_name: str, token_ids: Sequence[int], cache_salt: str) -> wire.CacheKey:
        world_size = next((engine.world_size for engine in self._engines if engine.model_name == model_name), 1)
        end = len(token_ids) // self.chunk_size * self.chunk_size
        return wire.CacheKey(model_name, world_size, None, tuple(token_ids), 0, end, "", cache_salt)

    def _engine(self, model_name: str) -> wire.Registration:
        for engine in self._engines:
            if engine.model_name == model_name:
                return engine
        raise UsageError(f"nobody serves {model_name!r} on this FakeCacheServer: serve(model_name, geometry) first")

    def _unregister(self, instance_id: int) -> None:
        self._registrations.pop(instance_id, None)
        for names in [self._pending_writes.pop(key) for key in list(self._pending_writes) if key[0] == instance_id]:
            self._publish(names)
        for names in [self._pending_reads.pop(key) for key in list(self._pending_reads) if key[0] == instance_id]:
            self._unlock(names)

    # The pool.

    def _reserve(self, names: list[ChunkId], registration: wire.Registration) -> list[int]:
        shape: tuple[int, ...] = (registration.num_layers, self.chunk_size, registration.hidden_dim_size)
        if not registration.use_mla:
            shape = (2, *shape)
        dtype: torch.dtype = getattr(torch, registration.dtype_str)
        length = torch.Size(shape).numel() * dtype.itemsize
        wanted = [i for i, name in enumerate(names) if name not in self._chunks and name not in self._reserved]
        offsets = [None if self.full else self._allocate(length) for _ in wanted]
        if None in offsets:
            for offset in offsets:
                if offset is not None:
                    self._release(Chunk(offset, length, shape, registration.dtype_str))
            return []
        for index, offset in zip(wanted, offsets, strict=True):
            assert offset is not None
            chunk = self._reserved[names[index]] = Chunk(offset, length, shape, registration.dtype_str)
            self._bytes(chunk).fill_(UNWRITTEN)
        return wanted

    def _allocate(self, length: int) -> int | None:
        rounded = -(-length // _ALIGNMENT) * _ALIGNMENT
        for place, (offset, size) in enumerate(self._free):
            if size >= rounded:
                self._free[place] = offset + rounded, size - rounded
                if size == rounded:
                    del self._free[place]
                return offset
        return None

    def _release(self, chunk: Chunk) -> None:
        self._free.append((chunk.offset, -(-chunk.length // _ALIGNMENT) * _ALIGNMENT))

    def _publish(self, names: list[ChunkId]) -> None:
        for name in names:
            chunk = self._chunks[name] = self._reserved.pop(name)
            self.wrong_publications += bool((self._bytes(chunk) == UNWRITTEN).all())

    def _unlock(self, names: list[ChunkId]) -> None:
        for name in names:
            if name in self._chunks and self._chunks[name].read_locks:
                self._chunks[name].read_locks -= 1
            elif name not in self._lost:
                self.wrong_unlocks += 1

    def _bytes(self, chunk: Chunk) -> torch.Tensor:
        assert self._segment is not None
        return torch.frombuffer(self._segment, dtype=torch.uint8, count=chunk.length, offset=chunk.offset)

    def _view(self, chunk: Chunk) -> torch.Tensor:
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


def _plain_kv(ids: Sequence[int], engine: wire.Registration) -> torch.Tensor:
    values = torch.stack([torch.tensor(ids, dtype=torch.float32), torch.arange(len(ids), dtype=torch.float32)])
    planes = values[:1] if engine.use_mla else values
    width = engine.hidden_dim_size * engine.world_size
    return planes[:, None, :, None].expand(-1, engine.num_layers, -1, width)
