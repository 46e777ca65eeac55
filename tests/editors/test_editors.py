"""What holds for every editor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lmcache_stream.editors import EditInput, Editor, Quantize, TokenDropping
from lmcache_stream.errors import UsageError
from tests.editors.inputs import (
    CHUNK,
    GEOMETRY,
    HEAD_DIM,
    HEADS,
    LATENT,
    LAYERS,
    all_editors,
    given,
    kept_by_head,
    picked,
    unrotated,
    without,
)

EDITORS = {editor.name: editor for editor in all_editors()}
MERGES_VALUES = {"merge"}
QUANTIZES = {"compose", "quantize"}
SCOPED = [
    pytest.param(editor, id=f"{editor.name}-{scope}")
    for scope in ("layer", "head")
    for editor in all_editors(scope=scope)
    if editor.name not in ("compose", "quantize")
]


def by_name(*names: str) -> list[object]:
    return [pytest.param(EDITORS[name], id=name) for name in sorted(names or EDITORS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("editor", [*by_name(), *SCOPED])
def test_keeps_half_of_the_tokens_at_their_new_positions(editor: Editor, dtype: torch.dtype) -> None:
    x = given(6 * CHUNK, dtype=dtype)
    before = x.kv.clone()
    edit = editor.edit(x)
    assert torch.equal(x.kv, before)
    count = 6 * CHUNK if isinstance(editor, Quantize) else 3 * CHUNK
    assert edit.kv.shape == (2, LAYERS, count, HEADS * HEAD_DIM)
    assert edit.kv.dtype == dtype
    assert edit.kv.is_contiguous()
    assert len(edit.tokens) == count
    assert list(edit.tokens) == sorted(set(edit.tokens))
    kept = kept_by_head(edit)
    assert kept.dtype == torch.int64
    assert bool((kept.diff(dim=-1) > 0).all())
    assert 0 <= int(kept.min()) <= int(kept.max()) < len(x.tokens)

    tolerance = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    if editor.name in QUANTIZES:
        tolerance += 0.05
    raw = unrotated(x.kv.float(), torch.arange(len(x.tokens)))
    moved = unrotated(edit.kv.float(), torch.arange(count))
    torch.testing.assert_close(moved, picked(raw, kept), atol=tolerance, rtol=tolerance)
    if editor.name in QUANTIZES:
        torch.testing.assert_close(edit.kv[1].float(), picked(x.kv[1].float(), kept), atol=tolerance, rtol=0)
    elif editor.name not in MERGES_VALUES:
        assert torch.equal(edit.kv[1], picked(x.kv[1], kept))


@pytest.mark.parametrize("editor", by_name())
def test_equal_input_gives_equal_edits(editor: Editor) -> None:
    first, second = editor.edit(given(5 * CHUNK)), editor.edit(given(5 * CHUNK))
    assert first.tokens == second.tokens
    assert torch.equal(first.kv, second.kv)


@pytest.mark.parametrize("editor", [*by_name(), *SCOPED])
def test_memory_of_spent_kv_gives_the_same_edit(editor: Editor) -> None:
    expected = editor.edit(given(5 * CHUNK))
    x = replace(given(5 * CHUNK), spent=True)
    edit = editor.edit(x)
    assert edit.tokens == expected.tokens
    assert torch.equal(edit.kv, expected.kv)
    assert edit.kv is not x.kv


@pytest.mark.parametrize("scope", ["shared", "layer", "head"])
def test_kept_positions_have_the_shape_of_their_scope(scope: str) -> None:
    for editor in all_editors(scope=scope):
        if isinstance(editor, TokenDropping) and not (editor.name == "per-layer" and scope == "shared"):
            kept = editor.edit(given(6 * CHUNK)).kept_positions
            assert kept is not None
            shape = {"shared": (), "layer": (LAYERS,), "head": (LAYERS, HEADS)}[scope]
            assert kept.shape == (*shape, 3 * CHUNK), editor.name


@pytest.mark.parametrize("total", [0, 1, CHUNK - 1, CHUNK])
@pytest.mark.parametrize("editor", by_name())
def test_a_chunk_or_less_stays_whole(editor: Editor, total: int) -> None:
    x = given(total)
    edit = editor.edit(x)
    assert edit.tokens == x.tokens
    assert edit.kept_positions is not None
    assert edit.kept_positions.tolist() == list(range(total))
    tolerance = 0.05 if editor.name in QUANTIZES else 0
    torch.testing.assert_close(edit.kv, x.kv, atol=tolerance, rtol=0)


@pytest.mark.parametrize("editor", all_editors(keep=0.1, sinks=8, window=60))
def test_fewer_tokens_than_sinks_and_window_stay_whole(editor: Editor) -> None:
    x = given(4 * CHUNK)
    edit = editor.edit(x)
    assert edit.tokens == x.tokens


@pytest.mark.parametrize(
    "editor",
    [
        pytest.param(editor, id=editor.name)
        for editor in all_editors(keep=0.25, sinks=4, window=20)
        if not isinstance(editor, Quantize)
    ],
)
def test_sinks_and_window_are_always_kept(editor: Editor) -> None:
    edit = editor.edit(given(8 * CHUNK))
    assert len(edit.tokens) == 2 * CHUNK
    kept = kept_by_head(edit)
    assert torch.equal(kept[..., :4], torch.arange(4).expand(LAYERS, HEADS, 4))
    assert torch.equal(kept[..., -20:], torch.arange(8 * CHUNK - 20, 8 * CHUNK).expand(LAYERS, HEADS, 20))


@pytest.mark.parametrize("editor", by_name())
def test_queries_are_asked_for_by_name_and_with_the_remedy(editor: Editor) -> None:
    x = replace(given(6 * CHUNK), queries=None)
    if "queries" in editor.needs:
        with pytest.raises(UsageError, match=f"{editor.name}.*queries.*EmbeddedEngine"):
            editor.edit(x)
        short = given(6 * CHUNK)
        assert short.queries is not None
        with pytest.raises(UsageError, match=f"{editor.name} needs the queries of all 96 .* first 95"):
            editor.edit(replace(short, queries=short.queries[:, :, :-1]))
    else:
        assert editor.edit(x).tokens == editor.edit(given(6 * CHUNK)).tokens


@pytest.mark.parametrize("editor", by_name())
def test_unknown_heads_are_refused_where_they_matter(editor: Editor) -> None:
    x = replace(given(6 * CHUNK), geometry=None)
    if isinstance(editor, Quantize):
        assert editor.edit(x).tokens == x.tokens
    else:
        with pytest.raises(UsageError, match=r"KVGeometry\.from_config"):
            editor.edit(x)


@pytest.mark.parametrize("editor", by_name())
def test_unknown_rotary_positions_are_refused_where_they_change(editor: Editor) -> None:
    x = without(given(6 * CHUNK), rotary=None, rotary_unknown="because of the moon")
    if isinstance(editor, Quantize):
        editor.edit(x)
        return
    remedy = r"KVGeometry\.from_config" if "rotary" in editor.needs else "rerotate=False"
    with pytest.raises(UsageError, match=f"because of the moon.*{remedy}"):
        editor.edit(x)
    assert len(replace(editor, geometry=GEOMETRY).edit(x).tokens) == 3 * CHUNK


@pytest.mark.parametrize("editor", [pytest.param(e, id=e.name) for e in all_editors(rerotate=False)])
def test_old_positions_stay_on_request(editor: Editor) -> None:
    x = given(6 * CHUNK)
    edit = editor.edit(x if "rotary" in editor.needs else without(x, rotary=None))
    if editor.name not in QUANTIZES:
        assert torch.equal(edit.kv[0], picked(x.kv[0], kept_by_head(edit)))


@pytest.mark.parametrize("editor", by_name())
def test_mla_works_or_is_refused(editor: Editor) -> None:
    x = replace(given(6 * CHUNK, geometry=LATENT))
    if "heads" in editor.needs:
        with pytest.raises(UsageError, match=f"{editor.name}.*MLA"):
            editor.edit(x)
        return
    edit = editor.edit(x)
    assert edit.kv.shape[0] == 1
    raw = unrotated(x.kv, torch.arange(len(x.tokens)), LATENT)
    moved = unrotated(edit.kv, torch.arange(len(edit.tokens)), LATENT)
    tolerance = 0.05 if editor.name in QUANTIZES else 2e-5
    torch.testing.assert_close(moved, picked(raw, kept_by_head(edit, LATENT)), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("editor", by_name())
def test_the_documented_call(editor: Editor) -> None:
    x = given(6 * CHUNK)
    called = replace(editor, geometry=GEOMETRY)
    if "queries" in editor.needs:
        with pytest.raises(UsageError, match="queries"):
            called(x.kv, list(x.tokens))
        return
    kv, tokens = called(x.kv, list(x.tokens))
    expected = editor.edit(x)
    assert isinstance(tokens, list)
    assert tuple(tokens) == expected.tokens
    assert torch.equal(kv, expected.kv)


@pytest.mark.parametrize("editor", SCOPED)
def test_scopes_that_depend_on_the_order_of_slots_are_refused(editor: Editor) -> None:
    x = given(6 * CHUNK)
    with pytest.raises(UsageError, match=r'sliding_attention.*scope="shared"'):
        editor.edit(without(x, layer_types=("full_attention", "sliding_attention", "full_attention")))
    with pytest.raises(UsageError, match=r'ALiBi.*scope="shared"'):
        editor.edit(without(x, alibi=True))


def test_an_input_that_contradicts_itself_is_refused() -> None:
    x = given(CHUNK)
    for fields, match in (
        ({"kv": x.kv[0]}, r"kv must be floating point \[2, L, T, D\]"),
        ({"kv": x.kv.long()}, "kv must be floating point"),
        ({"tokens": x.tokens[:-1]}, "15 token ids were given"),
        ({"kv": x.kv[..., :-1]}, "does not fit the geometry"),
        ({"kv": x.kv[:1]}, "does not fit the geometry"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"queries": x.kv}, r"queries must be \[1, 3, Tq, Dq\]"),
    ):
        with pytest.raises(UsageError, match=match):
            EditInput(**{**vars(x), **fields})
