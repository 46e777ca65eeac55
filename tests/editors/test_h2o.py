"""Scores against the paper's formula."""

from __future__ import annotations

import pytest
import torch

from lmcache_stream.editors import H2O, h2o
from lmcache_stream.errors import UsageError
from tests.editors.inputs import CHUNK, GROUPS, assert_scores, attention_of, each_head, given


@pytest.mark.parametrize("block", [h2o.BLOCK, 1000])
def test_scores_are_the_attention_of_all_queries(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(h2o, "BLOCK", block)
    x = given(3 * CHUNK)
    total, budget = len(x.tokens), CHUNK

    def score(layer: int, head: int) -> torch.Tensor:
        rows = [attention_of(x, layer, head, group, query) for group in range(GROUPS) for query in range(total)]
        gathered = torch.stack(rows).sum(0) / GROUPS
        gathered[total - budget // 2 :] = torch.inf
        return gathered

    scores = H2O().score(x, budget).double()
    expected = each_head(score)
    assert torch.equal(scores.isinf(), expected.isinf())
    torch.testing.assert_close(scores[..., : -budget // 2], expected[..., : -budget // 2], atol=1e-5, rtol=1e-5)


def test_half_of_the_budget_is_recent() -> None:
    edit = H2O(keep=2 * CHUNK).edit(given(6 * CHUNK))
    assert edit.tokens[-CHUNK:] == tuple(range(1000 + 5 * CHUNK, 1000 + 6 * CHUNK))
    x = given(6 * CHUNK)
    assert_scores(H2O(recent=0.0), x, H2O(recent=0.0).score(x, 48).double())
    with pytest.raises(UsageError, match=r"recent=1\.5"):
        H2O(recent=1.5)
