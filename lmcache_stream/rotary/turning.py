"""Moving keys from one position to another: in place, in tiles, by angles that are computed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_stream.errors import UsageError
from lmcache_stream.rotary.rotary import Rotary

__all__ = ["Rerotation", "mean_rotation", "rerotate", "rerotate_"]


def rerotate(
    keys: torch.Tensor,
    old_positions: torch.Tensor,
    new_positions: torch.Tensor,
    rotary: Rotary | Sequence[Rotary | None] | None,
) -> torch.Tensor:
    """Move keys to other positions.

    An engine's angle is the float32 product of position and frequency. The difference of two such angles is taken in
    float64 and the rotation done in float32, so the result is as good as a fresh rotation by the engine, at any
    position up to 2^24.

    Args:
        keys: `[L, T, H * head_dim]` or `[..., T, H, head_dim]` with at least four dimensions; floating point.
        old_positions: Positions that the keys carry, int64: `[T]`; for keys with one leading dimension also `[L, T]`
            or `[L, H, T]`.
        new_positions: Positions to carry, in one of the same shapes.
        rotary: The rotation of all layers, or one for each layer; None: that layer has no rotary positions.

    Returns:
        A contiguous tensor of the shape and dtype of `keys`. Memory beyond it: tiles of a few megabytes.

    Raises:
        UsageError: Shapes do not fit each other, or a position lies beyond what the rotation covers.
    """
    out = keys.clone(memory_format=torch.contiguous_format)
    if out.dim() > 4:
        shape = out.shape
        return rerotate_(out.view(-1, *shape[-3:]), old_positions, new_positions, rotary).view(shape)
    return rerotate_(out, old_positions, new_positions, rotary)


def rerotate_(
    keys: torch.Tensor,
    old_positions: torch.Tensor,
    new_positions: torch.Tensor,
    rotary: Rotary | Sequence[Rotary | None] | None,
) -> torch.Tensor:
    """Like `rerotate`, in place; `keys` is `[L, T, H * head_dim]` or `[L, T, H, head_dim]`. Returns `keys`."""
    if keys.dim() not in (3, 4) or not keys.is_floating_point():
        raise UsageError(
            f"keys must be floating point, [L, T, H * head_dim] or [L, T, H, head_dim], not {keys.dtype} "
            f"{list(keys.shape)}"
        )
    layers = [rotary] * keys.shape[0] if rotary is None or isinstance(rotary, Rotary) else list(rotary)
    if len(layers) != keys.shape[0]:
        raise UsageError(f"rotary names {len(layers)} layers, keys have {keys.shape[0]}: give one for each layer")
    if keys.numel():
        Rerotation(old_positions, new_positions, layers).turn_(keys)
    return keys


class Rerotation:
    """The move of `rerotate_`, for the keys of some layers at a time: their angles are computed once.

    Args:
        old_positions: Positions that the keys carry, int64 `[T]`, `[L, T]` or `[L, H, T]`.
        new_positions: Positions to carry, in one of the same shapes.
        layers: The rotation of each of the `L` layers; None: it has no rotary positions.
    """

    def __init__(
        self, old_positions: torch.Tensor, new_positions: torch.Tensor, layers: Sequence[Rotary | None]
    ) -> None:
        self._old, self._new = old_positions, new_positions
        self._layers = list(layers)
        self._shared: dict[Rotary, tuple[int, torch.Tensor, torch.Tensor]] = {}
        self._tables: dict[Rotary, tuple[int, torch.Tensor, torch.Tensor] | None] = {}
        self._scratch = torch.empty(2, 0)

    def turn_(self, keys: torch.Tensor, first: int = 0) -> None:
        """Move keys `[L', T, H * head_dim]` or `[L', T, H, head_dim]` of the layers from `first` on, in place.

        Raises:
            UsageError: Shapes do not fit each other, or a position lies beyond what the rotation covers.
        """
        for begin, end, rotary in _runs(self._layers[first : first + keys.shape[0]]):
            if rotary is None:
                continue
            part = _by_head(keys[begin:end], rotary)
            old, new = (
                self._of_layers(name, positions, part, first + begin, first + end)
                for name, positions in (("old_positions", self._old), ("new_positions", self._new))
            )
            _check_limit(rotary, old, new)
            if old.dim() == new.dim() == 1:
                self._turn_shared(part, old, new, rotary)
            else:
                self._turn_each(part, _per_token_head(old), _per_token_head(new), rotary)

    def _of_layers(self, name: str, positions: torch.Tensor, part: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        layers, tokens, heads = len(self._layers), part.shape[1], part.shape[2]
        if tuple(positions.shape) not in ((tokens,), (layers, tokens), (layers, heads, tokens)):
            raise UsageError(
                f"{name} must be [{tokens}], [{layers}, {tokens}] or [{layers}, {heads}, {tokens}], not "
                f"{list(positions.shape)}"
            )
        positions = positions.to(part.device)
        return positions if positions.dim() == 1 else positions[begin:end]

    def _turn_shared(self, keys: torch.Tensor, old: torch.Tensor, new: torch.Tensor, rotary: Rotary) -> None:
        if rotary not in self._shared:
            inv_freq = _inv_freq(rotary, keys.device)
            turn = _angles(new, inv_freq) - _angles(old, inv_freq)
            cos, sin = (part.to(_work_dtype(keys))[None, :, None, :] for part in (turn.cos(), turn.sin()))
            self._shared[rotary] = _first_moved(old, new), cos, sin
        first, cos, sin = self._shared[rotary]
        layer_step, token_step = _tiles(keys)
        for layer in range(0, keys.shape[0], layer_step):
            for t in range(first, keys.shape[1], token_step):
                some = slice(t, t + token_step)
                self._turn(keys[layer : layer + layer_step, some], cos[:, some], sin[:, some], rotary)

    def _turn_each(self, keys: torch.Tensor, old: torch.Tensor, new: torch.Tensor, rotary: Rotary) -> None:
        if rotary not in self._tables:
            low = int(min(self._old.min(), self._new.min()))
            span = int(max(self._old.max(), self._new.max())) + 1 - low
            pays = span * rotary.width <= keys.numel() // keys.shape[0] * len(self._layers) // 16
            self._tables[rotary] = (low, *_table(rotary, low, span, keys)) if pays else None
        table, dtype, inv_freq = self._tables[rotary], _work_dtype(keys), _inv_freq(rotary, keys.device)
        layer_step, token_step = _tiles(keys)
        for layer in range(0, keys.shape[0], layer_step):
            for t in range(0, keys.shape[1], token_step):
                before, after = (_tile(p, layer, layer_step, t, token_step) for p in (old, new))
                if table is None:
                    turn = _angles(after, inv_freq) - _angles(before, inv_freq)
                    cos, sin = turn.cos().to(dtype), turn.sin().to(dtype)
                else:
                    low, *angles = table
                    cos, sin = _turn_by_table(angles, before - low, after - low)
                self._turn(keys[layer : layer + layer_step, t : t + token_step], cos, sin, rotary)

    def _turn(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: Rotary) -> None:
        """Rotate `[L, T, H, head_dim]`, in memory that is used again: faulting it in anew would take longer."""
        count = keys[..., : rotary.width].numel()
        if self._scratch.shape[1] < count or self._scratch.dtype != cos.dtype or self._scratch.device != cos.device:
            self._scratch = torch.empty(2, count, dtype=cos.dtype, device=cos.device)
        _turn(keys, cos, sin, rotary, self._scratch[:, :count])


def mean_rotation(rotary: Rotary, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Average the rotations of the positions `start .. start + count - 1`.

    Returns:
        float64 `[head_dim, head_dim]`: `mean_rotation @ v` is the mean of a vector `v` at position 0 rotated to each.

    Raises:
        UsageError: A position lies beyond what the rotation covers.
    """
    positions = torch.arange(start, start + count, device=device)
    _check_limit(rotary, positions, positions)
    angles = _angles(positions, _inv_freq(rotary, device))
    columns = torch.eye(rotary.head_dim, dtype=torch.float64, device=device)
    scratch = torch.empty(2, columns.shape[0] * rotary.width, dtype=columns.dtype, device=device)
    _turn(columns[None, None], angles.cos().mean(0), angles.sin().mean(0), rotary, scratch)
    return columns.T


def _runs(layers: Sequence[Rotary | None]) -> list[tuple[int, int, Rotary | None]]:
    """Runs of neighbouring layers with equal rotations: begin, end, rotation."""
    runs: list[tuple[int, int, Rotary | None]] = []
    for index, rotary in enumerate(layers):
        if runs and runs[-1][2] == rotary:
            runs[-1] = (runs[-1][0], index + 1, rotary)
        else:
            runs.append((index, index + 1, rotary))
    return runs


def _by_head(keys: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """View `[L, T, H, head_dim]`."""
    if keys.dim() == 3 and keys.shape[-1] % rotary.head_dim == 0:
        keys = keys.view(*keys.shape[:2], -1, rotary.head_dim)
    if keys.dim() != 4 or keys.shape[-1] != rotary.head_dim:
        raise UsageError(f"keys {list(keys.shape)} do not divide into heads of {rotary.head_dim} values")
    return keys


def _check_limit(rotary: Rotary, old: torch.Tensor, new: torch.Tensor) -> None:
    if rotary.limit is not None and max(int(old.max()), int(new.max())) >= rotary.limit:
        raise UsageError(f"the rotation is known up to position {rotary.limit - 1} only; these keys lie beyond")


def _per_token_head(positions: torch.Tensor) -> torch.Tensor:
    """Bring positions of any of the three shapes to `[L | 1, T, H | 1]`."""
    if positions.dim() == 1:
        return positions[None, :, None]
    return positions[:, :, None] if positions.dim() == 2 else positions.transpose(1, 2)


def _angles(positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """`[...]` -> `[..., pairs]`, the engines' float32 product as float64."""
    return (positions.float().unsqueeze(-1) * inv_freq).double()


def _inv_freq(rotary: Rotary, device: torch.device) -> torch.Tensor:
    return torch.tensor(rotary.inv_freq, dtype=torch.float32, device=device)


def _work_dtype(keys: torch.Tensor) -> torch.dtype:
    return torch.promote_types(keys.dtype, torch.float32)


def _tiles(keys: torch.Tensor) -> tuple[int, int]:
    """Layers and tokens that are rotated at once: launch-sized on a GPU, cache-sized on a CPU."""
    target = min(1 << 19 if keys.device.type == "cpu" else 1 << 23, max(keys.numel() // 64, 1))
    width = keys.shape[2] * keys.shape[3]
    tokens = min(keys.shape[1], max(target // width, 1))
    return max(target // (width * tokens), 1), tokens


def _first_moved(old: torch.Tensor, new: torch.Tensor) -> int:
    """The first token whose position changes; 0 on a GPU, where asking takes longer than turning."""
    if old.device.type != "cpu":
        return 0
    moved = (old != new).nonzero()
    return int(moved[0]) if len(moved) else len(old)


def _tile(positions: torch.Tensor, layer: int, layer_step: int, t: int, token_step: int) -> torch.Tensor:
    if positions.shape[0] > 1:
        positions = positions[layer : layer + layer_step]
    return positions[:, t : t + token_step]


def _table(rotary: Rotary, low: int, span: int, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the angles of the positions `low .. low + span - 1`."""
    angles = _angles(torch.arange(low, low + span, device=keys.device), _inv_freq(rotary, keys.device))
    return angles.cos().to(_work_dtype(keys)), angles.sin().to(_work_dtype(keys))


def _turn_by_table(
    table: Sequence[torch.Tensor], before: torch.Tensor, after: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the difference of two angles, from tables of both."""
    cos_before, sin_before, cos_after, sin_after = (
        part.index_select(0, at.flatten()).view(*at.shape, -1) for at in (before, after) for part in table
    )
    return cos_after * cos_before + sin_after * sin_before, sin_after * cos_before - cos_after * sin_before


def _turn(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: Rotary, scratch: torch.Tensor) -> None:
    """Rotate `[L, T, H, head_dim]` in place by angles `[L | 1, T, H | 1, pairs]`; `scratch` takes them twice."""
    rotated = keys[..., rotary.offset : rotary.offset + rotary.width]
    before, after = (part.view(rotated.shape) for part in scratch)
    before.copy_(rotated)
    first, second = _pairs(before, rotary)
    turned_first, turned_second = _pairs(after, rotary)
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin)
    rotated.copy_(after)


def _pairs(rotated: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    if rotary.interleaved:
        return rotated[..., 0::2], rotated[..., 1::2]
    pairs = len(rotary.inv_freq)
    return rotated[..., :pairs], rotated[..., pairs:]
