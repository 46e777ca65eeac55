"""The ways in which stored KV may be read: every packing, head size and rotation that fits a chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lmcache_stream.kvcache.mp.codec import CODECS, Codec
from lmcache_stream.rotary import Rotary

if TYPE_CHECKING:
    from torch import Tensor

    from lmcache_stream.geometry import KVGeometry

__all__ = ["Reading", "readings"]

COMMON_BASES = (1e4, 1e5, 1.5e5, 5e5, 1e6, 2e6, 5e6, 1e7)
COMMON_HEAD_DIMS = (64, 128, 80, 96, 256, 32, 112, 160, 192)


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read stored chunks.

    Args:
        codec: Packing, heads and head size of one rank.
        rotary: Positions of layer 0; None: it has none.
    """

    codec: Codec
    rotary: Rotary | None

    def __str__(self) -> str:
        codec = self.codec
        shape = f"{codec.name}, {codec.heads} x {codec.head_dim}"
        if self.rotary is None:
            return f"{shape}, no positions"
        kind = "interleaved" if self.rotary.interleaved else "half-split"
        pairs = self.rotary.inv_freq
        return f"{shape}, {len(pairs)} {kind} rotary pairs of {pairs[0]:.4g} to {pairs[-1]:.4g} radians"


def readings(chunk: Tensor, geometry: KVGeometry | None, world_size: int = 1) -> list[Reading]:
    """List every reading that fits a stored chunk.

    Args:
        chunk: A chunk of one rank as the cache holds it: `[2, L, C, D]` or `[L, C, width]`, a leading 1 allowed.
        geometry: What is known of the KV; what is not known is taken from what is common among models.
        world_size: Ranks that share the heads.
    """
    shape = tuple(chunk.shape[1:] if chunk.dim() == 4 and chunk.shape[0] == 1 else chunk.shape)
    num_layers, tokens = shape[-3], shape[-2]
    if geometry is not None and geometry.num_layers != num_layers:
        return []
    found: list[Reading] = []
    for codec_type in CODECS.values():
        for heads, head_dim in _heads(codec_type, shape, geometry, world_size):
            for block_size in _block_sizes(codec_type, tokens, geometry):
                codec = codec_type(num_layers, heads, head_dim, block_size)
                if codec.stored_shape(tokens) == shape:
                    found += [Reading(codec, rotary) for rotary in _rotaries(codec, geometry)]
    return found


def _heads(
    codec_type: type[Codec], shape: tuple[int, ...], geometry: KVGeometry | None, world_size: int
) -> list[tuple[int, int]]:
    if geometry is not None:
        if geometry.planes != codec_type.planes:
            return []
        heads = geometry.num_kv_heads if geometry.planes == 1 else geometry.num_kv_heads // world_size
        return [(heads, geometry.head_dim)] if heads else []
    width = shape[-1]
    if codec_type.planes == 1:
        return [(1, width)]
    if codec_type.stored_mla:
        width //= 2
    return [(width // head_dim, head_dim) for head_dim in COMMON_HEAD_DIMS if width and width % head_dim == 0]


def _block_sizes(codec_type: type[Codec], tokens: int, geometry: KVGeometry | None) -> list[int | None]:
    if geometry is not None and geometry.block_size is not None:
        return [geometry.block_size] if tokens % geometry.block_size == 0 else []
    if codec_type.name != "cpu-packed":
        return [None]
    return [size for size in (32, 64, 128, 256) if tokens % size == 0]


def _rotaries(codec: Codec, geometry: KVGeometry | None) -> list[Rotary | None]:
    if geometry is not None and geometry.rotary is not None:
        return [geometry.rotary[0]]
    rotated = 64 if codec.planes == 1 else codec.head_dim
    if codec.head_dim < rotated or rotated % 2:
        return [None]
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    return [
        Rotary(tuple((1.0 / base**exponents).tolist()), codec.head_dim, codec.head_dim - rotated, interleaved)
        for base in COMMON_BASES
        for interleaved in (False, True)
    ] + [None]
