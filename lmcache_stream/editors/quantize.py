"""Quantisation: what fewer bits would do to the KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from lmcache_stream.editors.base import Edit, EditInput, Editor
from lmcache_stream.editors.tensors import block, empty_kv
from lmcache_stream.errors import UsageError

__all__ = ["Quantize"]

BLOCK = 1 << 20
"""Values rounded at once on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Quantize(Editor):
    """Rounds the KV to int8 or fp8 and back, symmetric, one scale for each layer and channel; keeps every token.

    Keys vary most by channel, so they are scaled by channel (Liu et al. 2024, "KIVI", arXiv:2402.02750).

    Args:
        to: "int8" or "fp8" (e4m3).
        keys: Whether keys are rounded; with MLA they are the latent.
        values: Whether values are rounded.
    """

    name: ClassVar[str] = "quantize"
    keeps_all: ClassVar[bool] = True

    to: Literal["int8", "fp8"] = "int8"
    keys: bool = True
    values: bool = True

    def __post_init__(self) -> None:
        if self.to not in ("int8", "fp8"):
            raise UsageError(f"to must be int8 or fp8, not {self.to!r}")

    def edit(self, x: EditInput) -> Edit:
        """Round each plane: see the class and `Editor.edit`."""
        x = self._prepared(x)
        in_place = x.spent and x.kv.is_contiguous()
        kv = x.kv.view_as(x.kv) if in_place else empty_kv(tuple(x.kv.shape), x.kv)
        for given, made, rounds in zip(x.kv, kv, (self.keys, self.values), strict=False):
            if rounds and x.tokens:
                for layer, into in zip(given, made, strict=True):
                    self._round_trip(layer, into)
            elif not in_place:
                made.copy_(given)
        return Edit(kv=kv, tokens=x.tokens, kept_positions=torch.arange(len(x.tokens), device=kv.device))

    def _round_trip(self, layer: torch.Tensor, into: torch.Tensor) -> None:
        """`[T, D]`, in float32 inside."""
        largest = 127.0 if self.to == "int8" else torch.finfo(torch.float8_e4m3fn).max
        scale = layer.abs().amax(dim=0).float().clamp_min(1e-30) / largest
        tokens = max(block(BLOCK, layer.device) // max(layer.shape[1], 1), 1)
        for start in range(0, len(layer), tokens):
            scaled = layer[start : start + tokens].float() / scale
            rounded = scaled.round_() if self.to == "int8" else scaled.to(torch.float8_e4m3fn).float()
            into[start : start + tokens] = rounded.mul_(scale)
