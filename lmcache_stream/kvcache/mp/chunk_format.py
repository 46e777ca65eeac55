"""What the chunks of a model hold: told, proven or learnt from chunks that came back, and never guessed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from lmcache_stream.errors import CacheProtocolError, GeometryError, UsageError
from lmcache_stream.kvcache.mp.codec import Codec, Latent, Split, codec_for
from lmcache_stream.kvcache.mp.registry import Layout
from lmcache_stream.types import CacheKind

if TYPE_CHECKING:
    from torch import Tensor

    from lmcache_stream.geometry import KVGeometry
    from lmcache_stream.kvcache.mp.status import ServerFacts

__all__ = ["ChunkFormat"]


class ChunkFormat:
    """How chunks of one model are read and written.

    Args:
        facts: What the server says.
        geometry: Shape of the KV, as far as it is known; None: nothing is.
        explicit: Whether the caller gave that shape.

    Attributes:
        codec: How chunks of KV are read; None while that is open.
        geometry: Shape of the KV by now.
    """

    def __init__(self, facts: ServerFacts, geometry: KVGeometry | None, *, explicit: bool) -> None:
        model = facts.model
        self.codec: Codec | None = None
        self.geometry = geometry
        self._model = model
        self._chunk_size = facts.chunk_size
        self._unreadable: str | None = None
        self._shape_known = explicit or None not in (model.num_layers, model.dtype, model.width)
        self._dtype = geometry.dtype if geometry is not None else None
        self._queries: tuple[Latent, torch.dtype] | None = None
        if geometry is not None:
            try:
                self._read_with(codec_for(facts, geometry))
            except GeometryError as error:
                self._unreadable = str(error)

    def adopt(self, codec: Codec, geometry: KVGeometry) -> None:
        """Read chunks with `codec` from now on, since chunks of the cache have proven it."""
        self._read_with(codec)
        self.geometry = geometry
        self._dtype = geometry.dtype
        self._unreadable = None
        self._shape_known = True

    def check_readable(self) -> None:
        """Raise if it is known already that chunks of KV cannot be read."""
        if self._unreadable is not None:
            raise GeometryError(self._unreadable)

    def for_reading(self, kind: CacheKind, chunk: Tensor) -> Codec:
        """Choose how to read chunks; what comes back from the cache is the truth about their shape and dtype.

        Args:
            kind: What the chunks hold.
            chunk: One of them.

        Raises:
            GeometryError: It can be read in several ways, or contradicts the geometry in use.
            CacheProtocolError: It cannot be a chunk.
        """
        shape = tuple(chunk.shape[1:] if chunk.dim() == 4 and chunk.shape[0] == 1 else chunk.shape)
        if len(shape) not in (3, 4) or shape[-2] != self._chunk_size:
            raise CacheProtocolError(f"the cache holds chunks of shape {list(shape)} for {self._chunk_size} tokens")
        if kind is CacheKind.QUERY:
            if len(shape) != 3:
                raise CacheProtocolError(f"the cache holds queries of shape {list(shape)}, not one plane")
            self._queries = Latent(shape[0], 1, shape[2]), chunk.dtype
            return self._queries[0]
        if self.codec is None and self.geometry is None and len(shape) == 4:
            self.codec = Split(shape[1], 1, shape[3])
        if self.codec is None:
            raise GeometryError(
                self._unreadable
                or f"{self._model.described} lies in chunks of shape {list(shape)}, which can be read in several "
                "ways: connect with probe=engine, or with geometry=KVGeometry(...)"
            )
        expected = self.codec.stored_shape(self._chunk_size)
        if shape != expected:
            raise GeometryError(
                f"the cache holds chunks of {list(shape)} for {self._model.model_name!r}, but the geometry in use "
                f"makes them {list(expected)} ({self.codec.name}): {self.geometry or 'that of the chunks read first'}"
            )
        if self._dtype not in (None, chunk.dtype):
            raise GeometryError(
                f"the cache holds {chunk.dtype} for {self._model.model_name!r}, but the geometry in use says "
                f"{self._dtype}"
            )
        self._dtype = chunk.dtype
        if self.geometry is not None:
            self.geometry = dataclasses.replace(self.geometry, dtype=chunk.dtype)
        self._shape_known = True
        return self.codec

    def for_writing(self, kind: CacheKind, kv: Tensor) -> tuple[Codec, torch.dtype]:
        """How `kv` `[planes, L, T, D]` is written, and the dtype that chunks have.

        Raises:
            GeometryError: That is not known for sure.
            UsageError: Chunks in the cache have another shape or dtype.
        """
        if kind is CacheKind.QUERY:
            return self._for_writing_queries(kv)
        self.check_readable()
        if self.codec is None or self._dtype is None or not self._shape_known:
            raise GeometryError(
                f"the shape of the KV that the cache holds for {self._model.model_name!r} is not known for sure yet: "
                "retrieve some first, or connect with geometry=KVGeometry(..., dtype=...)"
            )
        self._check_fits(kind, kv, self.codec, self._dtype)
        return self.codec, self._dtype

    def layout_to_read(self) -> Layout:
        """What to register with before anything is read."""
        dtype = self._dtype or self._model.dtype
        if self.codec is not None and dtype is not None:
            return self.layout_to_write(self.codec, dtype)
        # Reads do not depend on it.
        return Layout(1, 1, torch.uint8, True, self._block_size, self._model.world_size)

    def layout_to_write(self, codec: Codec, dtype: torch.dtype) -> Layout:
        """What to register with before chunks are written with `codec`."""
        width = codec.stored_shape(self._chunk_size)[-1]
        world_size = self._model.world_size
        return Layout(codec.num_layers, width, dtype, codec.stored_mla, self._block_size, world_size)

    @property
    def _block_size(self) -> int:
        return self._model.block_size or self._chunk_size

    def _for_writing_queries(self, kv: Tensor) -> tuple[Codec, torch.dtype]:
        layers, width = kv.shape[1], kv.shape[3]
        ranks = self._model.world_size
        if self._queries is not None:
            self._check_fits(CacheKind.QUERY, kv, *self._queries)
            return self._queries
        if self.geometry is None or self.geometry.num_heads is None:
            raise GeometryError(
                f"the shape of the queries of {self._model.model_name!r} is not known: retrieve some first, or "
                "connect with geometry=KVGeometry(..., num_heads=...)"
            )
        if width % ranks:
            raise UsageError(f"queries of width {width} do not divide over {ranks} ranks")
        return Latent(layers, 1, width // ranks), kv.dtype

    def _check_fits(self, kind: CacheKind, kv: Tensor, codec: Codec, dtype: torch.dtype) -> None:
        planes, layers, width = codec.planes, codec.num_layers, codec.width * self._model.world_size
        if (kv.shape[0], kv.shape[1], kv.shape[3], kv.dtype) != (planes, layers, width, dtype):
            raise UsageError(
                f"{kind.value} is [{planes}, {layers}, T, {width}] of {dtype} in the cache, not {list(kv.shape)} of "
                f"{kv.dtype}"
            )

    def _read_with(self, codec: Codec) -> None:
        ranks = self._model.world_size
        if isinstance(codec, Latent) and ranks > 1:
            raise GeometryError(f"MLA over {ranks} ranks is not supported: serve {self._model.model_name!r} with one")
        self.codec = codec
