"""Scores against the paper's formula."""

from __future__ import annotations

import torch

from lmcache_stream.editors import TOVA
from tests.editors.inputs import CHUNK, GROUPS, HEADS, assert_scores, attention_of, each_head, given


def test_scores_are_the_last_tokens_attention_over_all_heads() -> None:
    x = given(4 * CHUNK)

    def score(layer: int, head: int) -> torch.Tensor:
        seen = [attention_of(x, layer, h, group, len(x.tokens) - 1) for h in range(HEADS) for group in range(GROUPS)]
        return torch.stack(seen).mean(0)

    assert_scores(TOVA(), x, each_head(score))
