"""What editors take as parameters when they are made by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import lmcache_stream.editors as editors
from lmcache_stream.editors import Edit, EditInput, Editor, KeyDiff, Quantize, Random
from lmcache_stream.editors.parameters import check_parameters
from lmcache_stream.errors import UsageError
from tests.editors.inputs import GEOMETRY

if TYPE_CHECKING:
    from decimal import Decimal


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("streaming-llm", {"rerotate": "maybe"}, "streaming-llm: rerotate takes bool, not 'maybe'"),
        ("streaming-llm", {"rerotate": 1}, "streaming-llm: rerotate takes bool, not 1"),
        ("streaming-llm", {"sinks": "a"}, "streaming-llm: sinks takes int, not 'a'"),
        ("streaming-llm", {"sinks": 4.5}, "streaming-llm: sinks takes int, not 4.5"),
        ("streaming-llm", {"sinks": True}, "streaming-llm: sinks takes int, not True"),
        ("streaming-llm", {"sinks": None}, "streaming-llm: sinks takes int, not None"),
        ("streaming-llm", {"keep": "half"}, "streaming-llm: keep takes float | int, not 'half'"),
        ("streaming-llm", {"protect": [[0, 4, 8]]}, "protect takes tuple[tuple[int, int], ...], not [[0, 4, 8]]"),
        ("streaming-llm", {"protect": 3}, "protect takes tuple[tuple[int, int], ...], not 3"),
        ("streaming-llm", {"scope": "heads"}, "streaming-llm: scope takes one of shared, layer, head, not 'heads'"),
        ("quantize", {"to": 8}, "quantize: to takes one of int8, fp8, not 8"),
        ("snapkv", {"scale": "1"}, "snapkv: scale takes float | None, not '1'"),
        ("merge", {"editor": "quantize"}, "merge: editor takes TokenDropping, not Quantize("),
        ("per-layer", {"layers": [1]}, "per-layer: layers takes Mapping[int, TokenDropping], not [1]"),
    ],
)
def test_what_a_parameter_does_not_take_is_refused(name: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        editors.get(name, **given)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("streaming-llm", {"keep": np.int64(64), "sinks": np.int32(2), "rerotate": False}),
        ("streaming-llm", {"keep": 0.5, "protect": [[0, 4], (8, 12)], "scope": "head", "geometry": GEOMETRY}),
        ("snapkv", {"scale": None}),
        ("snapkv", {"scale": 1}),
        ("random", {"keep": Fraction(1, 2)}),
        ("compose", {"editors": ["quantize", Random()]}),
        ("per-layer", {"default": KeyDiff(), "layers": {0: Random(scope="layer")}}),
    ],
)
def test_what_a_parameter_takes_is_taken(name: str, given: dict[str, Any]) -> None:
    editor = editors.get(name, **given)
    assert editor == type(editor)(**given)


def test_a_path_is_taken_as_such_or_as_text(tmp_path: Path) -> None:
    for path in (tmp_path / "none.pt", str(tmp_path / "none.pt")):
        with pytest.raises(UsageError, match="holds no query statistics"):
            editors.get("expected-attention", statistics=path)


def test_types_that_are_there_for_type_checkers_only_are_not_checked() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Exact(Editor):
        """Of a plug-in."""

        name: ClassVar[str] = "exact"

        threshold: Decimal | None = None
        shares: Mapping[int, float] | None = None

        def edit(self, x: EditInput) -> Edit:
            return Quantize().edit(x)

    check_parameters(Exact, {"threshold": 3, "shares": "none"})
    with pytest.raises(UsageError, match="exact has no parameter share: choose from geometry, threshold, shares"):
        check_parameters(Exact, {"share": {}})
