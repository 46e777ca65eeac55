"""What a stored chunk holds, and how it becomes keys and values.

An engine keeps KV in paged blocks; a chunk is a permutation of them into token-major order. The cache server names the
engine's block format, in the labels of LMCache: `NL` layers, `NB` blocks, `BS` tokens a block, `NH` KV heads, `HS` head
size, `CS = 2 * HS`. Formats that end in `CS` or `TWO_HS` hold K and V fused in the last dimension; formats with another
`TWO` hold them apart; those without heads hold one latent plane (MLA).

Everything here concerns one chunk of one rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lmcache_stream.errors import GeometryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from lmcache_stream.geometry import KVGeometry
    from lmcache_stream.kvcache.mp.status import ServerFacts

__all__ = ["CODECS", "CPUPacked", "Codec", "Fused", "Latent", "Split", "codec_candidates", "codec_for", "format_kind"]


@dataclass(frozen=True, slots=True)
class Codec(ABC):
    """One reading of a stored chunk.

    Args:
        num_layers: Layers, `L`.
        heads: KV heads of one rank, `NH`; 1 for MLA.
        head_dim: Values a head, `HS`; for MLA the width of the latent plane.
        block_size: Tokens an engine block, `BS`; needed where blocks are packed.
    """

    name: ClassVar[str]
    planes: ClassVar[int]
    stored_mla: ClassVar[bool]

    num_layers: int
    heads: int
    head_dim: int
    block_size: int | None = None

    @property
    def width(self) -> int:
        """`D` of one rank."""
        return self.heads * self.head_dim

    @abstractmethod
    def stored_shape(self, chunk_size: int) -> tuple[int, ...]:
        """Shape of a stored chunk of `chunk_size` tokens, without the leading 1 that some transfer paths add."""

    @abstractmethod
    def _views(self, stored: Tensor, kv: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of equally shaped views, of `stored` and of `kv`, that together cover each value once."""

    def decode(self, stored: Tensor, out: Tensor) -> None:
        """Copy a stored chunk into `out` `[planes, L, C, D]`, which may have any strides.

        Args:
            stored: The chunk as the cache holds it, of `stored_shape(C)`; a leading 1 is allowed.
            out: Keys, then values (MLA: the latent plane), of the same dtype.

        Raises:
            GeometryError: The two do not fit each other or this codec.
        """
        for of_stored, of_out in self._matched(stored, out):
            of_out.copy_(of_stored)

    def encode(self, kv: Tensor, stored: Tensor) -> None:
        """Copy `kv` `[planes, L, C, D]`, of any strides, into a stored chunk: the inverse of `decode`."""
        for of_stored, of_kv in self._matched(stored, kv):
            of_stored.copy_(of_kv)

    def _matched(self, stored: Tensor, kv: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        if kv.dim() != 4 or (kv.shape[0], kv.shape[1], kv.shape[3]) != (self.planes, self.num_layers, self.width):
            expected = f"[{self.planes}, {self.num_layers}, tokens, {self.width}]"
            raise GeometryError(f"KV of one rank must be {expected} for the {self.name!r} layout, not {list(kv.shape)}")
        shape = self.stored_shape(kv.shape[2])
        if tuple(stored.shape) == (1, *shape):
            stored = stored.squeeze(0)
        if tuple(stored.shape) != shape:
            raise GeometryError(
                f"a stored chunk of {kv.shape[2]} tokens must be {list(shape)} for the {self.name!r} layout, "
                f"but the cache's is {list(stored.shape)}"
            )
        if stored.dtype != kv.dtype:
            raise GeometryError(f"the cache stores {stored.dtype}, but the KV is {kv.dtype}")
        return self._views(stored, kv)


@dataclass(frozen=True, slots=True)
class Split(Codec):
    """K and V apart: `[2, L, C, NH * HS]`."""

    name = "split"
    planes = 2
    stored_mla = False

    def stored_shape(self, chunk_size: int) -> tuple[int, ...]:
        return (2, self.num_layers, chunk_size, self.width)

    def _views(self, stored: Tensor, kv: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield stored, kv


@dataclass(frozen=True, slots=True)
class Latent(Codec):
    """MLA's one latent plane: `[L, C, HS]`."""

    name = "mla"
    planes = 1
    stored_mla = True

    def stored_shape(self, chunk_size: int) -> tuple[int, ...]:
        return (self.num_layers, chunk_size, self.width)

    def _views(self, stored: Tensor, kv: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield stored, kv[0]


@dataclass(frozen=True, slots=True)
class Fused(Codec):
    """K and V side by side, per token and head: `[L, C, NH * (K | V)]`."""

    name = "fused"
    planes = 2
    stored_mla = True

    def stored_shape(self, chunk_size: int) -> tuple[int, ...]:
        return (self.num_layers, chunk_size, 2 * self.width)

    def _views(self, stored: Tensor, kv: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        by_plane = _split(stored, 2, self.heads, 2, self.head_dim).permute(3, 0, 1, 2, 4)
        yield by_plane, _split(kv, 3, self.heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class CPUPacked(Codec):
    """vLLM's CPU backend (vector instructions): K transposed within each block.

    Of one block and head the `BS * CS` values lie in `BS` rows of `CS`, one row a token slot of `[L, C, NH * CS]`.
    Read row after row they are K as `[HS, BS]`, then V as `[BS, HS]`.
    """

    name = "cpu-packed"
    planes = 2
    stored_mla = True

    def __post_init__(self) -> None:
        if self.block_size is None:
            raise GeometryError(
                "the CPU packing cannot be read without the engine's block size: KVGeometry(block_size=...)"
            )
        if self.block_size % 2:
            raise GeometryError(f"the CPU packing needs an even block size, not {self.block_size}")

    def stored_shape(self, chunk_size: int) -> tuple[int, ...]:
        if chunk_size % self._block:
            raise GeometryError(f"a chunk of {chunk_size} tokens is not whole blocks of {self._block} tokens")
        return (self.num_layers, chunk_size, 2 * self.width)

    @property
    def _block(self) -> int:
        assert self.block_size is not None
        return self.block_size

    def _views(self, stored: Tensor, kv: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        block, head_dim, row = self._block, self.head_dim, 2 * self.head_dim
        slots = _split(_split(stored, 2, self.heads, row), 1, -1, block)  # [L, blocks, rows, NH, CS]
        keys, values = _split(_split(kv, 3, self.heads, head_dim), 2, -1, block)  # [L, blocks, BS, NH, HS]

        # K^T[h, b] is value h * BS + b of the rows in sequence. Runs of gcd(BS, CS) values stay together in a row and
        # in K^T; where the runs lie repeats every lcm(BS, CS) values, so one strided copy serves each run of a period.
        run, period = math.gcd(block, row), math.lcm(block, row)
        rows_a_period, heads_a_period = period // row, period // block
        packed = _split(slots[:, :, : block // 2], 2, -1, rows_a_period)  # [L, blocks, periods, rows, NH, CS]
        transposed = _split(keys, 4, -1, heads_a_period)  # [L, blocks, BS, NH, periods, HS of a period]
        for start in range(0, period, run):
            at_row, at_column = divmod(start, row)
            at_head, at_token = divmod(start, block)
            yield (
                packed[:, :, :, at_row, :, at_column : at_column + run],
                transposed[:, :, at_token : at_token + run, :, :, at_head].permute(0, 1, 4, 3, 2),
            )

        yield (
            _split(slots[:, :, block // 2 :], 4, 2, head_dim).permute(0, 1, 2, 4, 3, 5),
            _split(values, 2, -1, 2),
        )


def _split(tensor: Tensor, dim: int, *sizes: int) -> Tensor:
    """View one dimension as several; that never copies, whatever the strides are."""
    return tensor.view(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])


# Fused formats in which vLLM's CPU backend keeps its blocks, too; it takes blocks of whole 32 tokens.
_HEADS_FIRST = ("NL_X_NB_NH_BS_CS", "NL_X_NB_NH_BS_TWO_HS")

CODECS: Mapping[str, type[Codec]] = {codec.name: codec for codec in (Split, Fused, CPUPacked, Latent)}


def format_kind(engine_kv_format: str) -> str | None:
    """Tell how a format of LMCache's `EngineKVFormat` holds K and V: "split", "fused", "mla"; None: not supported."""
    labels = engine_kv_format.split("_")
    if labels[-1] == "CS" or labels[-2:] == ["TWO", "HS"]:
        return "fused"
    if labels[-1] != "HS":
        return None
    if "TWO" in labels:
        return "split"
    return "mla" if "NH" not in labels else None


def codec_candidates(facts: ServerFacts, geometry: KVGeometry) -> list[Codec]:
    """List every reading of the engine's chunks that what the server says leaves open.

    Raises:
        GeometryError: No codec reads that format, or the blocks and the heads do not divide.
    """
    layout = facts.model
    kinds = {kind for kind in (format_kind(name) for name in layout.formats) if kind is not None}
    if len(kinds) > 1 or (layout.formats and not kinds):
        raise GeometryError(f"KV of {layout.model_name!r} in {' and '.join(layout.formats)} is not supported")
    if kinds:
        (kind,) = kinds
    elif geometry.planes == 1:
        kind = "mla"
    else:
        kind = "fused" if layout.one_plane else "split"

    names: tuple[str, ...] = (kind,)
    block_size = layout.block_size or geometry.block_size
    if kind == "fused" and (not layout.formats or layout.formats[0] in _HEADS_FIRST):
        if block_size is None:
            raise GeometryError(f"{layout.described}: the block size is needed, give KVGeometry(block_size=...)")
        if block_size % 32 == 0:
            names = ("fused", "cpu-packed")

    heads = geometry.num_kv_heads
    if kind != "mla":
        if heads % geometry.world_size:
            raise GeometryError(
                f"{heads} KV heads do not divide over {geometry.world_size} ranks; models whose KV heads are "
                "replicated are not supported"
            )
        heads //= geometry.world_size
    return [CODECS[name](geometry.num_layers, heads, geometry.head_dim, block_size) for name in names]


def codec_for(facts: ServerFacts, geometry: KVGeometry) -> Codec:
    """Pick the codec that reads the engine's chunks.

    Raises:
        GeometryError: No codec reads them, or several readings are open.
    """
    candidates = codec_candidates(facts, geometry)
    if len(candidates) > 1:
        names = " or as ".join(codec.name for codec in candidates)
        raise GeometryError(
            f"{facts.model.described} can be read as {names}, and the server does not say which: "
            "connect with probe=engine, which finds out from one request"
        )
    return candidates[0]
