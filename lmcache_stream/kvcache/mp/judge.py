"""Judges readings of stored KV by what lies in layer 0, without the model.

At layer 0 a token's value depends on the token alone, and so does its key once the rotary position is undone. Under the
right reading the entries of equal ids are equal but for rounding; under any other they are not.

A reading is accepted if in V, in what K has without position, and in each rotary pair the variance among equal ids
stays below `MARGIN` times what rounding to the dtype makes. Readings are verified, not fitted: a pair that turns so
little over the prompt that a wrong frequency would not have shown is reported as unproven.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lmcache_stream.errors import GeometryError
from lmcache_stream.rotary import Rotary, rerotate_

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lmcache_stream.kvcache.mp.codec import Codec
    from lmcache_stream.kvcache.mp.readings import Reading

__all__ = ["RESOLUTION", "Verdict", "judge", "ranges"]

MARGIN = 20.0
"""How many times the variance of rounding equal ids may have."""

RESOLUTION = 0.001
"""A rotary pair is proven if a frequency off by this share would have been noticed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the KV says about a reading.

    Args:
        reading: The reading.
        accepted: Whether it proves itself.
        reason: Why not; empty if it does.
        key_spread: Spread of K (positions undone) within equal ids over its spread in all; NaN if V refused it before.
        value_spread: The same of V; None where the reading has no V.
        pairs: For each rotary pair, the spread within equal ids over the size of its values.
        pairs_proven: For each rotary pair, whether a wrong frequency would have shown.
        span: Positions that equal ids are apart at most.
    """

    reading: Reading
    accepted: bool
    reason: str = ""
    key_spread: float = math.nan
    value_spread: float | None = None
    pairs: tuple[float, ...] = ()
    pairs_proven: tuple[bool, ...] = ()
    span: int = 0

    def __str__(self) -> str:
        spreads = [("K", self.key_spread), ("V", math.nan if self.value_spread is None else self.value_spread)]
        measured = ", ".join(f"{name} {spread:.2g}" for name, spread in spreads if not math.isnan(spread))
        return ": ".join(filter(None, [str(self.reading), measured])) + (f" ({self.reason})" if self.reason else "")


def judge(
    stored_chunks: Sequence[Tensor] | Tensor, token_ids: Sequence[int], candidates: Sequence[Reading]
) -> list[Verdict]:
    """Judge readings by what lies in layer 0.

    Args:
        stored_chunks: Chunks of one rank in order, as the cache holds them, of a prompt that starts at position 0.
        token_ids: The ids of their tokens, few different ones in an irregular order.
        candidates: Readings to judge.

    Returns:
        A verdict on each.
    """
    # Layer 0 is all that is looked at.
    chunks = [chunk.narrow(-3, 0, 1) for chunk in stored_chunks]
    ids = _Ids(torch.tensor(list(token_ids)))
    floor = _rounding(chunks[0].dtype)
    values: dict[Codec, tuple[Tensor, _Spread | None] | GeometryError] = {}
    verdicts = []
    for reading in candidates:
        codec, rotary = reading.codec, reading.rotary
        if codec not in values:
            values[codec] = _decode(chunks, codec, ids)
        decoded = values[codec]
        if isinstance(decoded, GeometryError):
            verdict = Verdict(reading, accepted=False, reason=str(decoded))
        elif rotary is not None and rotary.head_dim != codec.head_dim:
            reason = f"its rotary positions are of heads of {rotary.head_dim}"
            verdict = Verdict(reading, accepted=False, reason=reason)
        else:
            verdict = _judge(reading, *decoded, ids, floor)
        verdicts.append(verdict)
    return verdicts


def _judge(reading: Reading, keys: Tensor, value: _Spread | None, ids: _Ids, floor: float) -> Verdict:
    value_spread = None if value is None else value.share_of_all
    if value is not None and (difference := value.differs(floor)):
        return Verdict(reading, accepted=False, reason=f"V {difference}", value_spread=value_spread, span=ids.span)
    # Most wrong readings show in one head.
    verdict = _judge_keys(reading, keys[:, :1], ids, floor)
    if verdict.accepted and reading.codec.heads > 1:
        verdict = _judge_keys(reading, keys, ids, floor)
    return replace(verdict, value_spread=value_spread)


def _rounding(dtype: torch.dtype) -> float:
    """Variance of rounding to a dtype, for values of size 1, and of the float32 sums before it."""
    return torch.finfo(dtype).eps ** 2 / 12 + torch.finfo(torch.float32).eps ** 2


def _decode(chunks: Sequence[Tensor], codec: Codec, ids: _Ids) -> tuple[Tensor, _Spread | None] | GeometryError:
    """Keys of layer 0 as `[T, heads, head_dim]` in float64 and the spread of V; or why they cannot be read so."""
    chunk_size = chunks[0].shape[-2]
    if len(chunks) * chunk_size != ids.tokens:
        return GeometryError(f"{len(chunks)} chunks of {chunk_size} tokens do not hold {ids.tokens} tokens")
    out = torch.empty(codec.planes, 1, ids.tokens, codec.width, dtype=chunks[0].dtype)
    of_layer = replace(codec, num_layers=1)
    try:
        for i, chunk in enumerate(chunks):
            of_layer.decode(chunk, out.narrow(2, i * chunk_size, chunk_size))
    except GeometryError as error:
        return error
    by_head = out.view(codec.planes, ids.tokens, codec.heads, codec.head_dim).double()
    if not by_head.isfinite().all():
        return GeometryError("not all values are finite")
    return by_head[0], _spread(by_head[1], ids) if codec.planes == 2 else None


class _Ids:
    """Groups tokens by id."""

    def __init__(self, token_ids: Tensor) -> None:
        self.token_ids = token_ids
        self.tokens = len(token_ids)
        _, self._group = torch.unique(token_ids, return_inverse=True)
        self._count = self._group.bincount()
        positions = torch.arange(self.tokens)
        self.position_deviation = self.within(positions.double()).sqrt().item()
        edges = torch.zeros_like(self._count)
        first = edges.scatter_reduce(0, self._group, positions, "amin", include_self=False)
        last = edges.scatter_reduce(0, self._group, positions, "amax", include_self=False)
        self.span = int((last - first).max())

    def within(self, values: Tensor) -> Tensor:
        """Squared deviation of `[T, ...]` from the mean of its id, averaged over tokens: `[...]`."""
        sums = torch.zeros(len(self._count), *values.shape[1:], dtype=values.dtype).index_add(0, self._group, values)
        means = sums / self._count.view(-1, *[1] * (values.dim() - 1))
        return torch.sub(values, means[self._group]).square().mean(0)


@dataclass(frozen=True, slots=True)
class _Spread:
    """Mean squares of some entries: around the mean of their id, around the mean of all, and of their values."""

    within: float
    all: float
    size: float

    @property
    def share_of_all(self) -> float:
        return math.sqrt(self.within / self.all) if self.all > 0 else math.inf

    def differs(self, floor: float) -> str:
        """Tell why equal ids cannot be said to have equal entries; empty if they have."""
        limit = MARGIN * floor * self.size
        if not self.within <= limit:
            return "differs among equal ids"
        if self.all < 10 * limit:
            return "is too alike for all ids to tell"
        return ""


def _spread(values: Tensor, ids: _Ids) -> _Spread:
    return _Spread(
        within=ids.within(values).mean().item(),
        all=values.var(0, correction=0).mean().item(),
        size=values.square().mean().item(),
    )


def _judge_keys(reading: Reading, keys: Tensor, ids: _Ids, floor: float) -> Verdict:
    rotary = reading.rotary
    reasons = []
    pairs: tuple[float, ...] = ()
    pairs_proven: tuple[bool, ...] = ()
    if rotary is not None:
        if rotary.limit is not None and rotary.limit < ids.tokens:
            ids = _Ids(ids.token_ids[: rotary.limit])
        keys = _undo(keys[: ids.tokens], rotary)
        pairs, limits, pairs_proven = _judge_pairs(keys, rotary, ids, floor)
        wrong = [i for i, (pair, limit) in enumerate(zip(pairs, limits, strict=True)) if not pair <= limit]
        if wrong:
            reasons.append(f"rotary pairs {ranges(wrong)} differ among equal ids")
        elif not any(pairs_proven):
            reasons.append(f"no rotary pair turns enough over {ids.span} positions")
    still = _without_position(keys, rotary)
    if still.shape[-1] and (difference := _spread(still, ids).differs(floor)):
        reasons.append(f"K{'' if rotary is None else ' without position'} {difference}")
    return Verdict(
        reading,
        accepted=not reasons,
        reason=", ".join(reasons),
        key_spread=_spread(keys, ids).share_of_all,
        pairs=pairs,
        pairs_proven=pairs_proven,
        span=ids.span,
    )


def _undo(keys: Tensor, rotary: Rotary) -> Tensor:
    """Turn keys `[T, heads, head_dim]` back to position 0."""
    positions = torch.arange(keys.shape[0])
    return rerotate_(keys.clone()[None], positions, torch.zeros_like(positions), rotary)[0]


def _without_position(keys: Tensor, rotary: Rotary | None) -> Tensor:
    if rotary is None:
        return keys
    return torch.cat([keys[..., : rotary.offset], keys[..., rotary.offset + rotary.width :]], dim=-1)


def _judge_pairs(
    keys: Tensor, rotary: Rotary, ids: _Ids, floor: float
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[bool, ...]]:
    """For each pair of keys `[T, heads, head_dim]` at position 0: its spread, the most allowed, and if it is proven."""
    rotated = keys[..., rotary.offset : rotary.offset + rotary.width]
    shape, over = ((-1, 2), (0, 2)) if rotary.interleaved else ((2, -1), (0, 1))
    by_pair = rotated.view(*rotated.shape[:-1], *shape)
    within = ids.within(by_pair).mean(over)
    size = by_pair.square().mean(0).mean(over)
    spreads = (within / size).sqrt()

    inv_freq = torch.tensor(rotary.inv_freq, dtype=torch.float64)
    # An engine computes angles in float32; its frequencies may differ from ours in the last bit.
    angle_error = inv_freq * ids.tokens * torch.finfo(torch.float32).eps / 2
    limits = (MARGIN * (floor + angle_error**2)).sqrt()
    wrong_angle = RESOLUTION * inv_freq * ids.position_deviation
    proven = wrong_angle.clamp(max=0.5) > limits
    return tuple(spreads.tolist()), tuple(limits.tolist()), tuple(proven.tolist())


def ranges(numbers: Sequence[int]) -> str:
    """Write [0, 1, 2, 5] as "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] + 1 == number:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
