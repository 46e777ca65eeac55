from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_stream.bench.statistics import Interval
from lmcache_stream.editors import EditInput
from lmcache_stream.geometry import KVGeometry

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, imported as running it imports what lies beside it."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("bench_quality_vs_kvpress")


def test_jaccard_of_each_layer_and_head(bench: Any) -> None:
    ours = torch.tensor([[[0, 1, 2, 3], [4, 5, 6, 7]]])
    theirs = torch.tensor([[[3, 2, 1, 0], [7, 8, 9, 6]]])
    torch.testing.assert_close(bench.jaccard(ours, theirs, 10), torch.tensor([[1.0, 2 / 6]]))


def test_equal_scores_go_to_the_earlier_token(bench: Any) -> None:
    scores = torch.tensor([[[1.0, 3.0, 1.0, 3.0, 2.0, 1.0]]])
    assert bench.best_of(scores, 4).tolist() == [[[1, 3, 4, 0]]]


@pytest.mark.parametrize("kept", [torch.tensor([0, 2]), torch.tensor([[0, 2]] * 3), torch.tensor([[[0, 2]] * 2] * 3)])
def test_kept_positions_of_any_scope_by_head(bench: Any, kept: torch.Tensor) -> None:
    assert bench.by_head(kept, 3, 2).tolist() == [[[0, 2]] * 2] * 3


def test_layers_of_their_own_stay_apart(bench: Any) -> None:
    assert bench.by_head(torch.tensor([[0, 1], [2, 3]]), 2, 3).tolist() == [[[0, 1]] * 3, [[2, 3]] * 3]


def test_kvpress_keeps_exactly_the_budget(bench: Any) -> None:
    for total in (640, 704, 1000, 4096):
        for budget in range(1, total):
            ratio = bench.ratio_that_keeps(budget, total)
            assert 0 <= ratio < 1
            assert int(total * (1 - ratio)) == budget


def test_budgets_are_whole_chunks_of_the_ratios(bench: Any) -> None:
    for pair in bench.all_pairs():
        assert [bench.budget_of(bench.Case(pair, keep)) for keep in bench.KEEPS] == [320, 160, 64]


def test_observed_attention_is_the_mean_over_the_queries_that_see_a_token(bench: Any) -> None:
    heads, groups, total, head_dim = 2, 3, 20, 8
    generator = torch.Generator().manual_seed(3)
    kv = torch.randn(2, 1, total, heads * head_dim, generator=generator)
    queries = torch.randn(1, 1, total, heads * groups * head_dim, generator=generator)
    x = EditInput(
        kv=kv,
        tokens=tuple(range(total)),
        geometry=KVGeometry(num_layers=1, num_kv_heads=heads, head_dim=head_dim, dtype=torch.float32),
        chunk_size=1,
        queries=queries,
    )
    expected = torch.zeros(heads, total, dtype=torch.float64)
    for head in range(heads * groups):
        for position in range(total):
            query = queries[0, 0, position, head * head_dim : (head + 1) * head_dim].double()
            keys = kv[0, 0, : position + 1, head // groups * head_dim : (head // groups + 1) * head_dim].double()
            expected[head // groups, : position + 1] += (keys @ query / math.sqrt(head_dim)).softmax(-1) / groups
    expected /= torch.arange(total, 0, -1)
    scores = bench.ObservedAttention(scope="head").score(x, 10)[0]
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("lowest", "ruled", "same", "verdict"),
    [
        (0.95, 0.95, True, "agree"),
        (0.94, 0.95, True, "agree but for ties"),
        (0.94, 0.94, True, "differ"),
        (1.0, 1.0, False, "differ by design"),
    ],
)
def test_verdict_on_kept_sets(bench: Any, lowest: float, ruled: float, same: bool, verdict: str) -> None:
    assert bench.kept_sets(lowest, ruled, same=same) == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.05, 0.019, "no worse"),
        (-0.05, 0.02, "open"),
        (0.019, 0.05, "open"),
        (0.02, 0.05, "worse"),
        (math.nan, math.nan, "open"),
    ],
)
def test_verdict_on_the_difference(bench: Any, low: float, high: float, verdict: str) -> None:
    assert bench.nll_verdict(Interval(mean=0.0, low=low, high=high, n=9)) == verdict


def found(bench: Any, index: int, **given: Any) -> Any:
    nll = {"full": 3.0, "ours": 3.1 + index / 10, "kvpress": 3.2 + index / 10}
    return bench.Found(document=f"d{index}", jaccard=[[1.0, 1.0]], same_rule=[[1.0, 1.0]], nll=nll, **given)


def test_row_of_what_texts_gave(bench: Any) -> None:
    case = bench.Case(bench.all_pairs()[1], 0.5)
    crossed = {"ours original": 3.1, "kvpress original": 3.0, "ours rerotated": 3.1, "kvpress rerotated": 3.3}
    first = bench.replace(found(bench, 0, crossed=crossed), jaccard=[[1.0, 0.5]])
    row = bench.row_of(case, [first, found(bench, 1), found(bench, 2)])
    assert (row.lowest, row.lowest_head) == (0.5, pytest.approx(2.5 / 3))
    assert (row.kept_sets, row.nll) == ("agree but for ties", "no worse")
    assert row.difference.mean == pytest.approx(-0.1)
    assert row.original.mean == pytest.approx(0.1)
    assert row.rerotated.mean == pytest.approx(-0.2)
    assert bench.row_of(case, [found(bench, 1)]).original is None
    assert all(isinstance(cell, str) for cell in bench.cells(row))


def test_no_nan_in_json(bench: Any) -> None:
    assert bench.plain({"x": math.nan, "y": {"z": 1.0}}) == {"x": None, "y": {"z": 1.0}}


def test_journal_gives_back_what_it_was_given(bench: Any, tmp_path: Path) -> None:
    journal = bench.Journal(tmp_path / "journal", {"seed": 0})
    assert journal.read() == {}
    journal.add("a", {"knorm 0.5": found(bench, 1), "tova 0.1": found(bench, 2)})
    journal.add("a", {"knorm 0.5": found(bench, 3)})
    with journal.path.open("a") as file:
        file.write('{"conditions": {"se')
    assert journal.read() == {("a", "knorm 0.5"): found(bench, 3), ("a", "tova 0.1"): found(bench, 2)}
    with pytest.raises(SystemExit, match="under other conditions: remove it"):
        bench.Journal(journal.path, {"seed": 1}).read()


def test_crossed_positions_are_measured_where_they_lack(bench: Any) -> None:
    assert not bench.is_known(None, crossed=False)
    assert bench.is_known(found(bench, 0), crossed=False)
    assert not bench.is_known(found(bench, 0), crossed=True)
    assert bench.is_known(found(bench, 0, crossed={}), crossed=True)


def test_unknown_method_is_refused(bench: Any) -> None:
    with pytest.raises(SystemExit, match="no method typo: choose from streaming-llm"):
        list(bench.chosen(bench.all_pairs(), ["typo"]))
