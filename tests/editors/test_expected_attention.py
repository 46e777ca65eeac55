"""Scores against the paper's formula."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_stream import editors
from lmcache_stream.editors import ExpectedAttention, QueryStatistics, expected_attention
from lmcache_stream.errors import UsageError
from lmcache_stream.rotary import rerotate
from tests.editors.inputs import (
    CHUNK,
    GEOMETRY,
    GROUPS,
    HEAD_DIM,
    HEADS,
    LATENT,
    LAYERS,
    STATISTICS,
    assert_scores,
    by_head,
    each_head,
    given,
)


def rotation(layer: int, position: int) -> torch.Tensor:
    """The matrix `[head_dim, head_dim]` that turns a query to `position`, pair by pair."""
    assert GEOMETRY.rotary is not None
    rotary = GEOMETRY.rotary[layer]
    matrix = torch.eye(HEAD_DIM, dtype=torch.float64)
    if rotary is not None:
        pairs = len(rotary.inv_freq)
        for pair, frequency in enumerate(rotary.inv_freq):
            angle = (torch.tensor(float(position)) * torch.tensor(frequency)).double()
            matrix[pair, pair] = matrix[pair + pairs, pair + pairs] = angle.cos()
            matrix[pair, pair + pairs], matrix[pair + pairs, pair] = -angle.sin(), angle.sin()
    return matrix


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"aggregate": "max"},
        {"aggregate": "sum"},
        {"use_covariance": False},
        {"use_value_norm": False},
        {"epsilon": 0.02},
        {"scale": 0.2},
        {"sinks": 0},
        {"n_future": 1},
    ],
)
def test_scores_are_the_weights_that_normal_queries_give(params: dict[str, Any]) -> None:
    editor = ExpectedAttention(statistics=STATISTICS, **{"n_future": 20, **params})
    x = given(4 * CHUNK)
    total, sinks = len(x.tokens), editor.sinks
    scale = editor.scale or HEAD_DIM**-0.5
    keys, values = by_head(x, 0), by_head(x, 1)
    assert STATISTICS.covariance is not None
    covariance_of = STATISTICS.covariance.double()

    def score(layer: int, head: int) -> torch.Tensor:
        turn = torch.stack([rotation(layer, total + i) for i in range(editor.n_future)]).mean(0)
        of_group = []
        for query_head in range(head * GROUPS, (head + 1) * GROUPS):
            mean = turn @ STATISTICS.mean[layer, query_head].double()
            covariance = turn @ covariance_of[layer, query_head] @ turn.T
            weights = torch.zeros(total, dtype=torch.float64)
            for token in range(sinks, total):
                key = keys[layer][head][token]
                spread = float(key @ covariance @ key) if editor.use_covariance else 0.0
                weights[token] = torch.tensor(scale * float(key @ mean) + scale**2 * spread / 2).exp()
            of_group.append(weights / weights.sum())
        groups = torch.stack(of_group)
        weights = {"mean": groups.mean(0), "max": groups.max(0).values, "sum": groups.sum(0)}[editor.aggregate]
        if not editor.use_value_norm:
            return weights
        return (weights + editor.epsilon) * values[layer][head].pow(2).sum(-1).sqrt()

    assert_scores(editor, x, each_head(score))


def test_what_queries_to_come_look_at_is_kept() -> None:
    x = given(8 * CHUNK)
    mean = torch.zeros(LAYERS, HEADS * GROUPS, HEAD_DIM)
    mean[1] = 5.0  # the layer without positions
    x.kv[0, 1, 41] = 20.0
    statistics = QueryStatistics(mean=mean)
    editor = ExpectedAttention(statistics=statistics, use_covariance=False, keep=2 * CHUNK)
    kept = editor.edit(x).kept_positions
    assert kept is not None
    assert {0, 1, 2, 3, 41} <= set(kept.tolist())


class TestWithoutStatistics:
    @pytest.mark.parametrize("make", [ExpectedAttention, lambda: editors.get("expected-attention")])
    def test_refused_at_once_with_the_remedy(self, make: Any) -> None:
        with pytest.raises(UsageError, match=r"pass statistics=.*QueryStatistics\.measure.*EmbeddedEngine"):
            make()

    def test_those_of_another_model_are_refused(self) -> None:
        narrow = QueryStatistics(mean=STATISTICS.mean[..., :4])
        with pytest.raises(UsageError, match="query heads of 4 do not fit a model of 3 layers"):
            ExpectedAttention(statistics=narrow, use_covariance=False).edit(given(4 * CHUNK))

    def test_no_covariance_is_refused_unless_it_is_not_used(self) -> None:
        certain = QueryStatistics(mean=STATISTICS.mean)
        with pytest.raises(UsageError, match="use_covariance=False"):
            ExpectedAttention(statistics=certain)
        assert ExpectedAttention(statistics=certain, use_covariance=False).edit(given(4 * CHUNK)).kv.shape[2] == 32

    @pytest.mark.parametrize("params", [{"n_future": 0}, {"epsilon": -1.0}])
    def test_impossible_parameters_are_refused(self, params: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match=next(iter(params))):
            ExpectedAttention(statistics=STATISTICS, **params)


class TestStatistics:
    @pytest.mark.parametrize("block", [expected_attention.BLOCK, 7])
    def test_measured_before_rotation_over_all_tokens_but_sinks(
        self, monkeypatch: pytest.MonkeyPatch, block: int
    ) -> None:
        monkeypatch.setattr(expected_attention, "BLOCK", block)
        generator = torch.Generator().manual_seed(3)
        plain = [torch.randn(LAYERS, tokens, HEADS * GROUPS * HEAD_DIM, generator=generator) for tokens in (50, 30)]
        plain = [one + 2 for one in plain]
        rotated = [
            rerotate(one, torch.zeros(one.shape[1], dtype=torch.int64), torch.arange(one.shape[1]), GEOMETRY.rotary)
            for one in plain
        ]
        found = QueryStatistics.measure((one[None] for one in rotated), GEOMETRY, skip=2)
        everything = torch.cat([one[:, 2:] for one in plain], dim=1).double()
        for layer in range(LAYERS):
            for head in range(HEADS * GROUPS):
                rows = everything[layer, :, head * HEAD_DIM : (head + 1) * HEAD_DIM]
                mean = rows.sum(0) / len(rows)
                covariance = sum(torch.outer(row - mean, row - mean) for row in rows) / len(rows)
                assert found.covariance is not None
                torch.testing.assert_close(found.mean[layer, head].double(), mean, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(found.covariance[layer, head].double(), covariance, atol=1e-5, rtol=1e-5)

    def test_one_prompt_needs_no_list(self) -> None:
        queries = given(3 * CHUNK).queries
        assert queries is not None
        one, listed = QueryStatistics.measure(queries, GEOMETRY), QueryStatistics.measure([queries], GEOMETRY)
        assert torch.equal(one.mean, listed.mean)

    def test_what_cannot_be_measured_is_refused(self) -> None:
        queries = given(CHUNK).queries
        assert queries is not None
        with pytest.raises(UsageError, match=r"queries must be \[1, 3, T, Hq \* 8\]"):
            QueryStatistics.measure(queries[:, :2], GEOMETRY)
        with pytest.raises(UsageError, match="no queries are left after the first 16 tokens"):
            QueryStatistics.measure(queries, GEOMETRY, skip=16)
        unknown = dataclasses.replace(GEOMETRY, rotary=None, rotary_unknown="because of the moon")
        with pytest.raises(UsageError, match="because of the moon"):
            QueryStatistics.measure(queries, unknown)
        with pytest.raises(UsageError, match="MLA"):
            QueryStatistics.measure(queries, LATENT)

    @pytest.mark.parametrize("covariance", [STATISTICS.covariance, None])
    def test_saved_and_loaded(self, tmp_path: Path, covariance: torch.Tensor | None) -> None:
        made = QueryStatistics(mean=STATISTICS.mean, covariance=covariance)
        path = tmp_path / "statistics.pt"
        made.save(path)
        loaded = QueryStatistics.load(path)
        assert torch.equal(loaded.mean, made.mean)
        assert (loaded.covariance is None) == (covariance is None)
        if covariance is not None:
            assert loaded.covariance is not None
            assert torch.equal(loaded.covariance, covariance)
            by_path = editors.get("expected-attention", statistics=str(path))
            direct = ExpectedAttention(statistics=made)
            x = given(4 * CHUNK)
            assert by_path.edit(x).tokens == direct.edit(x).tokens

    def test_other_files_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "other.pt"
        for write in (lambda: None, lambda: path.write_bytes(b"nonsense"), lambda: torch.save([1], path)):
            write()
            with pytest.raises(UsageError, match=r"other\.pt holds no query statistics"):
                QueryStatistics.load(path)

    def test_equal_contents_read_alike(self) -> None:
        same = QueryStatistics(mean=STATISTICS.mean.clone(), covariance=STATISTICS.covariance)
        other = QueryStatistics(mean=STATISTICS.mean + 1, covariance=STATISTICS.covariance)
        assert repr(same) == repr(STATISTICS)
        assert repr(other) != repr(STATISTICS)
        assert "3 layers, 4 heads of 8" in repr(same)

    def test_shapes_that_contradict_each_other_are_refused(self) -> None:
        with pytest.raises(UsageError, match="mean must be"):
            QueryStatistics(mean=STATISTICS.mean[0])
        with pytest.raises(UsageError, match="covariance must be"):
            QueryStatistics(mean=STATISTICS.mean, covariance=STATISTICS.mean)
