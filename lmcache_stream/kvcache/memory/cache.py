"""The embedded cache itself: chunks of KV in this process's memory.

A chunk is found by the chain of the ids of all chunks up to it, rooted in the model name, the `cache_salt` and the kind
of tensor. The cache is bounded in bytes and lets go of what was used least recently, later chunks of a prefix before
earlier ones, so that what stays can still be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Sized
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from lmcache_stream.errors import UsageError
from lmcache_stream.kvcache import buffers
from lmcache_stream.kvcache.context import StoreOutcome, check_cache_salt, check_tokens
from lmcache_stream.kvcache.equality import equal_bytes
from lmcache_stream.kvcache.memory.url import parse_url
from lmcache_stream.transfer import default_executor
from lmcache_stream.types import CacheKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_stream.geometry import KVGeometry

__all__ = ["EmbeddedCache", "difference", "hashing"]


T = TypeVar("T")

_DEFAULT_CHUNK_SIZE = 32
_DEFAULT_MAX_BYTES = 2 << 30
_HASHED_INLINE = 2048  # tokens: 0.2 ms


class EmbeddedCache:
    """One cache per name and process, usable from any thread and event loop.

    `open` adds a reference and `close` takes one away; the last one drops everything.

    Attributes:
        name: Its name in `memory://NAME`.
        chunk_size: Tokens a chunk.
        max_bytes: Bound on the bytes of all chunks, of every model, salt and kind.
    """

    _by_name: ClassVar[dict[str, EmbeddedCache]] = {}
    _registry_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str, chunk_size: int, max_bytes: int) -> None:
        self.name = name
        self.chunk_size = chunk_size
        self.max_bytes = max_bytes
        self._references = 0
        self._lock = threading.Lock()
        self._chunks: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._geometries: dict[str, KVGeometry] = {}
        self._served = Counter[str]()
        self._waiters: dict[bytes, set[_Waiter]] = {}
        self._dropped = False

    @classmethod
    def open(cls, url: str) -> EmbeddedCache:
        """Open `memory://NAME?chunk_size=32&max_bytes=2GiB` and hold a reference to it.

        Parameters left out are those that the cache already has, or else 32 tokens and 2 GiB. Without a name it is
        "default".

        Raises:
            UsageError: The URL makes no sense, or contradicts the cache that is open under this name.
        """
        name, chunk_size, max_bytes = parse_url(url)
        with cls._registry_lock:
            cache = cls._by_name.get(name)
            if cache is None:
                cache = cls(name, chunk_size or _DEFAULT_CHUNK_SIZE, max_bytes or _DEFAULT_MAX_BYTES)
                cls._by_name[name] = cache
            for parameter, has, asked in (
                ("chunk_size", cache.chunk_size, chunk_size),
                ("max_bytes", cache.max_bytes, max_bytes),
            ):
                if asked is not None and asked != has:
                    raise UsageError(
                        f"memory://{name} is open with {parameter}={has}, not {asked}: "
                        f"leave {parameter} out, or use another name"
                    )
            cache._references += 1
        return cache

    def close(self) -> None:
        """Give back a reference. The last one drops everything, and what waits for coverage fails."""
        cls = type(self)
        with cls._registry_lock:
            self._references -= 1
            if self._references > 0 or self._dropped:
                return
            self._dropped = True
            if cls._by_name.get(self.name) is self:
                del cls._by_name[self.name]
        with self._lock:
            chunks = self._take_all()
            waiters = [waiter for waiting in self._waiters.values() for waiter in waiting]
        _free(chunks)
        for waiter in waiters:
            waiter.wake()

    def register_model(self, model_name: str, geometry: KVGeometry) -> None:
        """Say that an engine of this process serves a model with this cache; each call asks for one `unregister_model`.

        Raises:
            UsageError: The geometry names another chunk size than the cache's, or another geometry is registered.
        """
        geometry = self.fitted(geometry)
        with self._lock:
            served = self._geometries.setdefault(model_name, geometry)
            if found := difference(served, geometry):
                raise UsageError(
                    f"memory://{self.name} serves another {model_name!r} already ({found}): "
                    f"use another cache name, or another served model name"
                )
            self._served[model_name] += 1

    def unregister_model(self, model_name: str) -> None:
        """Take one registration back. Chunks stay."""
        with self._lock:
            self._served[model_name] -= 1
            if self._served[model_name] <= 0:
                del self._served[model_name]
                self._geometries.pop(model_name, None)

    def models(self) -> dict[str, KVGeometry]:
        """Models that engines of this process serve with this cache."""
        with self._lock:
            return dict(self._geometries)

    def fitted(self, geometry: KVGeometry) -> KVGeometry:
        """Return `geometry` with the cache's chunk size.

        Raises:
            UsageError: It names another.
        """
        if geometry.chunk_size is not None and geometry.chunk_size != self.chunk_size:
            raise UsageError(
                f"memory://{self.name} has chunks of {self.chunk_size} tokens, the geometry of {geometry.chunk_size}: "
                f"leave the geometry's chunk_size out, or open the cache with ?chunk_size={geometry.chunk_size}"
            )
        return dataclasses.replace(geometry, chunk_size=self.chunk_size)

    def longest_prefix(
        self, model_name: str, tokens: Sequence[int], cache_salt: str = "", kind: CacheKind = CacheKind.KV
    ) -> list[torch.Tensor]:
        """The chunks of the longest cached prefix, `[planes, L, chunk_size, D]` each, now the most recently used.

        They are the cache's own: never write to them.
        """
        keys = self._keys(model_name, tokens, cache_salt, kind)
        with self._lock:
            return [self._chunks[key] for key in self._touched(keys)]

    def covered(
        self, model_name: str, tokens: Sequence[int], cache_salt: str = "", kind: CacheKind = CacheKind.KV
    ) -> int:
        """Tokens of the longest cached prefix, whose chunks are now the most recently used."""
        keys = self._keys(model_name, tokens, cache_salt, kind)
        with self._lock:
            return len(self._touched(keys)) * self.chunk_size

    def put(
        self,
        model_name: str,
        tokens: Sequence[int],
        chunks: Sequence[torch.Tensor],
        cache_salt: str = "",
        kind: CacheKind = CacheKind.KV,
        *,
        whole: bool = False,
    ) -> StoreOutcome:
        """Store copies of `chunks`, `[planes, L, chunk_size, D]` each, on any device, for the first chunks of `tokens`.

        A chunk that is there already is kept. It copies and compares bytes: call it in a worker. With
        `whole`, chunks that can never fit together are not begun with, so that they evict nobody.

        Raises:
            UsageError: More chunks than whole chunks of tokens, or a chunk that does not hold `chunk_size` tokens.
        """
        keys = self._keys(model_name, tokens, cache_salt, kind)
        if len(chunks) > len(keys):
            raise UsageError(f"{len(chunks)} chunks were given for {len(keys)} whole chunks of tokens")
        for chunk in chunks:
            if chunk.ndim != 4 or chunk.shape[2] != self.chunk_size or chunk.shape != chunks[0].shape:
                raise UsageError(
                    f"each chunk must have the same shape [planes, L, {self.chunk_size}, D], not {list(chunk.shape)}"
                )
        keys = keys[: len(chunks)]
        copies = self._copies_of_new(keys, chunks)
        taken = 0
        present: list[tuple[torch.Tensor, torch.Tensor]] = []
        with self._lock:
            self._check_open()
            protected = set(self._touched(keys))
            new = sum(chunk.nbytes for key, chunk in zip(keys, chunks, strict=True) if key not in protected)
            fits = not whole or new + sum(self._chunks[key].nbytes for key in protected) <= self.max_bytes
            for key, chunk, copy in zip(keys, chunks, copies, strict=False):
                if key in protected:
                    present.append((self._chunks[key], chunk))
                elif fits and self._make_room(copy.nbytes if copy is not None else chunk.nbytes, protected):
                    self._chunks[key] = copy if copy is not None else _private_copy(chunk)
                    self._bytes += chunk.nbytes
                    protected.add(key)
                    taken += 1
                else:
                    break
            stored = self._touched(keys)
            waiters = [waiter for key in stored for waiter in self._waiters.get(key, ())]
        for waiter in waiters:
            waiter.wake()
        same = sum(equal_bytes(has, given) for has, given in present)
        return StoreOutcome(
            chunks=len(chunks),
            taken=taken,
            same=same,
            kept=len(present) - same,
            missing=len(chunks) - taken - len(present),
        )

    async def wait_covered(
        self,
        model_name: str,
        tokens: Sequence[int],
        cache_salt: str = "",
        *,
        kind: CacheKind = CacheKind.KV,
        timeout: float,
    ) -> int:
        """Wait until every whole chunk of `tokens` is cached, at most `timeout` seconds, woken by `put`.

        Returns:
            Tokens covered in the end.

        Raises:
            UsageError: The cache was dropped meanwhile.
        """
        keys = await hashing(tokens, self._keys, model_name, tokens, cache_salt, kind)
        if keys:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._wait(keys[-1])
        with self._lock:
            return len(self._touched(keys)) * self.chunk_size

    def clear(self) -> None:
        """Drop every chunk."""
        with self._lock:
            chunks = self._take_all()
        _free(chunks)

    def _keys(self, model_name: str, tokens: Sequence[int], cache_salt: str, kind: CacheKind) -> list[bytes]:
        """Identities of the whole chunks of `tokens`."""
        ids = check_tokens(tokens).tobytes()
        key = hashlib.blake2b(
            repr((model_name, check_cache_salt(cache_salt), kind.value)).encode(), digest_size=16
        ).digest()
        keys = []
        step = self.chunk_size * 8
        for end in range(step, len(ids) + 1, step):
            key = hashlib.blake2b(key + ids[end - step : end], digest_size=16).digest()
            keys.append(key)
        return keys

    def _touched(self, keys: Sequence[bytes]) -> list[bytes]:
        """The leading keys that are there, made most recently used, a parent more recently than its children."""
        there: list[bytes] = []
        for key in keys:
            if key not in self._chunks:
                break
            there.append(key)
        for key in reversed(there):
            self._chunks.move_to_end(key)
        return there

    def _copies_of_new(self, keys: Sequence[bytes], chunks: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Private copies of what is not there yet and can have room, made without holding the lock."""
        with self._lock:
            there = len(self._touched(keys))
        copies: list[torch.Tensor | None] = [None] * there
        room = self.max_bytes - sum(chunk.nbytes for chunk in chunks[:there])
        for chunk in chunks[there:]:
            room -= chunk.nbytes
            if room < 0:
                break
            copies.append(_private_copy(chunk))
        return copies

    def _make_room(self, size: int, protected: set[bytes]) -> bool:
        while self._bytes + size > self.max_bytes:
            key = next(iter(self._chunks), None)
            if key is None or key in protected:
                return False
            self._bytes -= self._chunks.pop(key).nbytes
        return True

    def _take_all(self) -> OrderedDict[bytes, torch.Tensor]:
        chunks, self._chunks, self._bytes = self._chunks, OrderedDict(), 0
        return chunks

    async def _wait(self, key: bytes) -> None:
        while True:
            waiter = _Waiter()
            with self._lock:
                self._check_open()
                if key in self._chunks:
                    return
                self._waiters.setdefault(key, set()).add(waiter)
            try:
                await waiter.woken
            finally:
                with self._lock:
                    waiting = self._waiters[key]
                    waiting.discard(waiter)
                    if not waiting:
                        del self._waiters[key]

    def _check_open(self) -> None:
        if self._dropped:
            raise UsageError(f"memory://{self.name} was closed: open it again")

    @classmethod
    def _forget_after_fork(cls) -> None:
        cls._registry_lock = threading.Lock()
        cls._by_name = {}


os.register_at_fork(after_in_child=EmbeddedCache._forget_after_fork)


class _Waiter:
    """A coroutine that waits for a chunk, to be woken from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.woken: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


async def hashing(tokens: object, fn: Callable[..., T], *args: Any) -> T:
    """Call `fn(*args)`, which hashes `tokens`: in a worker when there are enough of them to hold up the loop."""
    if isinstance(tokens, Sized) and len(tokens) > _HASHED_INLINE:
        return await default_executor().run(fn, *args)
    return fn(*args)


def difference(served: KVGeometry, given: KVGeometry) -> str:
    """The first field in which both are known and differ, in words; empty when there is none."""
    for field in ("num_layers", "num_kv_heads", "head_dim", "planes", "dtype"):
        has, asked = getattr(served, field), getattr(given, field)
        if has is not None and asked is not None and has != asked:
            return f"{field} is {has}, not {asked}"
    return ""


def _private_copy(chunk: torch.Tensor) -> torch.Tensor:
    return buffers.empty(chunk.shape, chunk.dtype).copy_(chunk.detach())


def _free(chunks: OrderedDict[bytes, torch.Tensor]) -> None:
    """Let gigabytes go in a worker: it takes many milliseconds."""
    try:
        default_executor().submit(chunks.clear)
    except UsageError:  # at exit
        chunks.clear()
