from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from lmcache_stream import KVGeometry, UsageError
from lmcache_stream.plots import attention_mass, mass_kept, plot_attention_mass

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAYERS, KV_HEADS, QUERY_HEADS, HEAD_DIM, TOKENS = 3, 2, 4, 8, 20
GEOMETRY = KVGeometry(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def given(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, LAYERS, TOKENS, KV_HEADS * HEAD_DIM, generator=generator)
    return kv, 3 * torch.randn(1, LAYERS, TOKENS, QUERY_HEADS * HEAD_DIM, generator=generator)


def by_definition(kv: torch.Tensor, queries: torch.Tensor, window: int) -> torch.Tensor:
    keys = kv[0].view(LAYERS, TOKENS, KV_HEADS, HEAD_DIM)
    mass = torch.zeros(LAYERS, KV_HEADS, TOKENS)
    for layer in range(LAYERS):
        for head in range(QUERY_HEADS):
            kv_head = head // (QUERY_HEADS // KV_HEADS)
            for at in range(TOKENS - window, TOKENS):
                query = queries[0, layer, at, head * HEAD_DIM : (head + 1) * HEAD_DIM]
                logits = keys[layer, : at + 1, kv_head] @ query / HEAD_DIM**0.5
                mass[layer, kv_head, : at + 1] += logits.softmax(0)
    return mass / (window * QUERY_HEADS / KV_HEADS)


@pytest.mark.parametrize("window", [1, 5, TOKENS])
def test_mass_is_what_the_last_queries_attend_to(window: int) -> None:
    kv, queries = given()
    mass = attention_mass(kv, queries, GEOMETRY, window=window)
    torch.testing.assert_close(mass, by_definition(kv, queries, window))
    torch.testing.assert_close(mass.sum(-1), torch.ones(LAYERS, KV_HEADS))


def test_a_window_longer_than_the_prompt_is_the_prompt() -> None:
    kv, queries = given()
    longer = attention_mass(kv, queries, GEOMETRY, window=10 * TOKENS)
    torch.testing.assert_close(longer, attention_mass(kv, queries, GEOMETRY, window=TOKENS))


def test_kept_mass_by_head_by_layer_and_shared() -> None:
    mass = torch.tensor([[[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]], [[1.0, 0.0, 0.0], [0.3, 0.3, 0.4]]])
    torch.testing.assert_close(mass_kept(mass, torch.tensor([0, 2])), torch.tensor([[0.8, 0.5], [1.0, 0.7]]))
    torch.testing.assert_close(mass_kept(mass, torch.tensor([[0], [2]])), torch.tensor([[0.1, 0.5], [0.0, 0.4]]))
    by_head = torch.tensor([[[2], [0]], [[0], [1]]])
    torch.testing.assert_close(mass_kept(mass, by_head), torch.tensor([[0.7, 0.5], [1.0, 0.3]]))


def test_a_line_an_edit_with_a_bar_over_heads(ax: Axes) -> None:
    mass = torch.tensor([[[0.1, 0.9], [0.5, 0.5]], [[1.0, 0.0], [0.2, 0.8]]])
    edits = {"first": torch.tensor([0]), "last": torch.tensor([1])}
    assert plot_attention_mass(mass, edits, ax=ax) is ax
    first, last = ax.containers
    assert first[0].get_ydata().tolist() == pytest.approx([0.3, 0.6])
    assert last[0].get_ydata().tolist() == pytest.approx([0.7, 0.4])
    (bars,) = first[2]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [
        pytest.approx([0.1, 0.5]),
        pytest.approx([0.2, 1.0]),
    ]
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["first (45%)", "last (55%)"]
    assert first[0].get_marker() != last[0].get_marker()
    assert first[0].get_linestyle() != last[0].get_linestyle()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"window": 0}, "at least one query"),
        ({"queries": torch.zeros(1, LAYERS, TOKENS - 1, QUERY_HEADS * HEAD_DIM)}, "needs the queries of all 20 tokens"),
        ({"geometry": KVGeometry(num_layers=LAYERS, num_kv_heads=3, head_dim=HEAD_DIM)}, "does not fit the geometry"),
        ({"kv": torch.zeros(3)}, "kv must be floating point"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    kv, queries = given()
    with pytest.raises(UsageError, match=said):
        attention_mass(**{"kv": kv, "queries": queries, "geometry": GEOMETRY, **changes})


def test_an_edit_of_another_prompt_is_refused() -> None:
    mass = torch.ones(LAYERS, KV_HEADS, 4) / 4
    with pytest.raises(UsageError, match=r"lie in 0 \.\. 3"):
        mass_kept(mass, torch.tensor([4]))
    with pytest.raises(UsageError, match="do not fit attention"):
        mass_kept(mass, torch.zeros(LAYERS + 1, 2, dtype=torch.int64))
