"""Scores against the paper's formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmcache_stream.editors import RKV, rkv
from lmcache_stream.errors import UsageError
from tests.editors.inputs import CHUNK, GROUPS, assert_scores, attention_of, by_head, each_head, given


@pytest.mark.parametrize(("block", "first"), [(rkv.BLOCK, rkv.FIRST), (300, 2)])
@pytest.mark.parametrize("retain", [0, 1, 3])
def test_scores_weigh_importance_against_redundancy(
    monkeypatch: pytest.MonkeyPatch, block: int, first: int, retain: int
) -> None:
    monkeypatch.setattr(rkv, "BLOCK", block)
    monkeypatch.setattr(rkv, "FIRST", first)
    x = given(3 * CHUNK)
    total, window, kernel, mix, threshold = len(x.tokens), 8, 7, 0.3, 0.5
    keys = by_head(x, 0)

    def importance(layer: int, head: int) -> torch.Tensor:
        of_group = []
        for group in range(GROUPS):
            rows = [attention_of(x, layer, head, group, total - window + i)[: total - window] for i in range(window)]
            seen = torch.stack(rows).mean(0).tolist()
            half = kernel // 2
            pooled = [max(seen[max(i - half, 0) : i + half + 1]) for i in range(total - window)]
            of_group.append(torch.tensor([*pooled, *[0.0] * window], dtype=torch.float64))
        return torch.stack(of_group).mean(0)

    def redundancy(layer: int, head: int) -> torch.Tensor:
        unit = keys[layer][head] / keys[layer][head].pow(2).sum(-1, keepdim=True).sqrt()
        similarity = unit @ unit.T
        for token in range(total):
            similarity[token, token] = 0
            similar = [other for other in range(total) if float(similarity[token, other]) > threshold]
            for other in similar[-retain:] if retain else []:
                similarity[token, other] = 0
        mean = similarity.sum(0) / total
        return mean.exp() / mean.exp().sum()

    def score(layer: int, head: int) -> torch.Tensor:
        return mix * importance(layer, head) - (1 - mix) * redundancy(layer, head)

    assert_scores(RKV(mix=mix, retain=retain, threshold=threshold), x, each_head(score))


def test_a_repeated_key_goes_before_a_single_one() -> None:
    x = given(4 * CHUNK)
    x.kv[0, :, :40] = x.kv[0, :, :1]
    edit = RKV(mix=0.0).edit(x)
    assert edit.kept_positions is not None
    kept = set(edit.kept_positions.tolist())
    assert set(range(40, 4 * CHUNK)) <= kept


@pytest.mark.parametrize("params", [{"window": 0}, {"kernel_size": 2}, {"mix": 1.5}, {"retain": -1}])
def test_impossible_parameters_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(params))):
        RKV(**params)
