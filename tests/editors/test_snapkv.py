"""Scores against the paper's formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lmcache_stream.editors import SnapKV, tensors
from lmcache_stream.errors import UsageError
from tests.editors.inputs import CHUNK, GROUPS, assert_scores, attention_of, each_head, given


@pytest.mark.parametrize("aggregate", ["mean", "max", "sum"])
def test_scores_are_pooled_attention_of_the_window(aggregate: Any) -> None:
    x = given(4 * CHUNK)
    total, window, kernel = len(x.tokens), 8, 5

    def score(layer: int, head: int) -> torch.Tensor:
        of_group = []
        for group in range(GROUPS):
            seen = sum(attention_of(x, layer, head, group, total - window + i) for i in range(window))
            assert isinstance(seen, torch.Tensor)
            prefix = (seen / window)[: total - window]
            padded = torch.cat([torch.zeros(kernel // 2), prefix, torch.zeros(kernel // 2)])
            pooled = torch.stack([padded[i : i + kernel].sum() / kernel for i in range(total - window)])
            of_group.append(torch.cat([pooled, torch.zeros(window)]))
        groups = torch.stack(of_group)
        return {"mean": groups.mean(0), "max": groups.max(0).values, "sum": groups.sum(0)}[aggregate]

    assert_scores(SnapKV(window=window, kernel_size=kernel, aggregate=aggregate), x, each_head(score))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hardware", [True, False])
def test_low_precision_products_cost_little(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, hardware: bool
) -> None:
    monkeypatch.setattr(tensors, "_cpu_multiplies_bfloat16", lambda: hardware)
    x = given(8 * CHUNK, dtype=dtype)
    exact = replace(x, kv=x.kv.double(), queries=None if x.queries is None else x.queries.double())
    scores, expected = SnapKV(window=8).score(x, 32), SnapKV(window=8).score(exact, 32)
    rounded = hardware and dtype == torch.bfloat16
    torch.testing.assert_close(scores, expected, rtol=5e-3 if rounded else 1e-5, atol=1e-7)
    assert torch.allclose(scores, expected, rtol=1e-5, atol=1e-7) is not rounded


def test_what_the_window_looks_at_is_kept() -> None:
    x = given(8 * CHUNK)
    assert x.queries is not None
    x.kv[0, :, 41] = x.queries[0, :, -1].view(3, 2, 2, 8)[:, :, 0].flatten(1) * 20
    edit = SnapKV(keep=3 * CHUNK, window=4, kernel_size=1).edit(x)
    assert edit.kept_positions is not None
    assert 41 in edit.kept_positions.tolist()


def test_the_softmax_scale_can_be_given() -> None:
    x = given(4 * CHUNK)
    assert torch.equal(SnapKV(scale=8**-0.5).score(x, 32), SnapKV().score(x, 32))
    assert not torch.allclose(SnapKV(scale=1.0).score(x, 32), SnapKV().score(x, 32))


@pytest.mark.parametrize("params", [{"window": 0}, {"kernel_size": 4}, {"kernel_size": 0}])
def test_impossible_parameters_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(params))):
        SnapKV(**params)


def test_queries_of_another_model_are_refused() -> None:
    x = given(4 * CHUNK)
    assert x.queries is not None
    odd = {**vars(x), "queries": x.queries[..., :-1]}
    with pytest.raises(UsageError, match="do not divide into groups of 2 heads of 8"):
        SnapKV().edit(type(x)(**odd))
