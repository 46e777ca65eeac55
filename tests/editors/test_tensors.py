"""KV by heads, and copying kept tokens out of it."""

from __future__ import annotations

import pytest
import torch

from lmcache_stream.editors.tensors import empty_kv, gather, heads_at_once, of_heads
from tests.editors.inputs import HEADS, LAYERS, picked


@pytest.mark.parametrize("shape", [(), (LAYERS,), (LAYERS, HEADS)])
@pytest.mark.parametrize("contiguous", [True, False])
def test_gather_equals_picking_one_by_one(shape: tuple[int, ...], contiguous: bool) -> None:
    kv = torch.randn(2, LAYERS, 40, HEADS * 4)
    if not contiguous:
        kv = kv.transpose(0, 1).contiguous().transpose(0, 1)
    kept = torch.rand(*shape, 40).argsort(-1)[..., :7].sort(-1).values
    full = kept if kept.dim() == 3 else kept.unsqueeze(-2) if kept.dim() == 2 else kept.view(1, 1, -1)
    out = gather(kv, kept)
    assert out.is_contiguous()
    for plane in range(2):
        assert torch.equal(out[plane], picked(kv[plane].contiguous(), full.expand(LAYERS, HEADS, -1)))


@pytest.mark.parametrize("shape", [(), (LAYERS,), (LAYERS, HEADS)])
@pytest.mark.parametrize("count", [1, 7, 20, 39, 40])
def test_spent_kv_makes_room_for_what_is_kept_of_it(shape: tuple[int, ...], count: int) -> None:
    kv = torch.randn(2, LAYERS, 40, HEADS * 4)
    kept = torch.rand(*shape, 40).argsort(-1)[..., :count].sort(-1).values
    expected = gather(kv, kept)
    out = gather(kv, kept, spent=True)
    assert out.is_contiguous()
    assert out.data_ptr() == kv.data_ptr()
    assert torch.equal(out, expected)


def test_spent_kv_with_gaps_gets_new_memory() -> None:
    kv = torch.randn(2, LAYERS, 80, HEADS * 4)[:, :, ::2]
    before = kv.clone()
    out = gather(kv, torch.arange(1, 40, 3), spent=True)
    assert out.is_contiguous()
    assert torch.equal(out, before[:, :, 1::3])


def test_keys_are_shown_layer_by_layer_and_may_be_changed() -> None:
    kv = torch.randn(2, LAYERS, 40, HEADS * 4)
    kept = torch.arange(0, 40, 2)
    shown: list[int] = []

    def negated(layer: int, keys: torch.Tensor) -> None:
        shown.append(layer)
        keys.neg_()

    out = gather(kv, kept, then=negated)
    assert shown == list(range(LAYERS))
    assert torch.equal(out, torch.stack([-kv[0, :, ::2], kv[1, :, ::2]]))


def test_heads_are_cut_out_of_the_width() -> None:
    plane = torch.arange(3 * 8).view(3, 8)
    assert torch.equal(of_heads(plane, 2)[1], plane[:, 4:])


@pytest.mark.parametrize(
    ("tokens", "parts"), [(0, 1), (100, 1), (1 << 15, 1), (1 << 16, 2), (1 << 17, 4), (1 << 20, 8)]
)
def test_parts_of_a_long_layer_are_bounded(tokens: int, parts: int) -> None:
    kv = torch.zeros(1).expand(2, 3, tokens, 8 * 16)
    cut = list(heads_at_once(kv, 8))
    assert len(cut) == parts
    assert [head for part in cut for head in range(part.start, part.stop)] == list(range(8))


@pytest.mark.parametrize("tokens", [0, 1, 3000])
def test_new_memory_is_whole_and_writable(tokens: int) -> None:
    like = torch.empty(0, dtype=torch.bfloat16)
    out = empty_kv((2, 3, tokens, 512), like)
    out.fill_(1.0)
    assert out.shape == (2, 3, tokens, 512)
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous()
    assert float(out.sum(dtype=torch.float64)) == out.numel()
