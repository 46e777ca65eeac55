"""What a fake engine answers: replies to order, and their bytes."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from lmcache_stream.errors import UsageError

__all__ = ["End", "Reply", "blocks", "error_reply", "event_stream", "json_reply", "writes"]

_DEFAULT_MAX_TOKENS = 16
_json = msgspec.json.Encoder().encode


class End(enum.Enum):
    """What happens to the connection after the last bytes of a reply."""

    WHOLE = "the body ends as HTTP says"
    CUT = "the connection is closed, the body is incomplete"
    RESET = "the connection is reset, the body is incomplete"
    STALL = "nothing more comes, the connection stays open"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One scripted answer.

    Args:
        tokens: Ids to generate, or how many (0, 1, 2, ...), or a callable from the request's JSON to ids; None: as
            many as the request's `max_tokens`, 16 without one.
        text: Text of an id.
        tokens_per_event: Ids in one event.
        finish_reason: Of the last event; None leaves it out.
        stop_reason: Of the last event.
        ids: Whether events carry `token_ids`; None: if the request asks for them.
        usage: Whether an event with usage comes last; None: if the request asks for it.
        cached_tokens: Prompt tokens that usage calls cached; None: what the engine's cache held, if it has one.
        done: Whether `[DONE]` ends the body.
        comments: A keep-alive comment before each event.
        error_after: Ids after which an error comes inside the stream, followed by `[DONE]`.
        error: That error.
        token_ids: What an event says in place of its ids, called with them: any JSON value, None for none at all.
        inserted: Bytes that come between two events, by the ids that came before them: keep-alives, garbage, more.
        end_after: Ids after which `end` happens.
        end_inside: With `end_after`, where the event that would come next breaks off: half way through "event", or
            inside its first "character" of several bytes, which `text` must give it.
        body: Exact bytes of the body, in place of everything above.
        end_after_bytes: Bytes of the body after which `end` happens.
        end: What happens after the last bytes; `End.CUT`, `RESET` and `STALL` without `end_after` or
            `end_after_bytes` happen after the whole body, before HTTP's own end of it.
        status: HTTP status.
        content_type: Of the response; None: an event stream, or JSON for an error status; "" leaves it out.
        headers: More response headers.
        header_delay: Seconds before the response's first byte.
        header_pace: Seconds between two bytes of the response's head.
        ttft: Seconds between the head and the first event.
        keep_alive: Seconds between the keep-alive comments that come while `ttft` or a stall lasts; None for none.
        pace: Seconds between writes of one event each; 0 writes each in an own pass of the event loop; None writes
            all at once.
        write_size: Bytes of the body in one write, in place of one event; without `pace` as with 0.
        chunked: Chunked transfer encoding, on a connection that stays open; otherwise closing it ends the body.
        raw: Bytes to send in place of any HTTP response; the connection is closed after them.
    """

    tokens: int | Sequence[int] | Callable[[Mapping[str, Any]], Iterable[int]] | None = None
    text: Callable[[int], str] = " {}".format
    tokens_per_event: int = 1
    finish_reason: str | None = "length"
    stop_reason: int | str | None = None
    ids: bool | None = None
    usage: bool | None = None
    cached_tokens: int | None = None
    done: bool = True
    comments: bool = False
    error_after: int | None = None
    error: Mapping[str, Any] | str = field(
        default_factory=lambda: {
            "message": "the engine failed",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
    )
    token_ids: Callable[[list[int]], Any] | None = None
    inserted: Mapping[int, bytes] = field(default_factory=dict)
    end_after: int | None = None
    end_inside: Literal["event", "character"] | None = None
    body: bytes | None = None
    end_after_bytes: int | None = None
    end: End = End.WHOLE
    status: int = 200
    content_type: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    header_delay: float = 0.0
    header_pace: float | None = None
    ttft: float = 0.0
    keep_alive: float | None = None
    pace: float | None = None
    write_size: int | None = None
    chunked: bool = True
    raw: bytes | None = None


def json_reply(value: Any, status: int = 200) -> Reply:
    """A reply whose body is `value` as JSON."""
    return Reply(body=_json(value), status=status, content_type="application/json")


def error_reply(status: int, message: str, type_: str, param: str | None = None) -> Reply:
    """An error as vLLM words it."""
    return json_reply({"error": {"message": message, "type": type_, "param": param, "code": status}}, status)


def event_stream(reply: Reply, asked: Mapping[str, Any], model: str) -> list[bytes]:
    """The events of the reply's body to `asked`, up to where `end_after` wants its end."""
    head = {"id": "cmpl-fake", "object": "text_completion", "created": int(time.time()), "model": model}
    ids = _ids(reply, asked)
    with_ids = asked.get("return_token_ids", False) if reply.ids is None else reply.ids

    def chunk(start: int, stop: int) -> bytes:
        delta = ids[start : min(start + reply.tokens_per_event, stop)]
        last = start + len(delta) == len(ids)
        said = delta if reply.token_ids is None else reply.token_ids(delta)
        choice = {
            "index": 0,
            "text": "".join(map(reply.text, delta)),
            "logprobs": None,
            "finish_reason": reply.finish_reason if last else None,
            "stop_reason": reply.stop_reason if last else None,
            "prompt_token_ids": asked.get("prompt") if with_ids and start == 0 else None,
            "token_ids": said if with_ids else None,
        }
        return _event({**head, "choices": [choice]})

    limits = [limit for limit in (reply.error_after, reply.end_after) if limit is not None]
    shown = min([len(ids), *limits])
    events = []
    for start in range(0, shown, reply.tokens_per_event):
        events += [data for at, data in sorted(reply.inserted.items()) if start - reply.tokens_per_event < at <= start]
        events.append(chunk(start, shown))
    events += [data for at, data in sorted(reply.inserted.items()) if shown - reply.tokens_per_event < at <= shown]
    if reply.error_after is not None and (reply.end_after is None or reply.error_after <= reply.end_after):
        events.append(_event({"error": reply.error}))
    elif reply.end_after is not None:
        if reply.end_inside is not None:
            events.append(_first_part(chunk(shown, len(ids)), reply.end_inside))
        return events
    elif (asked.get("stream_options") or {}).get("include_usage") if reply.usage is None else reply.usage:
        usage: dict[str, Any] = {
            "prompt_tokens": len(asked["prompt"]),
            "total_tokens": len(asked["prompt"]) + len(ids),
            "completion_tokens": len(ids),
        }
        if reply.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": reply.cached_tokens}
        events.append(_event({**head, "choices": [], "usage": usage}))
    if reply.done:
        events.append(b"data: [DONE]\n\n")
    return events


def _first_part(event: bytes, inside: str) -> bytes:
    if inside == "event":
        return event[: len(event) // 2]
    for place, byte in enumerate(event):
        if byte >= 0xC0:
            return event[: place + 1]
    raise UsageError('end_inside="character" needs a character of several bytes: give such a text=...')


def _event(value: Any) -> bytes:
    return b"data: %b\n\n" % _json(value)


def _ids(reply: Reply, asked: Mapping[str, Any]) -> list[int]:
    tokens = reply.tokens
    if callable(tokens):
        return list(tokens(asked))
    if tokens is None:
        tokens = asked.get("max_tokens") or _DEFAULT_MAX_TOKENS
    return list(range(tokens)) if isinstance(tokens, int) else list(tokens)


def blocks(body: bytes) -> list[bytes]:
    """A given body as events, each with the blank line that ends it."""
    blocks = [block + b"\n\n" for block in body.split(b"\n\n")]
    blocks[-1] = blocks[-1][:-2]
    return blocks


def writes(events: list[bytes], reply: Reply) -> list[bytes]:
    """The body in the pieces that are written, cut where `end_after_bytes` wants its end."""
    if reply.end_after_bytes is not None:
        left, whole, events = reply.end_after_bytes, events, []
        for event in whole:
            events.append(event[:left])
            left -= len(events[-1])
    if reply.write_size is not None:
        body = b"".join(events)
        events = [body[start : start + reply.write_size] for start in range(0, len(body), reply.write_size)]
    elif reply.pace is None:
        events = [b"".join(events)]
    return [event for event in events if event]
