from __future__ import annotations

import pytest

from lmcache_stream.bench.datasets import Sample
from lmcache_stream.bench.limits import check_room
from lmcache_stream.editors import Compose, Editor, KeyDiff, Merge, Quantize
from lmcache_stream.errors import UsageError

SAMPLES = [Sample([1] * 1000, 101)] * 2


@pytest.mark.parametrize(
    ("editor", "edit_every", "needed"),
    [
        (KeyDiff(keep=0.5), None, 2 * 1500),
        (Merge(editor=KeyDiff(keep=0.5)), None, 2 * 1500),
        (Merge(editor=KeyDiff(keep=100)), None, 2 * 1100),
        (Compose(editors=(Quantize(), KeyDiff(keep=100))), None, 2 * 1100),
        (Quantize(), None, 2 * 2000),
        (KeyDiff(keep=100), 50, 2 * (1100 + 2 * 150)),
        (Merge(editor=KeyDiff(keep=100)), 50, 2 * (1100 + 2 * 150)),
        (Quantize(), 50, 2 * (2000 + 2 * 1151)),
    ],
)
def test_the_room_that_edits_need(editor: Editor, edit_every: int | None, needed: int) -> None:
    check_room(needed, 1, SAMPLES, [editor], edit_every)
    with pytest.raises(UsageError, match="lower --num-prompts"):
        check_room(needed - 1, 1, SAMPLES, [editor], edit_every)
