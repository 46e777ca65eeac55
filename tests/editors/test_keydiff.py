"""Scores against the paper's formula."""

from __future__ import annotations

import torch

from lmcache_stream.editors import KeyDiff
from tests.editors.inputs import CHUNK, assert_scores, by_head, each_head, given


def test_scores_are_negative_cosines_to_the_mean_direction() -> None:
    x = given(6 * CHUNK)
    keys = by_head(x, 0)

    def score(layer: int, head: int) -> torch.Tensor:
        unit = [key / key.pow(2).sum().sqrt() for key in keys[layer][head]]
        anchor = torch.stack(unit).sum(0) / len(unit)
        anchor = anchor / anchor.pow(2).sum().sqrt()
        return torch.stack([-(key * anchor).sum() for key in unit])

    assert_scores(KeyDiff(), x, each_head(score))


def test_the_odd_one_out_is_kept() -> None:
    x = given(4 * CHUNK)
    x.kv[0, :, 37] *= -1
    edit = KeyDiff(keep=CHUNK).edit(x)
    assert edit.kept_positions is not None
    assert 37 in edit.kept_positions.tolist()
