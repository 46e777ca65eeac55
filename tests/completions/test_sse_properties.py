"""A stream's tokens come out as they went in, however it is framed and cut, or there is an error."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lmcache_stream.completions.sse import CompletionDecoder
from lmcache_stream.errors import EngineError
from lmcache_stream.types import Completion, Usage

EXAMPLES = settings(max_examples=100)
ENDINGS = [b"\n", b"\r", b"\r\n"]
NOISE = [b": keep-alive", b":", b"event: message", b"id: 7", b"retry: 3000", b"database: x", b"id", b": data: {}"]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@dataclass(frozen=True)
class Told:
    """What an engine tells.

    Args:
        payloads: The JSON values of its events.
        tokens: (id, text) as they are to be handed out, by event.
        completion: How it ends.
        done: Whether `[DONE]` comes last.
    """

    payloads: list[dict[str, Any]]
    tokens: list[list[tuple[int | None, str]]]
    completion: Completion
    done: bool

    @property
    def all_tokens(self) -> list[tuple[int | None, str]]:
        return [token for of_event in self.tokens for token in of_event]


@st.composite
def told(draw: st.DrawFn) -> Told:
    events = draw(st.lists(st.tuples(st.lists(st.integers(0, 200_000), max_size=4), TEXT), min_size=1, max_size=6))
    events[0] = (events[0][0] or [draw(st.integers(0, 9))], events[0][1])
    reason = draw(st.sampled_from(["stop", "length", "repetition"]))
    stop = draw(st.none() | st.integers(0, 9) | TEXT) if reason == "stop" else None
    payloads: list[dict[str, Any]] = []
    tokens: list[list[tuple[int | None, str]]] = []
    for number, (ids, text) in enumerate(events):
        last = number == len(events) - 1
        choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": reason if last else None}
        payloads.append({"id": "x", "choices": [choice | ({"stop_reason": stop} if last else {})]})
        ended_with = [(ids[-1] if ids else None, text)] if ids or text else []
        tokens.append([(token, "") for token in ids[:-1]] + ended_with)
    usage = None
    if draw(st.booleans()):
        cached = draw(st.none() | st.integers(0, 9))
        counted = {"prompt_tokens": 9, "completion_tokens": draw(st.integers(0, 50))}
        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
        payloads.append({"choices": [], "usage": counted | details})
        tokens.append([])
        usage = Usage(9, counted["completion_tokens"], cached)
    return Told(payloads, tokens, Completion(reason, stop, usage), draw(st.booleans()))


def written(rng: Random, payload: dict[str, Any]) -> list[bytes]:
    """The lines of one event: its JSON in one `data` line or several, with other lines between them."""
    text = json.dumps(payload, indent=rng.choice([None, 0, 1]), ensure_ascii=rng.random() < 0.5)
    lines = []
    for part in text.split("\n"):
        lines += rng.sample(NOISE, rng.randrange(2))
        lines.append(rng.choice([b"data: ", b"data:"]) + part.encode())
    return lines


def joined(rng: Random, lines: list[bytes]) -> bytes:
    """Lines with any ends, so that none of two ends reads as one CRLF."""
    body, before = bytearray(), b""
    for line in lines:
        ending = rng.choice(ENDINGS)
        if before == b"\r" and not line and ending == b"\n":
            ending = b"\r\n"
        body += line + ending
        before = ending
    return bytes(body)


def framed(rng: Random, stream: Told) -> list[bytes]:
    """The events as bytes, the mark and comments in front of them included."""
    events = []
    for payload in stream.payloads:
        comments = rng.sample(NOISE, rng.randrange(3))
        around = [b"", *comments, b""] if rng.random() < 0.5 else comments
        events.append(joined(rng, [*around, *written(rng, payload), b""]))
    # A CR before an LF of the next event would make one end of two.
    events = [event[:-1] + b"\r\n" if event.endswith(b"\r") else event for event in events]
    if stream.done:
        events.append(b"data: [DONE]" + rng.choice(ENDINGS) * 2)
    events[0] = rng.choice([b"", b"\xef\xbb\xbf"]) + events[0]
    return events


def read(rng: Random, body: bytes) -> tuple[list[tuple[int | None, str]], Completion | EngineError]:
    """What comes out of `body`, cut anywhere."""
    size = rng.choice([1, 2, 3, 7, 100])
    cuts = sorted(rng.choices(range(len(body) + 1), k=rng.randrange(12)))
    if rng.random() < 0.5:
        cuts = list(range(size, len(body), size))
    decoder = CompletionDecoder()
    tokens = [
        (token.token_id, token.text)
        for start, end in pairwise([0, *cuts, len(body)])
        for token in decoder.feed(body[start:end], 1.0)
    ]
    try:
        return tokens, decoder.finish()
    except EngineError as error:
        return tokens, error


SEEDS = st.integers(0, 2**32).map(Random)


@EXAMPLES
@given(told(), SEEDS)
def test_in_any_framing_and_cut_anywhere_tokens_come_out_as_they_went_in(stream: Told, rng: Random) -> None:
    tokens, outcome = read(rng, b"".join(framed(rng, stream)))
    assert tokens == stream.all_tokens
    assert outcome == stream.completion


@EXAMPLES
@given(told(), SEEDS)
def test_a_stream_cut_off_anywhere_gives_its_first_tokens_and_an_error(stream: Told, rng: Random) -> None:
    body = b"".join(framed(rng, stream))
    tokens, outcome = read(rng, body[: rng.randrange(len(body))])
    assert tokens == stream.all_tokens[: len(tokens)]
    if isinstance(outcome, Completion):
        assert tokens == stream.all_tokens
        assert outcome.finish_reason == stream.completion.finish_reason
    else:
        assert str(outcome)


GARBAGE = st.one_of(
    st.binary(min_size=1, max_size=30).map(lambda data: b"data: \xff" + data.replace(b"\n", b"").replace(b"\r", b"")),
    st.sampled_from(
        [
            b"data: <html>502 Bad Gateway</html>",
            b'data: {"choices": [{"token_ids": ["7"], "text": "x"}]}',
            b'data: {"choices": [{"token_ids": [7.5], "text": "x"}]}',
            b'data: {"choices": [{"token_ids": 7, "text": "x"}]}',
            b'data: {"choices": "none"}',
            b'data: {"choices": [{"index": 1, "text": "x", "token_ids": [7]}]}',
            b'data: {"choices": [{"text": "x"}]}',
            b"data: [7]",
            b"data: null",
            b"data: {}",
            b"data: " + b"[" * 3000,
            b'data: {"error": {"message": "out of memory", "code": 500}}',
            b'data: {"error": "out of memory"}',
            b'data: {"object": "error", "message": "gone", "code": 404}',
            b'data: {"detail": "gone"}',
        ]
    ),
)


@EXAMPLES
@given(told(), GARBAGE, SEEDS)
def test_garbage_or_an_error_between_events_is_an_error_behind_the_tokens_before_it(
    stream: Told, garbage: bytes, rng: Random
) -> None:
    events = framed(rng, stream)
    at = rng.randrange(len(stream.payloads) + 1)
    tokens, outcome = read(rng, b"".join([*events[:at], garbage + b"\n\n", *events[at:]]))
    assert tokens == [token for of_event in stream.tokens[:at] for token in of_event]
    assert isinstance(outcome, EngineError)
    assert str(outcome)


@EXAMPLES
@given(told(), SEEDS)
def test_garbage_inside_an_event_never_gives_a_wrong_id(stream: Told, rng: Random) -> None:
    """A broken event and what a proxy sends in its place, on one line."""
    at = rng.randrange(len(stream.payloads))
    lines = [b"data: " + json.dumps(payload).encode() for payload in stream.payloads]
    cut = rng.randrange(len(b"data: "), len(lines[at]))
    junk = rng.choice([b"\x00", b"\xff\xfe", b"<html>", b"HTTP/1.1 502 Bad Gateway", b"\x1f\x8b\x08"])
    rest = lines[at][cut:] if rng.random() < 0.5 else b""
    intact = b'"token_ids"' in lines[at]
    lines[at] = lines[at][:cut] + junk + rest
    assume(not rest or intact is (b'"token_ids"' in lines[at]))  # another name is another field
    tokens, outcome = read(rng, b"".join(line + b"\n\n" for line in lines))
    ids, told_ids = ([token for token, _ in listed if token is not None] for listed in (tokens, stream.all_tokens))
    assert ids == told_ids[: len(ids)]
    if isinstance(outcome, Completion):  # the junk lies inside a text, or in what is not read
        assert rest
        assert ids == told_ids
    else:
        assert len(ids) >= len([token for of_event in stream.tokens[:at] for token, _ in of_event if token is not None])


@EXAMPLES
@given(st.binary(max_size=200), SEEDS)
def test_any_bytes_give_an_error_of_ours_or_a_completion(body: bytes, rng: Random) -> None:
    tokens, outcome = read(rng, body)
    assert isinstance(outcome, Completion) or str(outcome)
    assert not tokens or b"token_ids" in body
