"""How much of the prompt's attention falls on the tokens that an edit kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lmcache_stream.editors.base import EditInput, Layer, QueryScoring
from lmcache_stream.errors import UsageError
from lmcache_stream.plots.kept import KeptPositions, positions_of
from lmcache_stream.plots.look import plain_axes, show_legend, style, the_axes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes

    from lmcache_stream.geometry import KVGeometry

__all__ = ["attention_mass", "mass_kept", "plot_attention_mass"]


@dataclass(frozen=True, kw_only=True)
class _Attention(QueryScoring):
    name = "attention_mass"

    def score_layer(self, layer: Layer, budget: int) -> torch.Tensor:
        total = layer.keys.shape[1]
        return self.attention(layer, max(total - self.window, 0), total).mean(dim=(1, 2))


def attention_mass(
    kv: torch.Tensor, queries: torch.Tensor, geometry: KVGeometry, *, window: int = 32, scale: float | None = None
) -> torch.Tensor:
    """The attention that each token gets from the last queries of the prompt.

    It is computed layer by layer from the KV before an edit and the queries of the same tokens, which the embedded
    engine caches with `queries=True`: `await cache.retrieve(tokens, salt, kind=CacheKind.QUERY)`.

    Args:
        kv: `[2, L, T, D]`, as `retrieve_kv` gives it before an edit.
        queries: `[1, L, T, Dq]`, rotated as the engine's attention sees them.
        geometry: Shape of the KV.
        window: Queries at the end that count.
        scale: Factor of the attention logits; None: `1 / sqrt(head_dim)`.

    Returns:
        float32 `[L, H, T]`, the mean over the `window` queries and the query heads of each KV head; sums to 1 over `T`.

    Raises:
        UsageError: The shapes do not fit, or there are queries of fewer tokens.
    """
    if window < 1:
        raise UsageError(f"window={window}: at least one query must count")
    total = kv.shape[2] if kv.dim() == 4 else 0
    x = EditInput(kv=kv, tokens=(0,) * total, geometry=geometry, chunk_size=1, queries=queries)
    return _Attention(window=window, scale=scale).score(x, total)


def mass_kept(mass: torch.Tensor, edit: KeptPositions | torch.Tensor) -> torch.Tensor:
    """The share of `mass` on the tokens that an edit kept.

    Args:
        mass: `[L, H, T]`, from `attention_mass`.
        edit: The receipt of `modify_kv`, or kept positions `[T']`, `[L, T']` or `[L, H, T']`.

    Returns:
        float32 `[L, H]`, from 0 to 1.

    Raises:
        UsageError: The edit does not tell positions, or is of other tokens, layers or heads.
    """
    kept, total = positions_of(edit, mass.shape[-1])
    if total != mass.shape[-1]:
        raise UsageError(f"the edit is of {total} tokens, and the attention of {mass.shape[-1]}")
    by_head = {1: kept.view(1, 1, -1), 2: kept.unsqueeze(1)}.get(kept.dim(), kept)
    try:
        index = by_head.expand(*mass.shape[:2], -1)
    except RuntimeError as error:
        raise UsageError(f"kept positions {list(kept.shape)} do not fit attention {list(mass.shape)}") from error
    return mass.cpu().gather(-1, index).sum(-1)


def plot_attention_mass(
    mass: torch.Tensor,
    edits: Mapping[str, KeptPositions | torch.Tensor],
    *,
    title: str = "Attention on what was kept",
    ax: Axes | None = None,
) -> Axes:
    """Draw for each edit how much of the prompt's attention it kept, layer by layer: the mean over heads, and a bar
    from the head that kept least to the one that kept most.

    Args:
        mass: `[L, H, T]`, from `attention_mass`.
        edits: Name -> receipt or kept positions, all of the same prompt.
        title: Above the plot.
        ax: Where to draw; None: a new figure.

    Raises:
        UsageError: As `mass_kept`, or matplotlib is not installed.
    """
    ax = the_axes(ax)
    for index, (name, edit) in enumerate(edits.items()):
        share = mass_kept(mass, edit)
        mean, low, high = share.mean(1), share.amin(1), share.amax(1)
        spread = torch.stack([mean - low, high - mean]).clamp_min(0).numpy()
        label = f"{name} ({float(share.mean()):.0%})"
        ax.errorbar(
            range(len(share)), mean.numpy(), yerr=spread, label=label, capsize=2, elinewidth=0.7, **style(index)
        )
    ax.set_ylim(0, 1.02)
    ax.locator_params(axis="x", integer=True)
    plain_axes(ax, "layer", "share of attention")
    ax.set_title(title, fontsize="medium", loc="left")
    show_legend(ax)
    return ax
