"""Server-sent events of a completion: bytes in, tokens out. No I/O.

The framing follows the HTML standard's event stream format (section "Server-sent events"); the payload is the chunk of
vLLM's streamed `/v1/completions`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from lmcache_stream.completions.faults import excerpt, json_error
from lmcache_stream.errors import EngineError, EngineStreamError
from lmcache_stream.types import Completion, TokenEvent, Usage

__all__ = ["MAX_EVENT_BYTES", "CompletionDecoder", "EventSplitter"]

MAX_EVENT_BYTES = 64 * 2**20
"""Bound on one event; the first one repeats the prompt's ids, so a prompt of a million tokens takes 8 MiB."""

_BOM = b"\xef\xbb\xbf"
_NO_IDS = (
    "the engine sends text without token ids: they are asked for with return_token_ids, which vLLM knows since 0.10.2; "
    "older servers and some proxies drop that field of the request or token_ids of the answer"
)


class EventSplitter:
    """Cuts a byte stream into the data of its events.

    Lines end in CR, LF or CRLF and nowhere else. Comments and fields other than `data` are passed over, an event
    without data is none, and what follows the last blank line is no event yet.

    Args:
        max_event_bytes: Bound on one event.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._limit = max_event_bytes
        self._pending = bytearray()
        self._at_start = True
        self._after_cr = False

    @property
    def pending(self) -> bool:
        """Whether an event has begun that is not complete."""
        return any(not line.startswith(b":") for line in self._pending.split(b"\n") if line)

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that `data` completes, in order.

        Args:
            data: The next bytes of the stream, cut anywhere.

        Raises:
            EngineStreamError: An event is longer than `max_event_bytes`.
        """
        if self._at_start:
            data = bytes(self._pending) + data
            self._pending.clear()
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._pending += data
                return []
            self._at_start = False
            data = data.removeprefix(_BOM)
        if b"\r" in data or self._after_cr:
            data = self._with_lf_only(data)
        pending = self._pending
        if pending:
            seam = len(pending) - 1
            pending += data
            if pending.find(b"\n\n", seam) < 0:
                if len(pending) > self._limit:
                    raise self._too_long()
                return []
            data = bytes(pending)
            pending.clear()
        end = data.rfind(b"\n\n")
        if len(data) > self._limit and max(map(len, data.split(b"\n\n"))) > self._limit:
            raise self._too_long()
        if end < 0:
            pending += data
            return []
        pending += data[end + 2 :]
        return _events(data[:end])

    def _with_lf_only(self, data: bytes) -> bytes:
        if not data:
            return data
        if self._after_cr:
            data = data.removeprefix(b"\n")
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _too_long(self) -> EngineStreamError:
        return EngineStreamError(f"an event of the stream is longer than {self._limit} bytes")


def _events(data: bytes) -> list[bytes]:
    """The data of complete events, without the blank line behind the last one."""
    if data.startswith(b"data: "):
        events = data[6:].split(b"\n\ndata: ")
        if data.count(b"\n") == 2 * (len(events) - 1) and b"" not in events:  # one line each, and it is data
            return events
    return [lines for block in data.split(b"\n\n") if (lines := _data_lines(block)) != b""]


def _data_lines(block: bytes) -> bytes:
    lines = []
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines)


_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    text: str | None = None
    token_ids: list[_TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class CompletionDecoder:
    """Turns the bytes of one streamed completion into tokens and, at its end, into its `Completion`.

    What goes wrong in the stream is held until `finish`, so that the tokens before it are not lost.

    Args:
        max_event_bytes: Bound on one event.

    Attributes:
        ended: Whether nothing more is to be read: `[DONE]` came, or the stream is in error.
        tokens: Ids that came so far.
        error: What went wrong in the stream, which `finish` raises.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.ended: bool = False
        self.tokens: int = 0
        self._splitter = EventSplitter(max_event_bytes)
        self.error: EngineError | None = None
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._usage: _Usage | None = None

    def feed(self, data: bytes, now: float) -> list[TokenEvent]:
        """The tokens that `data` completes.

        An event's text goes on its last id; text that comes without an id is a `TokenEvent` without one.

        Args:
            data: The next bytes of the response's body, cut anywhere.
            now: When they arrived, in seconds of `time.perf_counter`.
        """
        tokens: list[TokenEvent] = []
        if self.ended:
            return tokens
        try:
            for event in self._splitter.feed(data):
                try:
                    chunk = _decode_chunk(event)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
                    if event.startswith(b"[DONE]"):
                        self.ended = True
                        break
                    raise _not_a_chunk(event) from exc
                if chunk.error or chunk.choices is None:
                    raise _not_a_chunk(event)
                if chunk.usage is not None:
                    self._usage = chunk.usage
                if chunk.choices:
                    self._read_choices(chunk.choices, now, tokens)
        except EngineError as exc:
            self.error = exc
            self.ended = True
        return tokens

    def _read_choices(self, choices: list[_Choice], now: float, tokens: list[TokenEvent]) -> None:
        choice = choices[0]
        if len(choices) > 1 or choice.index:
            raise EngineStreamError("the stream carries several choices: ask for one sequence (n=1, no best_of)")
        text = choice.text or ""
        ids = choice.token_ids
        if ids:
            if len(ids) > 1:
                tokens += [TokenEvent(token_id, "", now) for token_id in ids[:-1]]
            tokens.append(TokenEvent(ids[-1], text, now))
            self.tokens += len(ids)
        elif ids is None and (text or not self.tokens):
            raise EngineStreamError(_NO_IDS)
        elif text:
            tokens.append(TokenEvent(None, text, now))
        if choice.finish_reason is not None:
            self._finish_reason = choice.finish_reason
            self._stop_reason = choice.stop_reason

    def finish(self) -> Completion:
        """How the completion ended, once the body has ended.

        Raises:
            EngineResponseError: The engine reported an error inside the stream (status 200).
            EngineStreamError: The stream broke off before its end, or holds something that is no token stream.
        """
        if self.error is not None:
            raise self.error
        if not self.ended and (self._finish_reason is None or self._splitter.pending):
            raise EngineStreamError(f"the stream broke off after {self.tokens} tokens, before its end")
        if self._finish_reason is None and not self.tokens:
            raise EngineStreamError("the stream ended without a token and without a finish reason")
        usage = self._usage
        details = None if usage is None else usage.prompt_tokens_details
        return Completion(
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            usage=None
            if usage is None
            else Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=self.tokens if usage.completion_tokens is None else usage.completion_tokens,
                cached_tokens=None if details is None else details.cached_tokens,
            ),
        )


def _not_a_chunk(event: bytes) -> EngineError:
    return json_error(200, event) or EngineStreamError(
        f"an event of the stream is no completion chunk: {excerpt(event, 200)}"
    )
