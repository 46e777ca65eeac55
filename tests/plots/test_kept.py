from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from lmcache_stream import ModifyReceipt, UsageError
from lmcache_stream.plots import plot_kept

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def drawn(ax: Axes) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    (image,) = ax.images
    found = np.asarray(image.get_array(), dtype=np.float32)
    return found.reshape(found.shape[0], found.shape[1])


def test_a_receipt_of_shared_positions_is_one_row(ax: Axes) -> None:
    receipt = ModifyReceipt(tokens_before=6, tokens_after=3, kept_positions=torch.tensor([0, 4, 5]))
    assert plot_kept(receipt, title="streaming-llm", ax=ax) is ax
    assert drawn(ax).tolist() == [[1, 0, 0, 0, 1, 1]]
    assert tuple(ax.images[0].get_extent()) == (0, 6, 1, 0)
    assert ax.get_title(loc="left") == "streaming-llm: 3 of 6 tokens kept (black)"
    assert len(ax.get_yticks()) == 0


def test_each_layer_and_head_has_a_row_of_its_own(ax: Axes) -> None:
    kept = torch.tensor([[[0, 1], [2, 3]], [[0, 3], [1, 2]]])
    plot_kept(kept, 4, ax=ax)
    assert drawn(ax).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 1], [0, 1, 1, 0]]
    assert tuple(ax.images[0].get_extent()) == (0, 4, 2, 0)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "1"]
    assert ax.get_ylabel() == "layer, 2 heads each"
    assert [line.get_ydata()[0] for line in ax.lines] == [1]  # type: ignore[index]


def test_neighbours_share_a_column_where_there_are_many_tokens(ax: Axes) -> None:
    plot_kept(torch.arange(3, 3001).expand(3, -1), 3001, ax=ax)
    shares = drawn(ax)
    assert shares.shape == (3, 1001)
    assert shares[:, 0].tolist() == [0, 0, 0]
    assert np.allclose(shares[:, 1:], 1)
    assert ax.get_xlabel() == "position, 3 to a column"


def test_the_map_is_as_dark_as_what_it_shows_in_print(ax: Axes) -> None:
    plot_kept(torch.tensor([1]), 2, ax=ax)
    (image,) = ax.images
    dropped, kept = image.cmap([0.0, 1.0])[:, :3].mean(axis=1)
    assert dropped > 0.95
    assert kept < 0.05
    assert image.get_clim() == (0, 1)


def test_without_axes_there_is_a_new_figure(pyplot_closed: None) -> None:
    first, second = (plot_kept(torch.tensor([1]), 2) for _ in range(2))
    assert first.figure is not second.figure


@pytest.mark.parametrize(
    ("edit", "tokens", "said"),
    [
        (ModifyReceipt(tokens_before=6, tokens_after=6), None, "does not tell which positions"),
        (torch.tensor([0, 1]), None, "give the tokens before the edit"),
        (torch.tensor([0, 7]), 6, r"lie in 0 \.\. 5, not in 0 \.\. 7"),
        (torch.zeros(1, 1, 1, 1), 6, r"not \[1, 1, 1, 1\]"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    edit: ModifyReceipt | torch.Tensor, tokens: int | None, said: str, ax: Axes
) -> None:
    with pytest.raises(UsageError, match=said):
        plot_kept(edit, tokens, ax=ax)
