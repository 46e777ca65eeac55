"""Editors made of editors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from lmcache_stream.editors import (
    Compose,
    Edit,
    EditInput,
    Editor,
    KeyDiff,
    MiddleOut,
    PerLayer,
    Quantize,
    Random,
    SnapKV,
    StreamingLLM,
    TokenDropping,
)
from lmcache_stream.errors import UsageError
from tests.editors.inputs import CHUNK, LAYERS, all_editors, given, kept_by_head, picked, unrotated

SCOPES: tuple[Any, ...] = ("shared", "layer", "head")
DROPPING = [one for one in all_editors() if isinstance(one, TokenDropping) and not isinstance(one, PerLayer)]


@pytest.mark.parametrize("first", SCOPES)
@pytest.mark.parametrize("then", SCOPES)
def test_positions_are_those_of_the_first_input(first: Any, then: Any) -> None:
    x = given(8 * CHUNK)
    edit = Compose(editors=(KeyDiff(scope=first), Random(scope=then))).edit(x)
    assert len(edit.tokens) == 2 * CHUNK
    kept = kept_by_head(edit)
    raw = unrotated(x.kv, torch.arange(len(x.tokens)))
    torch.testing.assert_close(unrotated(edit.kv, torch.arange(2 * CHUNK)), picked(raw, kept), atol=5e-5, rtol=1e-4)
    assert torch.equal(edit.kv[1], picked(x.kv[1], kept))
    assert edit.asked == 0.5
    assert edit.kept_positions is not None
    wider = max(SCOPES.index(first), SCOPES.index(then))
    assert edit.kept_positions.dim() == wider + 1


def test_equals_one_after_the_other() -> None:
    x = given(8 * CHUNK)
    half = StreamingLLM(keep=4 * CHUNK).edit(x)
    expected = MiddleOut(keep=CHUNK).edit(replace(x, kv=half.kv, tokens=half.tokens, queries=None))
    edit = Compose(editors=(StreamingLLM(keep=4 * CHUNK), MiddleOut(keep=CHUNK))).edit(x)
    assert edit.tokens == expected.tokens
    assert torch.equal(edit.kv, expected.kv)


@dataclass(frozen=True, kw_only=True)
class Last(Editor):
    """Keeps the last chunk, as a view of the input, in memory that torch takes for another when `foreign`."""

    foreign: bool = False

    def edit(self, x: EditInput) -> Edit:
        kv = x.kv[:, :, -CHUNK:]
        if self.foreign:
            kv = torch.from_numpy(kv.numpy())
        return Edit(kv=kv, tokens=x.tokens[-CHUNK:], kept_positions=None)


@pytest.mark.parametrize("first", [Quantize(), StreamingLLM(), Last(), Last(foreign=True)])
def test_only_what_is_in_between_is_edited_in_place(first: Editor) -> None:
    x = given(4 * CHUNK)
    before = x.kv.clone()
    Compose(editors=(first, Quantize(to="fp8"))).edit(x)
    assert torch.equal(x.kv, before)


def test_spent_kv_is_edited_in_place() -> None:
    x = given(4 * CHUNK)
    kept = Quantize().edit(x)
    edit = Quantize().edit(replace(x, spent=True))
    assert edit.kv.data_ptr() == x.kv.data_ptr()
    assert edit.kv is not x.kv, "the very input would mean that nothing changed"
    assert torch.equal(edit.kv, kept.kv)


def test_names_stand_for_defaults() -> None:
    assert Compose(editors=("quantize", "streaming_llm")).editors == (Quantize(), StreamingLLM())


def test_queries_come_before_dropping() -> None:
    assert Compose(editors=(Quantize(), SnapKV(), StreamingLLM())).needs == {"heads", "queries"}
    Compose(editors=(Quantize(), SnapKV())).edit(given(4 * CHUNK))
    with pytest.raises(UsageError, match="snapkv needs the prompt's queries"):
        Compose(editors=(StreamingLLM(), SnapKV()))


@pytest.mark.parametrize("editors", [(), (3,), (Compose,)])
def test_nothing_to_compose_is_refused(editors: Any) -> None:
    with pytest.raises(UsageError, match="compose needs editors"):
        Compose(editors=editors)


def test_each_layer_by_its_own_method() -> None:
    x = given(6 * CHUNK)
    edit = PerLayer(default=KeyDiff(), layers={0: StreamingLLM(), 2: Random(scope="layer")}, sinks=6).edit(x)
    assert edit.kept_positions is not None
    assert edit.kept_positions.shape == (LAYERS, 3 * CHUNK)
    for layer, method in enumerate((StreamingLLM(), KeyDiff(), Random(scope="layer"))):
        alone = replace(method, scope="layer", sinks=6).edit(x).kept_positions
        assert alone is not None
        assert torch.equal(edit.kept_positions[layer], alone[layer])


@pytest.mark.parametrize("scope", ["layer", "head"])
@pytest.mark.parametrize("chunks", [1, 2, 6])
@pytest.mark.parametrize("method", DROPPING, ids=lambda method: method.name)
def test_one_method_for_all_layers_keeps_what_it_keeps_alone(method: TokenDropping, chunks: int, scope: Any) -> None:
    x = replace(given(chunks * CHUNK), chunk_size=CHUNK // 2)
    alone = replace(method, scope=scope)
    expected, edit = alone.edit(x), PerLayer(default=alone, scope=scope).edit(x)
    assert edit.tokens == expected.tokens
    assert torch.equal(kept_by_head(edit), kept_by_head(expected))


def test_schedules_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="scope"):
        PerLayer(scope="shared")
    with pytest.raises(UsageError, match="drop tokens"):
        PerLayer(layers={0: Quantize()})  # type: ignore[dict-item]  # wrong on purpose
    with pytest.raises(UsageError, match="no per-layer inside"):
        PerLayer(default=PerLayer())
    with pytest.raises(UsageError, match=r"layers \[7\] of a model with 3"):
        PerLayer(layers={7: Random()}).edit(given(6 * CHUNK))
    assert PerLayer(layers={0: SnapKV()}).needs == {"heads", "queries"}
