"""KV by heads, and copying kept tokens out of it."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Iterator

import torch

__all__ = ["block", "empty_kv", "gather", "heads_at_once", "of_heads", "product_dtype"]


def of_heads(plane: torch.Tensor, heads: int) -> torch.Tensor:
    """View `[T, H * head_dim]` as `[H, T, head_dim]`."""
    return plane.view(plane.shape[0], heads, plane.shape[1] // heads).transpose(0, 1)


def heads_at_once(kv: torch.Tensor, heads: int) -> Iterator[slice]:
    """Cut a layer's KV heads so that a part's keys are cache-sized on a CPU and launch-sized on a GPU."""
    step = max(block(1 << 22, kv.device) * heads // max(kv.shape[2] * kv.shape[3], 1), 1)
    for first in range(0, heads, step):
        yield slice(first, min(first + step, heads))


def block(values: int, device: torch.device) -> int:
    """How many values to compute at once: `values` fit a CPU's cache, a GPU takes more for a launch to pay."""
    return values if device.type == "cpu" else 16 * values


def product_dtype(keys: torch.Tensor, queries: torch.Tensor) -> torch.dtype:
    """In which type to multiply them: bfloat16 if both are and it pays, else float32."""
    if keys.dtype == queries.dtype == torch.bfloat16 and (keys.device.type != "cpu" or _cpu_multiplies_bfloat16()):
        return torch.bfloat16
    return torch.float32


@functools.cache
def _cpu_multiplies_bfloat16() -> bool:
    supported: Callable[[], bool] | None = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return supported is not None and supported()


def gather(
    kv: torch.Tensor,
    kept: torch.Tensor,
    *,
    spent: bool = False,
    then: Callable[[int, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Copy kept tokens out of `[P, L, T, D]`: `kept` is `[n]`, `[L, n]` or `[L, H, n]`, the result `[P, L, n, D]`.

    Args:
        kv: The KV.
        kept: Positions, ascending.
        spent: Whether the result may take the place of `kv` in its memory: new memory takes long to fault in.
        then: Called with each layer's index and its copied keys `[n, D]`, while they are in a CPU's cache.
    """
    planes, layers, total, width = kv.shape
    count = kept.shape[-1]
    heads = kept.shape[1] if kept.dim() == 3 else 1
    in_place = spent and kv.is_contiguous()
    if in_place:
        out = kv.view(-1)[: planes * layers * count * width].view(planes, layers, count, width)
    else:
        out = empty_kv((planes, layers, count, width), kv)
    own = torch.arange(heads, device=kv.device)
    index = [
        (kept[layer].view(heads, -1).t() * heads + own).flatten() if kept.dim() > 1 else kept for layer in range(layers)
    ]
    for plane in range(planes):
        for layer in range(layers):
            rows = kv[plane, layer].reshape(-1, width // heads)
            into = out[plane, layer].view(-1, width // heads)
            before = plane * layers + layer
            if in_place and before * total < (before + 1) * count:  # the result would overwrite what it is made of
                into.copy_(rows.index_select(0, index[layer]))
            else:
                torch.index_select(rows, 0, index[layer], out=into)
            if plane == 0 and then is not None:
                then(layer, out[0, layer])
    return out


def empty_kv(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory in huge pages where Linux has them: faulting in small ones takes longer than an edit."""
    out = torch.empty(shape, dtype=like.dtype, device=like.device)
    if out.device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        first = -(-out.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (out.data_ptr() + out.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            _madvise()(first, length, mmap.MADV_HUGEPAGE)  # only advice: without it all stays right
    return out


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    found: Callable[[int, int, int], int] = advise
    return found
