"""How KV is cut into chunks, and chunks are copied side by side."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from lmcache_stream.kvcache.mp.codec import Codec
    from lmcache_stream.transfer import TransferExecutor

__all__ = ["copy_in_parts", "part_of"]


def part_of(kv: Tensor, codec: Codec, rank: int, index: int, chunk_size: int) -> Tensor:
    """View what chunk `index` of `rank` holds of `kv` `[planes, L, T, D]`, `D` over all ranks: `[planes, L, C, D]`."""
    of_rank = kv.narrow(3, rank * codec.width, codec.width)
    return of_rank.narrow(2, index * chunk_size, chunk_size)


async def copy_in_parts(executor: TransferExecutor, copy: Callable[..., None], count: int, *args: Any) -> None:
    """Run `copy(*args, first, last)` over `count` items, side by side; all of it has ended when this returns."""
    lanes = max(1, min(executor.lanes, count))
    bounds = [count * part // lanes for part in range(lanes + 1)]
    runs = (executor.run(copy, *args, first, last) for first, last in itertools.pairwise(bounds))
    failures = [failed for failed in await asyncio.gather(*runs, return_exceptions=True) if failed is not None]
    try:
        if failures:
            raise failures[0]
    finally:
        failures.clear()
