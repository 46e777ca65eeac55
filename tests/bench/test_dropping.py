from __future__ import annotations

import pytest

from lmcache_stream.bench.config import EditorSpec
from lmcache_stream.bench.dropping import droppers, filled, kept_tokens, make_editor
from lmcache_stream.editors import Compose, Editor, KeyDiff, Merge, PerLayer, Quantize, Random, SnapKV, StreamingLLM
from lmcache_stream.errors import UsageError


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ("streaming_llm:keep=64", StreamingLLM(keep=64)),
        ("merge:keep=64", Merge(editor=KeyDiff(keep=64))),
        ("merge:editor=snapkv,keep=64,scope=head", Merge(editor=SnapKV(keep=64, scope="head"))),
        ("per-layer:keep=64", PerLayer(keep=64)),
        (
            'compose:editors=["quantize","merge"],keep=0.25',
            Compose(editors=(Quantize(), Merge(editor=KeyDiff(keep=0.25)))),
        ),
        ("quantize", Quantize()),
    ],
)
def test_the_budget_reaches_the_editor_that_drops(asked: str, made: Editor) -> None:
    assert make_editor(EditorSpec.parse(asked)) == made


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("quantize:keep=64", "quantize keeps every token: it takes no keep"),
        ("quantize:keep=64,scope=head", "it takes no keep and no scope"),
        ('compose:editors=["knorm","random"],keep=64', "compose has 2 editors inside that drop tokens"),
        ("merge:window=8", "merge has no parameter window"),
        ("merge:keep=half", "keep must be a ratio"),
    ],
)
def test_a_budget_that_nothing_can_take_is_refused(asked: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make_editor(EditorSpec.parse(asked))


def test_who_drops_and_how_many_are_kept() -> None:
    both = Compose(editors=(Merge(editor=KeyDiff(keep=0.5)), Quantize(), Random(keep=100)))
    assert droppers(both) == [KeyDiff(keep=0.5), Random(keep=100)]
    assert (kept_tokens(both, 1000), kept_tokens(both, 150), kept_tokens(Quantize(), 150)) == (100, 75, 150)
    assert droppers(PerLayer(default=Random())) == [PerLayer(default=Random())]


def test_what_was_given_is_not_filled_in() -> None:
    assert filled(Random(seed=3), {"seed"}, seed=7, window=16) == Random(seed=3, window=16)
    assert filled(Compose(editors=(Quantize(), Random())), seed=7) == Compose(editors=(Quantize(), Random(seed=7)))
