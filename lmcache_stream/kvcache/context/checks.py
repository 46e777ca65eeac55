"""Checks of what is given to a cache: salts, token ids, timeouts, KV."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from lmcache_stream.errors import UsageError
from lmcache_stream.types import CacheKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from lmcache_stream.geometry import KVGeometry

__all__ = [
    "MAX_CACHE_SALT",
    "check_cache_salt",
    "check_kv",
    "check_poll_interval",
    "check_timeout",
    "check_tokens",
    "whole_chunks",
]

MAX_CACHE_SALT = 128


def whole_chunks(tokens: int, chunk_size: int) -> int:
    """`tokens` cut to whole chunks."""
    return tokens // chunk_size * chunk_size


def check_cache_salt(cache_salt: str) -> str:
    """Return `cache_salt` if a cache can use it: at most 128 characters, none of `@`, `/`, `\\` and NUL.

    Raises:
        UsageError: It cannot.
    """
    if not isinstance(cache_salt, str):
        raise UsageError(f"cache_salt must be a string, not {type(cache_salt).__name__}")
    if len(cache_salt) > MAX_CACHE_SALT:
        raise UsageError(f"cache_salt must have at most {MAX_CACHE_SALT} characters, not {len(cache_salt)}")
    if bad := [c for c in cache_salt if c in "@/\\\0" or "\ud800" <= c <= "\udfff"]:
        raise UsageError(
            f"cache_salt must not contain {bad[0]!r}: use none of '@', '/', '\\\\', NUL and lone surrogates"
        )
    return cache_salt


def check_tokens(tokens: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return token ids as one int64 array `[T]`.

    Raises:
        UsageError: Not a flat sequence of integers of at least 0.
    """
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError):
        ids = np.empty((0, 0))
    if ids.ndim == 1 and not ids.size:
        return np.empty(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UsageError("tokens must be a flat sequence of integer token ids, such as [1, 2, 3]")
    if ids.min() < 0 or ids.max() > np.iinfo(np.int64).max:
        raise UsageError(f"token ids must be at least 0 and fit 64 bits, not {ids.min()} to {ids.max()}")
    return ids.astype(np.int64, copy=False)


def check_timeout(timeout: float) -> float:
    """Return `timeout` if it is a number of seconds of at least 0.

    Raises:
        UsageError: It is not.
    """
    seconds = _number(timeout)
    if not seconds >= 0:
        raise UsageError(f"timeout must be a number of seconds of at least 0, not {timeout!r}")
    return seconds


def check_poll_interval(poll_interval: float) -> float:
    """Return `poll_interval` if it is a number of seconds above 0.

    Raises:
        UsageError: It is not.
    """
    seconds = _number(poll_interval)
    if not seconds > 0:
        raise UsageError(f"poll_interval must be a number of seconds above 0, not {poll_interval!r}")
    return seconds


def _number(given: float) -> float:
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def check_kv(
    kv: torch.Tensor, tokens: npt.NDArray[np.int64], geometry: KVGeometry | None, kind: CacheKind = CacheKind.KV
) -> None:
    """Check `kv` `[P, L, T, D]` against its `T` tokens and the geometry, as far as that is known.

    Raises:
        UsageError: The shape or the dtype is not what it must be; the message names both.
    """
    if not hasattr(kv, "layout"):
        raise UsageError(f"kv must be a torch.Tensor, not {type(kv).__name__}")
    if str(kv.layout) != "torch.strided" or kv.is_meta:
        raise UsageError(f"kv must be a dense tensor with values, not {kv.layout} on {kv.device.type}")
    if not kv.dtype.is_floating_point and kv.element_size() != 1:
        raise UsageError(f"{kind.value} must be of floating point (or the bytes of an 8-bit format), not {kv.dtype}")
    shape = kv.shape
    if kind is CacheKind.QUERY:
        expected: list[int | str] = [1, "L", len(tokens), "Dq"]
    else:
        expected = ["2 or 1", "L", len(tokens), "D"]
    if geometry is not None:
        expected[1] = geometry.num_layers
        if kind is CacheKind.KV:
            expected[0], expected[3] = geometry.planes, geometry.hidden_dim
        elif geometry.num_heads is not None and geometry.planes == 2:
            expected[3] = geometry.num_heads * geometry.head_dim
    fits = len(shape) == 4 and all(
        size == want if isinstance(want, int) else size > 0 for size, want in zip(shape, expected, strict=True)
    )
    if not fits or shape[0] not in (1, 2):
        raise UsageError(
            f"{kind.value} of {len(tokens)} tokens must have the shape [{', '.join(map(str, expected))}], "
            f"not {list(shape)}"
        )
    dtype = geometry.dtype if geometry is not None and kind is CacheKind.KV else None
    if dtype is not None and kv.dtype != dtype:
        raise UsageError(f"{kind.value} must have the dtype {dtype}, not {kv.dtype}: convert it first")
