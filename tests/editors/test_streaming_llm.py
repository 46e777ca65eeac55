"""Attention sinks and a recent window."""

from __future__ import annotations

import pytest

from lmcache_stream.editors import StreamingLLM
from tests.editors.inputs import CHUNK, given


@pytest.mark.parametrize("sinks", [0, 4, 20])
@pytest.mark.parametrize("scope", ["shared", "layer", "head"])
def test_keeps_the_first_and_the_last(sinks: int, scope: str) -> None:
    total, count = 8 * CHUNK, 4 * CHUNK
    edit = StreamingLLM(sinks=sinks, scope=scope).edit(given(total))  # type: ignore[arg-type]  # pytest gives a str
    expected = [*range(sinks), *range(total - count + sinks, total)]
    assert edit.tokens == tuple(1000 + position for position in expected)
    assert edit.kept_positions is not None
    assert all(row == expected for row in edit.kept_positions.view(-1, count).tolist())


def test_four_sinks_as_in_the_paper() -> None:
    assert StreamingLLM().sinks == 4
