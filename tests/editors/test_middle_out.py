"""The beginning and the end."""

from __future__ import annotations

import pytest

from lmcache_stream.editors import MiddleOut
from tests.editors.inputs import CHUNK, given


@pytest.mark.parametrize(("chunks", "keep", "first", "last"), [(8, 0.5, 2, 2), (8, 0.25, 1, 1), (7, 0.3, 1, 1)])
def test_drops_the_chunks_in_the_middle(chunks: int, keep: float, first: int, last: int) -> None:
    total = chunks * CHUNK
    edit = MiddleOut(keep=keep).edit(given(total))
    expected = [*range(first * CHUNK), *range(total - last * CHUNK, total)]
    assert edit.tokens == tuple(1000 + position for position in expected)


def test_an_odd_chunk_is_shared_by_both_ends() -> None:
    total = 6 * CHUNK
    edit = MiddleOut(keep=3 * CHUNK).edit(given(total))
    half = 3 * CHUNK // 2
    assert edit.tokens == tuple(1000 + position for position in [*range(half), *range(total - half, total)])
