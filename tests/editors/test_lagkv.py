"""Scores against the paper's formula."""

from __future__ import annotations

import pytest
import torch

from lmcache_stream.editors import LagKV
from lmcache_stream.errors import UsageError
from tests.editors.inputs import CHUNK, HEAD_DIM, HEADS, LAYERS, assert_scores, by_head, each_head, given


@pytest.mark.parametrize(("sinks", "lag"), [(4, 20), (0, 16), (7, 40)])
def test_scores_are_ranks_within_a_partition(sinks: int, lag: int) -> None:
    x = given(6 * CHUNK)
    total = len(x.tokens)
    planes = by_head(x, 0), by_head(x, 1)
    partitions = (total - sinks) // lag

    def spread(states: torch.Tensor, first: int) -> torch.Tensor:
        lagging, following = states[first : first + lag], states[first + lag : first + 2 * lag]
        scaled = torch.empty_like(lagging)
        for channel in range(HEAD_DIM):
            low, high = following[:, channel].min(), following[:, channel].max()
            scaled[:, channel] = (lagging[:, channel] - low) / (high - low)
        deviation = torch.stack([row.std() for row in scaled])
        return deviation.exp() / deviation.exp().sum()

    def score(layer: int, head: int) -> torch.Tensor:
        scores = torch.ones(total, dtype=torch.float64)
        for partition in range(partitions - 1):
            first = sinks + partition * lag
            rated = (spread(planes[0][layer][head], first) + spread(planes[1][layer][head], first)).tolist()
            for token in range(lag):
                scores[first + token] = sum(other < rated[token] for other in rated) / lag
        return scores

    assert_scores(LagKV(sinks=sinks, lag=lag), x, each_head(score))


def test_a_short_input_keeps_its_most_recent_tokens() -> None:
    edit = LagKV().edit(given(8 * CHUNK))
    total = 8 * CHUNK
    expected = [*range(4), *range(total - 4 * CHUNK + 4, total)]
    assert edit.tokens == tuple(1000 + position for position in expected)


def test_constant_channels_do_not_break_it() -> None:
    x = given(6 * CHUNK)
    x.kv[..., 0] = 1.0
    scores = LagKV(lag=16).score(x, 48)
    assert scores.shape == (LAYERS, HEADS, 6 * CHUNK)
    assert bool(scores.isfinite().all())


def test_a_partition_needs_two_tokens() -> None:
    with pytest.raises(UsageError, match="lag=1"):
        LagKV(lag=1)
