from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.errors import UsageError
from lmcache_stream.kvcache.context import whole_chunks
from lmcache_stream.stream.state import GenerateCall, Request, StreamState, check_token_ids, fresh_salt
from lmcache_stream.types import Completion, TokenEvent, Usage

SALTS = st.text(st.characters(codec="utf-8", exclude_characters="@/\\\0"), max_size=128)


def state_of(tokens: list[int], *, suffix: list[int] | None = None) -> StreamState:
    return StreamState(tokens=tokens, salt="s", original_salt="s", suffix=suffix or [], expected=len(tokens))


@settings(deadline=None)
@given(original=SALTS)
def test_fresh_salts_differ_fit_and_hold_no_forbidden_character(original: str) -> None:
    salts = {fresh_salt(original) for _ in range(3)}
    assert len(salts) == 3
    for salt in salts:
        assert 0 < len(salt) <= 128
        assert not set("@/\\\0") & set(salt)
        assert salt != original


def test_fresh_salt_keeps_a_short_original_readable() -> None:
    assert fresh_salt("tenant-7").startswith("tenant-7~")


def test_salts_of_different_long_originals_differ_in_what_they_derive_from() -> None:
    common = "x" * 127
    stems = {fresh_salt(common + letter).split("~")[0] for letter in "ab"}
    assert len(stems) == 2


def test_nothing_moves_before_the_first_token() -> None:
    state = state_of([1, 2], suffix=[3])
    request = Request(state, [4], None)
    assert request.ids == [1, 2, 3, 4]
    assert (state.tokens, state.suffix) == ([1, 2], [3])
    request.record(TokenEvent(9, "x"))
    assert (state.tokens, state.suffix, state.expected) == ([1, 2, 3, 4, 9], [], 4)
    assert (state.generated, state.text_parts, state.decoded) == ([9], ["x"], 1)


def test_text_without_a_token_is_text_only() -> None:
    state = state_of([1])
    request = Request(state, [], None)
    request.record(TokenEvent(None, "tail"))
    assert (state.tokens, state.generated, state.text_parts, request.arrived) == ([1], [], ["tail"], 0)


@pytest.mark.parametrize(
    ("reason", "arrived", "max_tokens", "done"),
    [
        ("stop", 4, 4, True),
        ("repetition", 4, 4, True),
        ("length", 2, 4, False),
        ("abort", 2, 4, False),
        ("error", 2, 4, False),
        (None, 3, 4, True),
        (None, 4, 4, False),
        (None, 3, None, False),
    ],
)
def test_done(reason: str | None, arrived: int, max_tokens: int | None, done: bool) -> None:
    state = state_of([1])
    request = Request(state, [], max_tokens)
    for token in range(arrived):
        request.record(TokenEvent(token))
    if reason:
        request.record(Completion(reason))
    request.finish()
    assert state.done is done
    assert state.finish_reason == reason
    following = Request(state, [], None)
    following.record(TokenEvent(1))
    assert (state.done, state.finish_reason) == (False, None)
    assert request.aborted is (reason in ("abort", "error"))


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_abort_before_the_first_token_consumes_nothing(reason: str) -> None:
    state = state_of([1], suffix=[2])
    request = Request(state, [3], 5)
    request.record(Completion(reason))
    request.finish()
    assert (state.tokens, state.suffix, state.finish_reason) == ([1], [2], None)
    assert request.call.failure() == {"arrived": 0, "suffix_consumed": False}


def test_ids_of_other_integer_types_become_plain_ints() -> None:
    state = state_of([1])
    request = Request(state, [], None)
    request.record(TokenEvent(np.int64(5)))  # type: ignore[arg-type]
    assert state.generated == [5]
    assert type(state.generated[0]) is int


@pytest.mark.parametrize("bad", [TokenEvent("5"), TokenEvent(3.5), TokenEvent(-1), TokenEvent(1, b"x")])  # type: ignore[arg-type]
def test_events_that_cannot_be_change_nothing(bad: TokenEvent) -> None:
    state = state_of([1], suffix=[2])
    with pytest.raises(UsageError, match="TokenEvent"):
        Request(state, [], None).record(bad)
    assert (state.tokens, state.suffix, state.generated, state.text_parts) == ([1], [2], [], [])


def test_an_empty_answer_still_consumes_the_suffix() -> None:
    state = state_of([1], suffix=[2])
    Request(state, [3], 5).finish()
    assert (state.tokens, state.suffix, state.done) == ([1, 2, 3], [], True)


@pytest.mark.parametrize(
    ("sent", "stored", "cached", "short"),
    [(70, 64, 64, 0), (70, 64, 32, 32), (70, 64, None, 0), (64, 64, 63, 0), (64, 64, 32, 31), (64, 64, 0, 63)],
)
def test_shortfall(sent: int, stored: int, cached: int | None, short: int) -> None:
    state = state_of(list(range(sent)))
    state.stored, state.unverified = stored, True
    request = Request(state, [], None)
    request.send()
    request.record(Completion("length", usage=Usage(sent, 0, cached)))
    request.judge_edit()
    metrics = request.call.metrics()
    assert metrics is not None
    assert state.lost == metrics.edit_shortfall == short
    assert metrics.cached_tokens == cached
    assert state.unverified is (cached is None)


def test_a_completion_is_the_last_item() -> None:
    request = Request(state_of([1]), [], None)
    request.record(Completion("stop"))
    with pytest.raises(UsageError, match="last item"):
        request.record(TokenEvent(1))


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    suffix=st.lists(st.integers(10, 19), max_size=5),
    kept=st.lists(st.integers(20, 29), max_size=40),
    covered=st.integers(0, 40),
    chunk=st.integers(1, 9),
)
def test_an_edit_loses_nothing_and_doubles_nothing(
    tokens: list[int], suffix: list[int], kept: list[int], covered: int, chunk: int
) -> None:
    covered = min(covered, len(tokens))
    state = state_of(tokens, suffix=suffix)
    whole = whole_chunks(len(kept), chunk)
    state.replace_prefix(kept[:whole], kept[whole:], tokens[covered:], "new")
    assert state.tokens + state.suffix == kept + tokens[covered:] + suffix
    assert len(state.tokens) == state.stored == state.expected == whole
    assert (state.salt, state.original_salt, state.done) == ("new", "s", False)


def test_a_copy_is_independent() -> None:
    state = state_of([1], suffix=[2])
    copy = state.copy()
    request = Request(copy, [], None)
    request.record(TokenEvent(3, "x"))
    assert (state.tokens, state.suffix, state.generated, state.text_parts) == ([1], [2], [], [])


@pytest.mark.parametrize("bad", [None, 7, np.array(7)])
def test_what_is_no_sequence_is_refused(bad: object) -> None:
    with pytest.raises(UsageError, match="prompt must be a sequence of token ids"):
        check_token_ids(bad, "prompt")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [[-1], ["a"], [1.5], [None]])
def test_bad_token_ids_are_named(bad: list[object]) -> None:
    with pytest.raises(UsageError, match=r"prompt\[0\]"):
        check_token_ids(bad, "prompt")  # type: ignore[arg-type]


def test_text_is_no_token_ids() -> None:
    with pytest.raises(UsageError, match="tokenize"):
        check_token_ids("hello", "prompt")  # type: ignore[arg-type]


def test_a_call_counts_each_edit_and_only_what_its_first_request_sent() -> None:
    state, call = state_of(list(range(8))), GenerateCall()
    assert call.metrics() is None
    for salt, cached in (("", 6), ("~1", 5), ("~1", 5), ("~2", 2)):
        state.salt, state.stored, state.lost = salt, 6, 0
        request = Request(state, [], 1, call)
        request.send()
        request.record(TokenEvent(1, time=float(len(call.times))))
        request.record(Completion("length", usage=Usage(len(request.ids), 1, cached)))
        request.judge_edit()
    metrics = call.metrics()
    assert metrics is not None
    assert (metrics.input_tokens, metrics.cached_tokens, metrics.edit_shortfall) == (8, 6, 0 + 1 + 4)
    assert len(metrics.times) == 4
    assert call.failure() == {"arrived": 4, "suffix_consumed": True}
