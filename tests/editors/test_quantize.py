"""Round trips through fewer bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lmcache_stream.editors import Quantize, quantize
from lmcache_stream.errors import UsageError
from tests.editors.inputs import CHUNK, HEAD_DIM, HEADS, LAYERS, given


@pytest.mark.parametrize("block", [quantize.BLOCK, 5 * HEADS * HEAD_DIM])
def test_int8_rounds_to_127_steps_of_each_channel(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(quantize, "BLOCK", block)
    x = given(3 * CHUNK)
    edit = Quantize().edit(x)
    for plane in range(2):
        for layer in range(LAYERS):
            for channel in range(HEADS * HEAD_DIM):
                column = x.kv[plane, layer, :, channel].double()
                step = column.abs().max() / 127
                expected = (column / step).round() * step
                torch.testing.assert_close(
                    edit.kv[plane, layer, :, channel].double(), expected, atol=float(step) * 1e-3, rtol=1e-5
                )
    assert edit.tokens == x.tokens
    assert edit.asked is None


def test_fp8_keeps_three_bits_of_mantissa() -> None:
    x = given(3 * CHUNK)
    edit = Quantize(to="fp8").edit(x)
    scale = x.kv.abs().amax(dim=2, keepdim=True) / 448
    error = (edit.kv - x.kv).abs()
    assert bool((error <= torch.maximum(x.kv.abs() / 16, scale * 2**-9)).all())
    assert not torch.equal(edit.kv, x.kv)


@pytest.mark.parametrize(("params", "changed"), [({"keys": False}, [False, True]), ({"values": False}, [True, False])])
def test_planes_are_rounded_as_asked(params: dict[str, Any], changed: list[bool]) -> None:
    x = given(CHUNK)
    edit = Quantize(**params).edit(x)
    assert [not torch.equal(edit.kv[plane], x.kv[plane]) for plane in range(2)] == changed


def test_zeros_stay_zeros() -> None:
    x = given(CHUNK)
    for to in ("int8", "fp8"):
        edit = Quantize(to=to).edit(replace(x, kv=torch.zeros_like(x.kv)))
        assert torch.equal(edit.kv, torch.zeros_like(x.kv))


def test_other_types_are_refused() -> None:
    with pytest.raises(UsageError, match="to must be int8 or fp8"):
        Quantize(to="int4")  # type: ignore[arg-type]  # wrong on purpose
