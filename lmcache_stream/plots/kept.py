"""Which tokens an edit kept: a map over positions, layers and heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch

from lmcache_stream.errors import UsageError
from lmcache_stream.plots.look import the_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["KeptPositions", "plot_kept", "positions_of"]

COLUMNS: Final = 1024
LABELLED_LAYERS: Final = 12


class KeptPositions(Protocol):
    """A `ModifyReceipt`, as far as it tells what was kept."""

    @property
    def tokens_before(self) -> int:
        """Tokens that were edited."""

    @property
    def kept_positions(self) -> torch.Tensor | None:
        """`[T']`, `[L, T']` or `[L, H, T']`; None where positions mean nothing."""


def plot_kept(
    edit: KeptPositions | torch.Tensor, tokens: int | None = None, *, title: str = "", ax: Axes | None = None
) -> Axes:
    """Draw the kept positions of an edit as a heat map: a row for each layer and KV head, or one where they agree.

    Black is kept, white is dropped. Of more than 1,024 tokens, neighbours share a column, in a grey as dark as the
    share of them that was kept.

    Args:
        edit: The receipt of `modify_kv`, or kept positions `[T']`, `[L, T']` or `[L, H, T']`.
        tokens: Tokens before the edit; a receipt knows.
        title: Above the map, before the counts.
        ax: Where to draw; None: a new figure.

    Raises:
        UsageError: The edit does not tell positions, they are not below `tokens`, or matplotlib is not installed.
    """
    kept, total = positions_of(edit, tokens)
    heads = kept.shape[1] if kept.dim() == 3 else 1
    layers = kept.shape[0] if kept.dim() > 1 else 1
    share = share_kept(kept.reshape(layers * heads, -1), total)
    ax = the_axes(ax, height=1.6 + min(0.05 * layers * heads, 4.0))
    ax.imshow(
        share.numpy(),
        cmap="Greys",
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
        extent=(0, total, layers, 0),
    )
    together = -(-total // share.shape[1])
    ax.set_xlabel("position" if together == 1 else f"position, {together} to a column")
    if kept.dim() == 1:
        ax.set_yticks([])
        ax.set_ylabel("all layers")
    else:
        labelled = range(0, layers, -(-layers // LABELLED_LAYERS))
        ax.set_yticks([layer + 0.5 for layer in labelled], labels=[str(layer) for layer in labelled])
        ax.set_ylabel("layer" if heads == 1 else f"layer, {heads} heads each")
        for layer in range(1, layers):
            ax.axhline(layer, color="0.6", linewidth=0.4)
    counts = f"{kept.shape[-1]:,} of {total:,} tokens kept (black)"
    ax.set_title(f"{title}: {counts}" if title else counts, fontsize="medium", loc="left")
    return ax


def positions_of(edit: KeptPositions | torch.Tensor, tokens: int | None) -> tuple[torch.Tensor, int]:
    """Kept positions on the CPU, and how many there were.

    Raises:
        UsageError: They are not known, or contradict each other.
    """
    given = edit if isinstance(edit, torch.Tensor) else edit.kept_positions
    total = tokens if isinstance(edit, torch.Tensor) else edit.tokens_before
    if given is None:
        raise UsageError("this edit does not tell which positions it kept: only an Editor that drops tokens does")
    if total is None:
        raise UsageError("give the tokens before the edit: kept positions alone do not tell how many there were")
    kept = given.detach().cpu().long()
    if kept.dim() not in (1, 2, 3):
        raise UsageError(f"kept positions are [T'], [L, T'] or [L, H, T'], not {list(kept.shape)}")
    if kept.numel() and not (kept.min() >= 0 and kept.max() < total):
        raise UsageError(f"kept positions lie in 0 .. {total - 1}, not in {int(kept.min())} .. {int(kept.max())}")
    return kept, total


def share_kept(rows: torch.Tensor, total: int) -> torch.Tensor:
    """Share of kept tokens by column, float32 `[rows, columns]`, for kept positions `[rows, T']`."""
    mask = torch.zeros(rows.shape[0], total).scatter_(1, rows, 1.0)
    together = -(-total // COLUMNS)
    if together > 1:
        columns = -(-total // together)
        padded = torch.nn.functional.pad(mask, (0, columns * together - total))
        mask = padded.view(len(mask), columns, together).sum(-1)
        mask[:, :-1] /= together
        mask[:, -1] /= total - (columns - 1) * together
    return mask
