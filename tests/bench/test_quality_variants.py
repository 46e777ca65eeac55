from __future__ import annotations

from typing import Any

import pytest

from lmcache_stream import editors
from lmcache_stream.bench.variants import COMBINATORS, default_variants, make_variants
from lmcache_stream.editors import Compose, KeyDiff, Merge, Quantize, SnapKV, StreamingLLM
from lmcache_stream.errors import UsageError

BOTH: dict[str, Any] = {"scopes": ["shared", "head"], "keeps": [0.5, 0.1], "window": 16, "seed": 7}


def test_editors_are_crossed_with_scopes_and_ratios() -> None:
    made = make_variants(["snapkv:kernel_size=7"], **BOTH)
    assert [variant.label for variant in made] == [
        "snapkv,kernel_size=7/shared/0.5",
        "snapkv,kernel_size=7/head/0.5",
        "snapkv,kernel_size=7/shared/0.1",
        "snapkv,kernel_size=7/head/0.1",
    ]
    assert made[1].editor == SnapKV(kernel_size=7, keep=0.5, scope="head", window=16)


def test_methods_that_rate_all_heads_alike_have_one_scope() -> None:
    made = make_variants(["streaming-llm", "random"], **BOTH)
    assert {variant.scope for variant in made} == {"shared"}
    assert made[0].editor == StreamingLLM(keep=0.5, window=16)
    assert made[2].editor == editors.get("random", keep=0.5, window=16, seed=7)
    assert make_variants(["random:scope=head"], **BOTH)[0].scope == "head"


def test_a_spec_overrides() -> None:
    (made,) = make_variants(["snapkv:keep=64,window=8,scope=layer"], **BOTH)
    assert made.editor == SnapKV(keep=64, window=8, scope="layer")
    assert made.label == "snapkv,window=8/layer/64"


@pytest.mark.parametrize("said", ["false", "False"])
def test_a_spec_says_no_as_json_or_python_does(said: str) -> None:
    (made,) = make_variants([f"streaming_llm:keep=64,rerotate={said}"], **BOTH)
    assert made.editor == StreamingLLM(keep=64, window=16, rerotate=False)
    assert made.method == "streaming-llm,rerotate=False"


def test_editors_around_others_pass_the_budget_on() -> None:
    made = make_variants(["merge", "merge:editor=snapkv,threshold=0.7"], **BOTH)
    assert made[0].editor == Merge(editor=KeyDiff(keep=0.5, window=16))
    assert made[-1].editor == Merge(editor=SnapKV(keep=0.1, scope="head", window=16), threshold=0.7)


def test_the_one_editor_that_drops_in_a_composition_takes_the_budget() -> None:
    (made,) = make_variants(['compose:editors=["quantize", "keydiff"],keep=64,scope=head'], **BOTH)
    assert made.editor == Compose(editors=(Quantize(), KeyDiff(keep=64, scope="head", window=16)))
    assert (made.keep, made.scope) == (64, "head")
    with pytest.raises(UsageError, match="compose has 2 editors inside that drop tokens: it takes no keep"):
        make_variants(['compose:editors=["random", "keydiff"],keep=64'], **BOTH)


def test_editors_that_keep_all_are_measured_once() -> None:
    (made,) = make_variants(["quantize:to=fp8"], **BOTH)
    assert (made.editor, made.label, made.scope) == (Quantize(to="fp8"), "quantize,to=fp8", None)
    with pytest.raises(UsageError, match="keeps every token"):
        make_variants(["quantize:keep=0.5"], **BOTH)


def test_definitions_tell_parameters_apart() -> None:
    first, second = make_variants(["merge", "merge:threshold=0.7"], **{**BOTH, "scopes": ["head"], "keeps": [0.5]})
    assert "window=16" in first.definition
    assert "threshold=0.6" in first.definition
    assert first.definition.replace("threshold=0.6", "threshold=0.7") == second.definition


@pytest.mark.parametrize(
    "spec", ["snapkv:window", "snapkv:=3", "snapkv:nonsense=3", "no-such-editor", "snapkv:keep=2.0", "knorm:sinks=a"]
)
def test_a_wrong_spec_is_a_usage_error(spec: str) -> None:
    with pytest.raises(UsageError):
        make_variants([spec], **BOTH)


def test_the_same_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        make_variants(["snapkv", "snapkv"], **BOTH)


def test_the_default_is_every_editor_by_name() -> None:
    made, left_out = default_variants(**BOTH)
    measured = {variant.method for variant in made}
    assert measured | {out.what for out in left_out} == set(editors.names())
    assert {out.what for out in left_out} >= COMBINATORS
    assert {"snapkv", "keydiff", "random", "quantize", "merge"} <= measured
