"""The kept corpus of the fuzzers passes, and their plain readings read what is well-known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from . import fuzz_sse, fuzz_wire
from .plainly import events_of, read_msgpack, read_sse

CORPUS = Path(__file__).parent / "corpus"
TARGETS: dict[str, Callable[[bytes], None]] = {"sse": fuzz_sse.check, "wire": fuzz_wire.check}
KEPT = [(name, path) for name in TARGETS for path in sorted((CORPUS / name).iterdir())]


@pytest.mark.parametrize(("name", "path"), KEPT, ids=[f"{name}-{path.name}" for name, path in KEPT])
def test_the_kept_corpus_passes(name: str, path: Path) -> None:
    TARGETS[name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_a_corpus_is_kept_and_small(name: str) -> None:
    files = list((CORPUS / name).iterdir())
    assert files
    assert sum(path.stat().st_size for path in files) < 100_000


@pytest.mark.parametrize("name", TARGETS)
@given(st.data())
def test_mutated_corpus_passes(name: str, data: st.DataObject) -> None:
    kept = bytearray(data.draw(st.sampled_from([path for of, path in KEPT if of == name])).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(kept)))
        kept[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    TARGETS[name](bytes(kept))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
@example("x" * 70_000)
@example([b"y" * 300] * 20)
def test_the_plain_reading_of_frames_reads_what_was_written(value: Any) -> None:
    assert read_msgpack(msgspec.msgpack.encode(value)) == value


def test_the_plain_reading_of_events() -> None:
    chunk = json.dumps({"choices": [{"text": "a", "token_ids": [1, 2], "finish_reason": "stop"}]}).encode()
    reading = read_sse(b"\xef\xbb\xbf: c\rdata:" + chunk + b"\r\n\r\ndata: [DONE]\n\ndata: {}\n\n")
    assert (reading.tokens, reading.ended, reading.failed) == ([(1, ""), (2, "a")], True, False)
    assert reading.finish_reason == "stop"
    assert events_of(b"data: a\ndata: b\n\ndata: c\n") == [b"a\nb"]
    assert read_sse(b"data: {}\n\n").failed
