from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.completions.sse import CompletionDecoder, EventSplitter
from lmcache_stream.errors import EngineResponseError, EngineStreamError
from lmcache_stream.types import Completion, TokenEvent, Usage

from .recorded import RECORDED, STREAMS, Recorded

few = settings(max_examples=60, deadline=None)


def decode(*parts: bytes) -> tuple[list[TokenEvent], CompletionDecoder]:
    decoder = CompletionDecoder()
    return [token for part in parts for token in decoder.feed(part, 1.5)], decoder


def pairs(tokens: list[TokenEvent]) -> list[tuple[int | None, str]]:
    return [(token.token_id, token.text) for token in tokens]


def chunk(ids: list[int] | None, text: str | None = "", *, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": finish, **more}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def expected_completion(recorded: Recorded) -> Completion:
    last = recorded.choices[-1]
    usage = recorded.usage and Usage(prompt_tokens=recorded.usage[0], completion_tokens=recorded.usage[1])
    return Completion(finish_reason=last["finish_reason"], stop_reason=last["stop_reason"], usage=usage or None)


def outcome(*parts: bytes) -> tuple[list[tuple[int | None, str]], Completion | str]:
    tokens, decoder = decode(*parts)
    try:
        return pairs(tokens), decoder.finish()
    except (EngineStreamError, EngineResponseError) as error:
        return pairs(tokens), f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", STREAMS)
def test_recorded_stream(name: str) -> None:
    recorded = RECORDED[name]
    assert outcome(recorded.body) == (recorded.tokens, expected_completion(recorded))


@pytest.mark.parametrize("name", list(RECORDED))
def test_recorded_bytes_split_at_every_byte(name: str) -> None:
    body = RECORDED[name].body
    whole = outcome(body)
    for cut in range(len(body) + 1):
        assert outcome(body[:cut], body[cut:]) == whole, cut
    assert outcome(*(body[i : i + 1] for i in range(len(body)))) == whole


@pytest.mark.parametrize("name", [name for name in RECORDED if RECORDED[name].status == 200])
@few
@given(data=st.data())
def test_recorded_bytes_in_any_split_and_line_ending(name: str, data: st.DataObject) -> None:
    recorded = RECORDED[name]
    noise = st.sampled_from([b"", b": keep-alive\n\n", b":\r", b"event: message\nid: 7\r\nretry: 3\n"])
    endings = st.sampled_from([b"\n", b"\r", b"\r\n"])
    body = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    for event in recorded.body.removesuffix(b"\n\n").split(b"\n\n"):
        body += data.draw(noise) + event + data.draw(endings) * 2
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=20)))
    parts = [body[a:b] for a, b in pairwise([0, *cuts, len(body)])]
    assert outcome(*parts) == outcome(recorded.body)


@few
@given(
    events=st.lists(
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1), min_size=1
    ),
    ending=st.sampled_from([b"\n", b"\r", b"\r\n"]),
    size=st.integers(1, 9),
)
def test_splitter_gives_back_any_data(events: list[str], ending: bytes, size: int) -> None:
    stream = b"".join(b"data: " + event.encode() + ending * 2 for event in events)
    splitter = EventSplitter()
    got = [event for i in range(0, len(stream), size) for event in splitter.feed(stream[i : i + size])]
    assert got == [event.encode() for event in events]
    assert not splitter.pending


def line_by_line(stream: bytes) -> list[bytes]:
    """The data of a stream's events, read as the standard tells it: line after line."""
    events: list[bytes] = []
    data: list[bytes] = []
    for line in stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")[:-1]:
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
        if not line:
            events += [joined] if (joined := b"\n".join(data)) else []
            data = []
    return events


LINES = ["data: x", "data: y", "data:z", "data: ", "data", ": comment", "id: 1", "database: x", "data: data: ", "", ""]


@few
@given(data=st.data(), lines=st.lists(st.sampled_from(LINES), max_size=30))
def test_splitter_reads_any_lines_as_the_standard_does(lines: list[str], data: st.DataObject) -> None:
    ending = data.draw(st.sampled_from(["\n", "\r", "\r\n"]))
    stream = "".join(line + ending for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    splitter = EventSplitter()
    got = [event for a, b in pairwise([0, *cuts, len(stream)]) for event in splitter.feed(stream[a:b])]
    assert got == line_by_line(stream)


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data:x\n\n", [b"x"]),
        (b"data:  x\n\n", [b" x"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data\ndata: b\n\n", [b"\nb"]),
        (b"event: e\ndata: x\nid: 1\nretry: 2\nother: 3\n\n", [b"x"]),
        (b": comment\n\n: another\ndata: x\n\n", [b"x"]),
        (b"data\n\n", []),
        (b"data:\n\n", []),
        (b"data: \n\n", []),
        (b"data: x\n\ndata: \n\ndata: y\n\n", [b"x", b"y"]),
        (b"data: x\n\n\ndata: y\n\n", [b"x", b"y"]),
        (b"data: x\n\ndata: a\ndata: b\n\n", [b"x", b"a\nb"]),
        (b"data: x\n\n: ping\n\ndata: y\n\n", [b"x", b"y"]),
        (b"data: x\n\ndata:y\n\ndata: z\n\n", [b"x", b"y", b"z"]),
        (b"data: x\nid: 1\n\ndata: y\n\n", [b"x", b"y"]),
        (b"database: x\n\n", []),
        (b"\n\n\n\ndata: x\n\n\n\n\ndata: y\n\n", [b"x", b"y"]),
        (b"\xef\xbb\xbfdata: x\n\n", [b"x"]),
        (b"data: x\r\rdata: y\r\n\r\ndata: z\n\r", [b"x", b"y", b"z"]),
        (b"data: x\r\ndata: y\r\n\r\n", [b"x\ny"]),
        (b"data: x\n", []),
        ("data: a\u2028b\u0085c\x0bd\x0ce\x1cf\n\n".encode(), ["a\u2028b\u0085c\x0bd\x0ce\x1cf".encode()]),
    ],
)
def test_event_stream_format(stream: bytes, events: list[bytes]) -> None:
    assert EventSplitter().feed(stream) == events
    splitter = EventSplitter()
    assert [event for i in range(len(stream)) for event in splitter.feed(stream[i : i + 1])] == events


def test_event_is_complete_at_its_carriage_return() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: x\r\n\r") == [b"x"]
    assert splitter.feed(b"\n") == []
    assert splitter.feed(b"data: y\r\n\r\n") == [b"y"]


def test_event_size_is_bounded_however_it_arrives() -> None:
    body = b"data: " + b"x" * 100 + b"\n\n"
    assert EventSplitter(106).feed(body) == [b"x" * 100]
    for size in (1, 7, len(body)):
        splitter = EventSplitter(105)
        with pytest.raises(EngineStreamError, match="longer than 105 bytes"):
            list(map(splitter.feed, (body[i : i + size] for i in range(0, len(body), size))))


def test_every_id_of_an_event_counts_and_the_text_goes_on_the_last() -> None:
    tokens, decoder = decode(chunk([7, 8, 9], "abc") + chunk([10], "", finish="stop") + DONE)
    assert tokens == [
        TokenEvent(7, "", 1.5),
        TokenEvent(8, "", 1.5),
        TokenEvent(9, "abc", 1.5),
        TokenEvent(10, "", 1.5),
    ]
    assert decoder.finish() == Completion(finish_reason="stop")
    assert decoder.tokens == 4


def test_text_without_an_id() -> None:
    tokens, decoder = decode(chunk([7]), chunk([], "late"), chunk([], ""), chunk([], None, finish="length"), DONE)
    assert pairs(tokens) == [(7, ""), (None, "late")]
    assert decoder.finish().finish_reason == "length"


@pytest.mark.parametrize("name", ["no-ids", "token-id-strings"])
def test_ids_that_are_missing_are_an_error_that_says_what_to_ask_for(name: str) -> None:
    tokens, decoder = decode(RECORDED[name].body)
    assert tokens == []
    with pytest.raises(EngineStreamError, match=r"return_token_ids.*0\.10\.2.*proxies"):
        decoder.finish()


def test_one_token_without_text_and_without_ids_is_not_taken_for_none() -> None:
    with pytest.raises(EngineStreamError, match="return_token_ids"):
        decode(chunk(None, "", finish="stop"), DONE)[1].finish()


def test_last_event_may_leave_the_ids_out_when_it_has_nothing_to_say() -> None:
    tokens, decoder = decode(chunk([7], "a"), chunk(None, "", finish="stop"), DONE)
    assert pairs(tokens) == [(7, "a")]
    assert decoder.finish() == Completion(finish_reason="stop")


def test_error_inside_the_stream_keeps_the_tokens_before_it() -> None:
    body = chunk([7], "a") + RECORDED["bad-token"].body
    for parts in ([body], [body[i : i + 1] for i in range(len(body))]):
        tokens, decoder = decode(*parts)
        assert pairs(tokens) == [(7, "a")]
        with pytest.raises(EngineResponseError) as caught:
            decoder.finish()
        error = caught.value
        assert (error.status, error.type, error.param, error.code) == (200, "BadRequestError", None, 400)
        assert str(error) == error.message == "Token id 999999 is out of vocabulary"


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"error": "out of memory"}, "out of memory"),
        ({"object": "error", "message": "old shape", "type": "T", "code": 500}, "old shape"),
        ({"error": {"message": "m", "code": "too_long"}, "choices": []}, "m"),
        ({"detail": "gone"}, "gone"),
    ],
)
def test_shapes_of_errors_inside_the_stream(payload: Any, message: str) -> None:
    _, decoder = decode(b"data: " + json.dumps(payload).encode() + b"\n\n" + DONE)
    with pytest.raises(EngineResponseError) as caught:
        decoder.finish()
    assert (caught.value.message, caught.value.status) == (message, 200)


@pytest.mark.parametrize(
    "event",
    [
        b"not json",
        b"[1]",
        b"{}",
        b'{"choices": 3}',
        b'{"choices": [{"token_ids": ["7"]}]}',
        b'{"a": "\xff"}',
        b"[" * 5000,
    ],
)
def test_event_that_is_no_chunk(event: bytes) -> None:
    tokens, decoder = decode(chunk([7]) + b"data: " + event + b"\n\n" + chunk([8]) + DONE)
    assert pairs(tokens) == [(7, "")]
    with pytest.raises(EngineStreamError, match="no completion chunk"):
        decoder.finish()


@pytest.mark.parametrize(
    "choices",
    [[{"index": 1, "text": "a", "token_ids": [1]}], [{"index": 0, "text": "a", "token_ids": [1]}] * 2],
)
def test_several_choices_are_refused(choices: Any) -> None:
    _, decoder = decode(b"data: " + json.dumps({"choices": choices}).encode() + b"\n\n")
    with pytest.raises(EngineStreamError, match="several choices"):
        decoder.finish()


def test_stream_that_just_stops() -> None:
    body = RECORDED["usage"].body
    complete = [body.index(mark) for mark in (b'"finish_reason":"length"', b"data: [DONE]")]
    after_finish = body.index(b"\n\n", complete[0]) + 2
    for cut in range(len(body)):
        tokens, decoder = decode(body[:cut])
        if cut >= body.index(b"\n\n", complete[1]) + 2 or cut in (after_finish, complete[1]):
            assert decoder.finish().finish_reason == "length"
        else:
            with pytest.raises(EngineStreamError, match=f"broke off after {len(tokens)} tokens"):
                decoder.finish()


def test_done_without_anything_is_no_completion() -> None:
    with pytest.raises(EngineStreamError, match="without a token"):
        decode(DONE)[1].finish()


def test_done_after_tokens_without_a_finish_reason() -> None:
    assert decode(chunk([7]), DONE)[1].finish() == Completion()


@pytest.mark.parametrize("reason", ["abort", "error", "repetition"])
def test_every_finish_reason_is_delivered(reason: str) -> None:
    assert decode(chunk([7], finish=reason), DONE)[1].finish().finish_reason == reason


@pytest.mark.parametrize("stop_reason", [None, 42, "END"])
def test_stop_reason(stop_reason: int | str | None) -> None:
    completion = decode(chunk([7], finish="stop", stop_reason=stop_reason), DONE)[1].finish()
    assert completion.stop_reason == stop_reason


def test_cached_tokens() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}
    event = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    completion = decode(chunk([7], finish="length"), event, DONE)[1].finish()
    assert completion.usage == Usage(prompt_tokens=9, completion_tokens=1, cached_tokens=8)


def test_nothing_is_read_after_the_end() -> None:
    tokens, decoder = decode(chunk([7], finish="stop") + DONE + chunk([8]), chunk([9]))
    assert pairs(tokens) == [(7, "")]
    assert decoder.ended
