"""Moving keys, against a plain float64 rotation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.errors import UsageError
from lmcache_stream.rotary import Rotary, mean_rotation, rerotate, rerotate_
from lmcache_stream.rotary.turning import Rerotation


def plain_rotary(head_dim: int = 8, theta: float = 10000.0, **more: Any) -> Rotary:
    return Rotary(tuple(theta ** (-i / head_dim) for i in range(0, head_dim, 2)), head_dim, **more)


def rotated(keys: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Plain float64 rotation of `[L, T, H, head_dim]` by `positions` `[L, H, T]`, one pair at a time."""
    out = keys.double().clone()
    for pair, freq in enumerate(rotary.inv_freq):
        i, j = (2 * pair, 2 * pair + 1) if rotary.interleaved else (pair, pair + len(rotary.inv_freq))
        i, j = i + rotary.offset, j + rotary.offset
        angle = (positions.float() * torch.tensor(freq, dtype=torch.float32)).double().transpose(1, 2)
        a, b = keys[..., i].double(), keys[..., j].double()
        out[..., i] = a * angle.cos() - b * angle.sin()
        out[..., j] = b * angle.cos() + a * angle.sin()
    return out


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_equals_a_plain_float64_rotation(data: st.DataObject) -> None:
    layers, tokens, heads = (data.draw(st.integers(1, 4)) for _ in range(3))
    rotary = plain_rotary(data.draw(st.sampled_from([2, 4, 8])), interleaved=data.draw(st.booleans()), offset=0)
    offset = data.draw(st.integers(0, 3))
    rotary = Rotary(rotary.inv_freq, rotary.head_dim + offset + 1, offset, rotary.interleaved)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    raw = torch.randn(layers, tokens, heads, rotary.head_dim, generator=generator, dtype=torch.float64)
    largest = data.draw(st.sampled_from([5, 10_000, 1_000_000]))

    def positions() -> tuple[torch.Tensor, torch.Tensor]:
        shape = data.draw(st.sampled_from([(tokens,), (layers, tokens), (layers, heads, tokens)]))
        drawn = torch.randint(0, largest, shape, generator=generator)
        full = {1: drawn.view(1, 1, -1), 2: drawn.view(layers, 1, -1) if len(shape) == 2 else drawn, 3: drawn}
        return drawn, full[len(shape)].expand(layers, heads, tokens)

    (old, old_full), (new, new_full) = positions(), positions()
    keys = rotated(raw, old_full, rotary)
    moved = rerotate(keys, old, new, rotary)
    torch.testing.assert_close(moved, rotated(raw, new_full, rotary), atol=1e-9, rtol=1e-9)
    flat = rerotate(keys.flatten(-2), old, new, rotary)
    assert torch.equal(flat, moved.flatten(-2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_head", [False, True])
def test_rounds_once_to_the_dtype_of_the_keys(dtype: torch.dtype, by_head: bool) -> None:
    rotary = plain_rotary(64)
    old = torch.arange(2000, 2300)
    new = torch.arange(300)
    if by_head:
        old = old.expand(8, 2, 300)
    raw = torch.randn(8, 300, 2, 64, generator=torch.Generator().manual_seed(1))
    keys = raw.to(dtype)
    exact = rotated(rotated(keys, -torch.arange(2000, 2300).expand(8, 2, 300), rotary), new.expand(8, 2, 300), rotary)
    moved = rerotate(keys, old, new, rotary)
    eps = torch.finfo(dtype).eps
    assert moved.dtype == dtype
    torch.testing.assert_close(
        moved.double(), exact.to(dtype).double(), atol=2e-6, rtol=0 if dtype == torch.float32 else eps
    )


def test_layers_of_their_own_rotations() -> None:
    keys = torch.randn(4, 5, 2, 8)
    near, far = plain_rotary(8, 100.0), plain_rotary(8, 10000.0)
    old, new = torch.tensor([3, 4, 7, 8, 9]), torch.arange(5)
    moved = rerotate(keys, old, new, (near, None, far, far))
    assert torch.equal(moved[1], keys[1])
    for layer, rotary in ((0, near), (2, far), (3, far)):
        torch.testing.assert_close(moved[layer : layer + 1], rerotate(keys[layer : layer + 1], old, new, rotary))
    by_layer = rerotate(keys, old.expand(4, 5), new, (near, None, far, far))
    torch.testing.assert_close(by_layer, moved, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(300,), (4, 300), (4, 2, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_by_layer_is_the_same(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(0, 1000, shape, generator=generator)
    keys = torch.randn(4, 300, 2, 64, generator=generator).to(dtype)
    layers = (plain_rotary(64), None, plain_rotary(64, 100.0), plain_rotary(64))
    moved = rerotate(keys, old, torch.arange(300), layers)
    move = Rerotation(old, torch.arange(300), layers)
    for layer in (2, 0, 3, 1):
        move.turn_(keys[layer][None], layer)
    assert torch.equal(keys, moved)


def test_same_positions_change_nothing() -> None:
    keys = torch.randn(2, 6, 16).bfloat16()
    positions = torch.arange(6) + 123_456
    assert torch.equal(rerotate(keys, positions, positions, plain_rotary()), keys)


def test_the_input_stays_and_the_in_place_form_does_not() -> None:
    keys = torch.randn(2, 6, 16)
    before = keys.clone()
    moved = rerotate(keys, torch.arange(6) + 5, torch.arange(6), plain_rotary())
    assert torch.equal(keys, before)
    assert rerotate_(keys, torch.arange(6) + 5, torch.arange(6), plain_rotary()) is keys
    assert torch.equal(keys, moved)


def test_more_leading_dimensions_share_positions() -> None:
    keys = torch.randn(2, 3, 6, 2, 8)
    moved = rerotate(keys, torch.arange(6) + 5, torch.arange(6), plain_rotary())
    assert torch.equal(moved[1], rerotate(keys[1], torch.arange(6) + 5, torch.arange(6), plain_rotary()))


def test_no_tokens() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert rerotate(torch.empty(2, 0, 16), empty, empty, plain_rotary()).shape == (2, 0, 16)


def test_what_does_not_fit_is_refused() -> None:
    keys, positions = torch.randn(2, 6, 16), torch.arange(6)
    with pytest.raises(UsageError, match=r"old_positions must be \[6\], \[2, 6\] or \[2, 2, 6\]"):
        rerotate(keys, torch.arange(5), positions, plain_rotary())
    with pytest.raises(UsageError, match="do not divide into heads of 10"):
        rerotate(keys, positions, positions, plain_rotary(10))
    with pytest.raises(UsageError, match="rotary names 3 layers, keys have 2"):
        rerotate(keys, positions, positions, [None] * 3)
    with pytest.raises(UsageError, match="keys must be floating point"):
        rerotate(torch.zeros(6, 16), positions, positions, plain_rotary())
    with pytest.raises(UsageError, match="known up to position 7 only"):
        rerotate(keys, positions + 3, positions, plain_rotary(limit=8))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_mean_rotation_is_the_mean_of_the_rotations(interleaved: bool) -> None:
    plain = plain_rotary(8, interleaved=interleaved)
    rotary = Rotary(plain.inv_freq, 11, 2, interleaved)
    vector = torch.randn(11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start, count = 100, 30
    positions = torch.arange(start, start + count)
    turned = rotated(vector.expand(1, count, 1, 11).clone(), positions.view(1, 1, -1), rotary)
    found = mean_rotation(rotary, start, count, torch.device("cpu")) @ vector
    torch.testing.assert_close(found, turned.mean(1).view(-1), atol=1e-12, rtol=1e-12)


def test_a_mean_rotation_beyond_the_limit_is_refused() -> None:
    with pytest.raises(UsageError, match="known up to position 7 only"):
        mean_rotation(plain_rotary(limit=8), 4, 5, torch.device("cpu"))
