"""The cache server's shared-memory segment, mapped here, and tensors over its slots without a copy."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import os
import stat
import threading
from typing import TYPE_CHECKING, Literal

import torch

from lmcache_stream.errors import CacheConnectionError, CacheProtocolError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from lmcache_stream.kvcache.mp.wire import Slot

__all__ = ["DTYPES", "MOST_DIMENSIONS", "Lease", "Pool", "check_apart", "torch_dtype", "views_of"]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()  # getattr would import what a server names
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype in _INTEGERS)
}
"""The dtypes that KV can have, by the names that torch has for them."""

MOST_DIMENSIONS = 8
"""A chunk has four or five."""

_MADV_POPULATE_WRITE = 23
_POPULATE_BYTES = 64 << 20
_SPANS = 256


def torch_dtype(name: str) -> torch.dtype:
    """Find a dtype of `DTYPES` by its name, with or without `torch.`.

    Raises:
        CacheProtocolError: There is no such dtype.
    """
    dtype = DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise CacheProtocolError(f"the cache server names a dtype that no KV has: {name[:40]!r}")
    return dtype


class Pool:
    """One mapping of a POSIX shared-memory segment that belongs to the cache server.

    It is never unlinked from here, and stays mapped as long as a view of it lives.

    Args:
        name: The segment's name, with or without a leading slash.
        populate: What to map in the background, so that no copy pays for it later: "filled", what holds data already;
            "all", which takes the memory of the server's whole pool at once; None: nothing.

    Raises:
        CacheConnectionError: There is no such segment on this machine, or it cannot be opened.
    """

    def __init__(self, name: str, *, populate: Literal["filled", "all"] | None = "filled") -> None:
        self.name: str = name.lstrip("/")
        if not self.name.isprintable() or self.name in ("", ".", "..") or "/" in self.name:
            raise CacheProtocolError(f"the cache server names an impossible shared-memory segment: {name[:300]!r}")
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise CacheConnectionError(
                f"the cache server's shared memory cannot be opened ({self._path}: {error.strerror}): run on the same "
                "machine as the server, with /dev/shm shared, or start the server without --shm-name"
            ) from error
        try:
            found = os.fstat(descriptor)
            self.identity: tuple[int, int, int] = (found.st_dev, found.st_ino, found.st_size)
            self.size: int = found.st_size
            if self.size == 0 or not stat.S_ISREG(found.st_mode):
                raise CacheProtocolError(f"the cache server's shared memory {self._path} is empty, or none")
            spans = _filled(descriptor, self.size) if populate == "filled" else [(0, self.size)]
            self._bytes: Tensor | None = torch.frombuffer(mmap.mmap(descriptor, self.size), dtype=torch.uint8)
        finally:
            os.close(descriptor)
        self._stop = threading.Event()
        self._leases = 0
        if populate and spans:
            args = (self._bytes, spans, self._stop)
            threading.Thread(target=_populate, args=args, name="lmcache-stream pages", daemon=True).start()

    @property
    def _path(self) -> str:
        return f"/dev/shm/{self.name}"

    @property
    def closed(self) -> bool:
        """Whether no lease can be had any more."""
        return self._bytes is None

    def is_current(self) -> bool:
        """Whether the segment of this name is still the mapped one: a restarted server makes another."""
        try:
            found = os.stat(self._path)
        except OSError:
            return False
        return self.identity == (found.st_dev, found.st_ino, found.st_size)

    @contextlib.contextmanager
    def lease(self) -> Iterator[Lease]:
        """Open a scope in which slots can be looked at. Use no view of it behind its end: the slot may be reused."""
        if self._bytes is None:
            raise UsageError("the shared memory is closed")
        lease = Lease(self._bytes)
        try:
            yield lease
        finally:
            lease.end()

    def close(self) -> None:
        """Let go of the mapping; it goes when the last view does."""
        self._stop.set()
        self._bytes = None


class Lease:
    """The right to look at slots of a pool, all of them together no larger than it."""

    def __init__(self, pool: Tensor) -> None:
        self._pool: Tensor | None = pool
        self._left: int = pool.numel()

    def view(self, slot: Slot) -> Tensor:
        """Look at a slot as a tensor of its shape and dtype; writing to it writes to the cache.

        Raises:
            CacheProtocolError: The slot is not inside the pool, or its shape, dtype and length disagree.
            UsageError: The lease has ended.
        """
        if self._pool is None:
            raise UsageError("the lease has ended: the slot may hold another chunk by now")
        dtype = torch_dtype(slot.dtype)
        size = self._pool.numel()
        wanted = _bytes_of(slot.shape, dtype)
        if slot.offset < 0 or wanted > slot.length or slot.offset + slot.length > size:
            raise CacheProtocolError(
                f"the cache server names a slot that does not fit: offset {slot.offset}, length {slot.length}, shape "
                f"{list(slot.shape)} of {slot.dtype}, in a pool of {size} bytes"
            )
        self._left -= wanted
        if self._left < 0:
            raise CacheProtocolError(f"the cache server names slots of more than the {size} bytes of its pool")
        if slot.offset % dtype.itemsize:
            raise CacheProtocolError(f"the cache server names a slot of {slot.dtype} at the odd offset {slot.offset}")
        return self._pool[slot.offset : slot.offset + wanted].view(dtype).view(slot.shape)

    def end(self) -> None:
        """End the lease: no further view is given."""
        self._pool = None


def views_of(slots: Sequence[Slot], lease: Lease | None) -> list[Tensor]:
    """Look at slots.

    Raises:
        CacheProtocolError: There is no pool that they could be in, or one of them is none.
    """
    if lease is None:
        raise CacheProtocolError("the cache server names shared-memory slots, but said that it has no shared memory")
    return [lease.view(slot) for slot in slots]


def check_apart(slots: Iterable[Slot]) -> None:
    """Refuse slots that overlap: one at least is not where the chunk is that it stands for.

    Raises:
        CacheProtocolError: Two of them overlap.
    """
    for one, other in itertools.pairwise(sorted(slots, key=lambda slot: slot.offset)):
        if one.offset + one.length > other.offset:
            raise CacheProtocolError(
                f"the cache server names slots that overlap, at offsets {one.offset} and {other.offset}"
            )


def _bytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    if len(shape) > MOST_DIMENSIONS or any(extent < 1 for extent in shape):
        raise CacheProtocolError(f"the cache server names a slot of shape {list(shape[: MOST_DIMENSIONS + 1])}")
    return math.prod(shape) * dtype.itemsize


def _filled(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Find the spans of bytes that hold data, at most a few: touching the rest would allocate it."""
    spans: list[tuple[int, int]] = []
    end = 0
    while end < size and len(spans) < _SPANS:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
        except OSError:
            break
        spans.append((start, end))
    return spans


def _populate(mapped: Tensor, spans: list[tuple[int, int]], stop: threading.Event) -> None:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for first, last in spans:
        for offset in range(first, last, _POPULATE_BYTES):
            length = min(_POPULATE_BYTES, last - offset)
            if stop.is_set() or madvise(mapped.data_ptr() + offset, length, _MADV_POPULATE_WRITE):
                return
