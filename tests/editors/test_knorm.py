"""Scores against the paper's formula."""

from __future__ import annotations

from lmcache_stream.editors import Knorm
from tests.editors.inputs import CHUNK, assert_scores, by_head, each_head, given


def test_scores_are_negative_norms() -> None:
    x = given(6 * CHUNK)
    keys = by_head(x, 0)
    assert_scores(Knorm(), x, each_head(lambda layer, head: -keys[layer][head].pow(2).sum(-1).sqrt()))
