"""Host memory for KV: of huge pages where it is large, and used again, since page faults cost more than copies."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["BufferPool", "empty"]

HUGE_BYTES = 4 << 20
"""Size from which on memory is made of huge pages where the system has them."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make an uninitialised tensor of `shape`, of huge pages if it is large."""
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE_BYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(_memory(size), dtype=torch.uint8).view(dtype).view(tuple(shape))


def _memory(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    if size < HUGE_BYTES:
        return np.empty(max(size, 1), np.uint8)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not every system has them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


class _Loan(np.ndarray):  # a weakly referable view, whose death gives the buffer back
    pass


class BufferPool:
    """Host memory that is used again once no tensor looks at it, so that its pages are faulted in once only.

    Args:
        max_idle_bytes: How much is kept for the next user.
    """

    def __init__(self, max_idle_bytes: int = 1 << 30) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.RLock()  # a tensor may die, and give back, wherever memory is taken
        self._idle: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make an uninitialised tensor of `shape`, in used memory if there is some that fits."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            fitting = [buffer for buffer in self._idle if size <= buffer.nbytes <= 2 * size]
            buffer = min(fitting, key=lambda found: found.nbytes, default=None)
            if buffer is not None:
                self._idle = [other for other in self._idle if other is not buffer]
        if buffer is None:
            buffer = _memory(size)
        loan = buffer.view(_Loan)
        weakref.finalize(loan, self._give_back, buffer).atexit = False
        return torch.frombuffer(loan, dtype=torch.uint8)[:size].view(dtype).view(tuple(shape))

    def _give_back(self, buffer: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        with self._lock:
            self._idle.append(buffer)
            while self._idle and sum(kept.nbytes for kept in self._idle) > self._max_idle_bytes:
                self._idle.pop(0)

    def clear(self) -> None:
        """Drop the idle memory. What is in use now is kept when it comes back."""
        with self._lock:
            self._idle.clear()
