"""Budgets, selection, gathering."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given as draw
from hypothesis import settings
from hypothesis import strategies as st

from lmcache_stream.editors import EditInput, LayerScoring, StreamingLLM, TokenDropping
from lmcache_stream.editors.base import Layer
from lmcache_stream.errors import UsageError
from tests.editors.inputs import CHUNK, HEADS, LAYERS, given


@dataclass(frozen=True, kw_only=True)
class Scored(TokenDropping):
    """Keeps by scores that the test gives."""

    name: ClassVar[str] = "scored"

    scores: Any = None

    def score(self, x: EditInput, budget: int) -> torch.Tensor:
        assert isinstance(self.scores, torch.Tensor)
        return self.scores


@pytest.mark.parametrize(
    ("total", "keep", "chunk", "protected", "expected"),
    [
        (128, 0.5, 32, 0, 64),
        (100, 0.5, 32, 0, 64),  # 50 tokens are 1.56 chunks
        (96, 0.5, 32, 0, 64),  # half a chunk is kept
        (96, 0.49, 32, 0, 32),
        (96, 0.01, 32, 0, 32),  # at least one chunk
        (96, 2, 32, 0, 32),
        (96, 1.0, 32, 0, 96),
        (100, 1.0, 32, 0, 100),
        (100, 100, 32, 0, 100),
        (100, 5000, 32, 0, 100),
        (100, 99, 32, 0, 96),
        (128, 40, 32, 36, 64),  # never below what is protected
        (128, 0.25, 32, 65, 96),
        (40, 0.25, 32, 36, 40),
        (20, 0.25, 32, 0, 20),
        (7, 0.5, 1, 0, 4),
    ],
)
def test_budgets_are_whole_chunks(total: int, keep: float | int, chunk: int, protected: int, expected: int) -> None:
    assert StreamingLLM(keep=keep).budget(total, chunk, protected) == expected


@settings(deadline=None, max_examples=100)
@draw(
    total=st.integers(0, 200),
    chunk=st.integers(1, 40),
    keep=st.one_of(st.floats(0.01, 1.0), st.integers(2, 250)),
    sinks=st.integers(0, 20),
    window=st.integers(0, 20),
)
def test_kept_counts(total: int, chunk: int, keep: float | int, sinks: int, window: int) -> None:
    x = replace(given(total), chunk_size=chunk)
    editor = StreamingLLM(keep=keep, sinks=sinks, window=window)
    edit = editor.edit(x)
    count = len(edit.tokens)
    assert edit.asked == keep
    assert count == total or (count % chunk == 0 and chunk <= count < total)
    assert count >= min(sinks + window, total)
    assert edit.tokens[:sinks] == x.tokens[:sinks]
    assert edit.tokens[count - min(window, count) :] == x.tokens[total - min(window, total) :]
    if count < total:
        asked = keep * total if isinstance(keep, float) else keep
        assert abs(count - asked) <= chunk / 2 or count <= chunk * -(-max(sinks + window, 1) // chunk)


@pytest.mark.parametrize("keep", [0.0, -0.5, 1.5, 0, 1, -3, True, "half", None, float("nan")])
def test_impossible_budgets_are_refused(keep: Any) -> None:
    with pytest.raises(UsageError, match="keep"):
        StreamingLLM(keep=keep)


@pytest.mark.parametrize(
    "params", [{"sinks": -1}, {"window": -1}, {"scope": "token"}, {"aggregate": "median"}, {"protect": ((5, 2),)}]
)
def test_impossible_parameters_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(params))):
        StreamingLLM(**params)


def test_equal_scores_go_to_the_earlier_token() -> None:
    edit = Scored(scores=torch.zeros(1, 1, 4 * CHUNK)).edit(given(4 * CHUNK))
    assert edit.kept_positions is not None
    assert edit.kept_positions.tolist() == list(range(2 * CHUNK))


def test_protected_spans_are_kept() -> None:
    span = (20, 37)
    edit = StreamingLLM(protect=(span,)).edit(given(6 * CHUNK))
    assert edit.kept_positions is not None
    kept = edit.kept_positions.tolist()
    assert kept == [*range(4), *range(20, 37), *range(6 * CHUNK - (3 * CHUNK - 21), 6 * CHUNK)]


@pytest.mark.parametrize(("how", "best"), [("mean", 0), ("sum", 0), ("max", 1)])
def test_scores_of_layers_and_heads_become_one(how: Any, best: int) -> None:
    scores = torch.zeros(LAYERS, HEADS, 2 * CHUNK)
    scores[:, :, :CHUNK] = 1.0
    scores[1, 1, CHUNK:] = 3.0
    edit = Scored(scores=scores, aggregate=how).edit(given(2 * CHUNK))
    assert edit.kept_positions is not None
    assert edit.kept_positions.tolist() == list(range(best * CHUNK, (best + 1) * CHUNK))
    by_head = Scored(scores=scores, aggregate=how, scope="head").edit(given(2 * CHUNK)).kept_positions
    assert by_head is not None
    assert by_head[:, :, 0].tolist() == [[0, 0], [0, CHUNK], [0, 0]]


def test_incomparable_scores_are_standardised_first() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Incomparable(Scored):
        comparable: ClassVar[bool] = False

    scores = torch.zeros(LAYERS, HEADS, 2 * CHUNK)
    scores[:, :, :CHUNK] = 0.001
    scores[1, 1] = torch.tensor([0.0, 1000.0]).repeat_interleave(CHUNK)
    x = given(2 * CHUNK)
    raw, standard = (cls(scores=scores).edit(x).kept_positions for cls in (Scored, Incomparable))
    assert raw is not None
    assert standard is not None
    assert (int(raw[0]), int(standard[0])) == (CHUNK, 0)


def test_ids_are_those_that_most_heads_keep() -> None:
    scores = torch.zeros(LAYERS, HEADS, 3 * CHUNK)
    scores[..., CHUNK : 2 * CHUNK] = 1.0
    scores[0, :, :CHUNK] = 2.0
    edit = Scored(scores=scores, scope="head", keep=CHUNK).edit(given(3 * CHUNK))
    assert edit.tokens == tuple(range(1000 + CHUNK, 1000 + 2 * CHUNK))
    tie = torch.zeros(LAYERS, HEADS, 3 * CHUNK)
    tie[:, 0, CHUNK : 2 * CHUNK] = 1.0
    tie[:, 1, 2 * CHUNK :] = 1.0
    edit = Scored(scores=tie, scope="head", keep=CHUNK).edit(given(3 * CHUNK))
    assert edit.tokens == tuple(range(1000 + CHUNK, 1000 + 2 * CHUNK))


def test_the_editors_own_geometry_serves_where_the_input_has_none() -> None:
    x = given(4 * CHUNK)
    editor = StreamingLLM(geometry=x.geometry)
    assert torch.equal(editor.edit(replace(x, geometry=None)).kv, StreamingLLM().edit(x).kv)


def test_a_call_without_chunks_keeps_what_was_asked() -> None:
    x = given(3 * CHUNK)
    _, tokens = StreamingLLM(keep=11, rerotate=False)(x.kv, list(x.tokens))
    assert tokens == [*range(1000, 1004), *range(1000 + 3 * CHUNK - 7, 1000 + 3 * CHUNK)]


def test_scores_of_another_shape_are_refused_by_name() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Flat(LayerScoring):
        name = "flat"

        def score_layer(self, layer: Layer, budget: int) -> torch.Tensor:
            return torch.zeros(3)

    with pytest.raises(UsageError, match=r"Flat.score_layer must give \[KV heads, tokens\] = \[\d+, 64\], not \[3\]"):
        Flat(keep=0.5).edit(given(64))
