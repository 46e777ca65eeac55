"""A fake engine on a real socket: exact bytes, pace and faults to order."""

from __future__ import annotations

import asyncio
import enum
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from lmcache_stream import portal
from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["End", "FakeEngine", "RecordedRequest", "Reply"]

COMPLETIONS = "/v1/completions"
_DEFAULT_MAX_TOKENS = 16
_BOS = 256
_REASONS = {status.value: status.phrase for status in HTTPStatus}
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
        cached_tokens: Prompt tokens that usage calls cached; None leaves the field out.
        done: Whether `[DONE]` ends the body.
        comments: A keep-alive comment before each event.
        error_after: Ids after which an error comes inside the stream, followed by `[DONE]`.
        error: That error.
        end_after: Ids after which `end` happens.
        body: Exact bytes of the body, in place of everything above.
        end_after_bytes: Bytes of the body after which `end` happens.
        end: What happens after the last bytes; `End.CUT`, `RESET` and `STALL` without `end_after` or
            `end_after_bytes` happen after the whole body, before HTTP's own end of it.
        status: HTTP status.
        content_type: Of the response; None: an event stream, or JSON for an error status; "" leaves it out.
        headers: More response headers.
        header_delay: Seconds before the response's first byte.
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
    end_after: int | None = None
    body: bytes | None = None
    end_after_bytes: int | None = None
    end: End = End.WHOLE
    status: int = 200
    content_type: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    header_delay: float = 0.0
    pace: float | None = None
    write_size: int | None = None
    chunked: bool = True
    raw: bytes | None = None


@dataclass(frozen=True)
class RecordedRequest:
    """A request as it arrived.

    Args:
        method: Its method.
        path: Its path, with the query.
        headers: By name in lower case.
        body: Its exact body.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The decoded body; None without one."""
        return msgspec.json.decode(self.body) if self.body else None


class FakeEngine:
    """An engine that answers what it was told to.

    It serves `/v1/completions` (streamed), `/v1/models`, `/health`, `/tokenize` and `/detokenize` in vLLM's shapes, on
    127.0.0.1 and a free port. Use it with `async with`; a plain `with` runs it on the background loop of the
    synchronous classes. A reply is what `script` queued, then `default`.

    Args:
        model: Name of the model.
        default: The reply when nothing is queued for `/v1/completions`.
        root: Path of the model, as `/v1/models` tells it.
        max_model_len: As `/v1/models` tells it.
        port: Port to listen on; 0 for a free one.

    Attributes:
        requests: Every request that arrived, oldest first.
        accepted: Connections accepted so far.
        disconnects: Responses that the client left before their end.
    """

    def __init__(
        self,
        *,
        model: str = "fake",
        default: Reply | None = None,
        root: str | None = None,
        max_model_len: int = 4096,
        port: int = 0,
    ) -> None:
        self.model = model
        self.default = default or Reply()
        self.root = root or model
        self.max_model_len = max_model_len
        self.requests: list[RecordedRequest] = []
        self.accepted = 0
        self.disconnects = 0
        self._port = port
        self._script: dict[str, deque[Reply]] = {}
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    @property
    def base_url(self) -> str:
        """Address, without `/v1`."""
        if self._port == 0:
            raise UsageError("this FakeEngine does not run: enter it first")
        return f"http://127.0.0.1:{self._port}"

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._connections)

    @property
    def completions(self) -> list[RecordedRequest]:
        """The requests for completions, oldest first."""
        return [request for request in self.requests if request.path == COMPLETIONS]

    def script(self, *replies: Reply, path: str = COMPLETIONS) -> None:
        """Queues replies for the next requests of `path`, one each.

        Outside `/v1/completions`, a reply without a body is the ordinary answer with that reply's pace and faults.
        """
        self._script.setdefault(path, deque()).extend(replies)

    async def start(self) -> None:
        """Begins to listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self, loop), "127.0.0.1", self._port, backlog=4096)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stops listening and drops every connection."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._connections):
                connection.abort()
            await self._server.wait_closed()
            self._server = None
            await self.until(lambda: not self._connections)

    async def until(self, condition: Callable[[], bool], *, timeout: float = 5.0) -> None:
        """Waits until `condition()` holds; it is looked at whenever a request, a connection or its end comes.

        Raises:
            TimeoutError: It did not come to hold in `timeout` seconds.
        """
        if condition():
            return
        met: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (condition, met)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(timeout):
                await met
        finally:
            self._waiting.remove(entry)

    async def disconnected(self, count: int = 1, *, timeout: float = 5.0) -> None:
        """Waits until clients have left `count` responses before their end."""
        await self.until(lambda: self.disconnects >= count, timeout=timeout)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    def __enter__(self) -> Self:
        portal.run(self.start)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        portal.run(self.stop)

    def _changed(self) -> None:
        for condition, met in self._waiting:
            if not met.done() and condition():
                met.set_result(None)

    def _reply_to(self, request: RecordedRequest) -> tuple[Reply, Iterable[bytes]]:
        """The reply and its body in writes."""
        path = urlsplit(request.path).path
        queue = self._script.get(path)
        reply = queue.popleft() if queue else None
        if path != COMPLETIONS and (reply is None or (reply.body is None and reply.status == 200)):
            served = self._served(path, request)
            reply = served if reply is None else replace(reply, body=served.body, content_type=served.content_type)
        reply = reply or self.default
        if reply.body is not None or reply.status != 200:
            return reply, _writes(_blocks(reply.body or b""), reply)
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal, [refusal.body or b""]
        events = _events(reply, request.json, self.model)
        if reply.comments:
            events = [b": keep-alive\n\n" + event for event in events]
        return reply, _writes(events, reply)

    def _served(self, path: str, request: RecordedRequest) -> Reply:
        if path == "/health":
            return Reply(body=b"", content_type="")
        if path == "/v1/models":
            card = {
                "id": self.model,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm",
                "root": self.root,
                "parent": None,
                "max_model_len": self.max_model_len,
                "permission": [],
            }
            return _json_reply({"object": "list", "data": [card]})
        if path == "/tokenize":
            asked = request.json
            ids = [_BOS] * asked.get("add_special_tokens", True) + list(asked["prompt"].encode())
            return _json_reply(
                {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": None}
            )
        if path == "/detokenize":
            known = bytes(token for token in request.json["tokens"] if token < _BOS)
            return _json_reply({"prompt": known.decode("utf-8", "replace")})
        return _json_reply({"detail": "Not Found"}, status=404)

    def _refusal(self, request: RecordedRequest) -> Reply | None:
        """The errors of vLLM that a client can run into by itself."""
        try:
            asked = request.json
        except msgspec.DecodeError as exc:
            return _error_reply(400, f"Invalid JSON: {exc}", "BadRequestError")
        if not isinstance(asked, dict) or not asked.get("prompt"):
            return _error_reply(400, "prompt is missing", "BadRequestError", "prompt")
        if asked.get("model", self.model) != self.model:
            return _error_reply(404, f"The model `{asked['model']}` does not exist.", "NotFoundError", "model")
        if asked.get("cache_salt") == "":
            message = "Parameter 'cache_salt' must be a non-empty string if provided."
            return _error_reply(400, message, "BadRequestError", "cache_salt")
        if not asked.get("stream"):
            return _error_reply(400, "FakeEngine only streams: ask with stream=true", "BadRequestError", "stream")
        return None


def _json_reply(value: Any, status: int = 200) -> Reply:
    return Reply(body=_json(value), status=status, content_type="application/json")


def _error_reply(status: int, message: str, type_: str, param: str | None = None) -> Reply:
    return _json_reply({"error": {"message": message, "type": type_, "param": param, "code": status}}, status)


def _events(reply: Reply, asked: Mapping[str, Any], model: str) -> list[bytes]:
    """The events of the reply's body, up to where `end_after` wants its end."""
    head = {"id": "cmpl-fake", "object": "text_completion", "created": int(time.time()), "model": model}
    ids = _ids(reply, asked)
    with_ids = asked.get("return_token_ids", False) if reply.ids is None else reply.ids
    limits = [limit for limit in (reply.error_after, reply.end_after) if limit is not None]
    shown = ids[: min(limits)] if limits else ids
    events = []
    for start in range(0, len(shown), reply.tokens_per_event):
        delta = shown[start : start + reply.tokens_per_event]
        last = start + len(delta) == len(ids)
        choice = {
            "index": 0,
            "text": "".join(map(reply.text, delta)),
            "logprobs": None,
            "finish_reason": reply.finish_reason if last else None,
            "stop_reason": reply.stop_reason if last else None,
            "prompt_token_ids": asked.get("prompt") if with_ids and start == 0 else None,
            "token_ids": delta if with_ids else None,
        }
        events.append(_event({**head, "choices": [choice]}))
    if reply.error_after is not None and (reply.end_after is None or reply.error_after <= reply.end_after):
        events.append(_event({"error": reply.error}))
    elif reply.end_after is not None:
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


def _event(value: Any) -> bytes:
    return b"data: %b\n\n" % _json(value)


def _ids(reply: Reply, asked: Mapping[str, Any]) -> list[int]:
    tokens = reply.tokens
    if callable(tokens):
        return list(tokens(asked))
    if tokens is None:
        tokens = asked.get("max_tokens") or _DEFAULT_MAX_TOKENS
    return list(range(tokens)) if isinstance(tokens, int) else list(tokens)


def _blocks(body: bytes) -> list[bytes]:
    """A given body as events, each with the blank line that ends it."""
    blocks = [block + b"\n\n" for block in body.split(b"\n\n")]
    blocks[-1] = blocks[-1][:-2]
    return blocks


def _writes(events: list[bytes], reply: Reply) -> list[bytes]:
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


class _Connection(asyncio.Protocol):
    """One client's connection: requests in, the replies that the engine chooses out, one after another."""

    def __init__(self, engine: FakeEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._received = bytearray()
        self._answering = False
        self._dropped = False
        self._timer: asyncio.Handle | None = None
        self._reply = engine.default
        self._left: deque[bytes] = deque()
        self._frame: Callable[[bytes], bytes] = bytes
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._engine.accepted += 1
        self._engine._connections.add(self)
        self._engine._changed()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._engine._connections.discard(self)
        if self._answering and not self._dropped:
            self._engine.disconnects += 1
        self._engine._changed()

    def abort(self) -> None:
        self._dropped = True
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._answering:
            self._take_request()

    def _take_request(self) -> None:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        request_line, *lines = self._received[:end].decode("latin-1").split("\r\n")
        method, path, _ = request_line.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body_end = end + 4 + int(headers.get("content-length", 0))
        if len(self._received) < body_end:
            return
        request = RecordedRequest(method, path, headers, bytes(self._received[end + 4 : body_end]))
        del self._received[:body_end]
        self._answering = True
        self._engine.requests.append(request)
        self._reply, writes = self._engine._reply_to(request)
        self._left = deque(writes)
        self._timer = self._loop.call_later(self._reply.header_delay, self._begin) if self._reply.header_delay else None
        if self._timer is None:
            self._begin()
        self._engine._changed()

    def _begin(self) -> None:
        reply = self._reply
        if reply.raw is not None:
            self._transport.write(reply.raw)
            self._drop()
            return
        streams = reply.content_type is None and reply.status == 200
        kind = reply.content_type
        if kind is None:
            kind = "text/event-stream; charset=utf-8" if streams else "application/json"
        head = [f"HTTP/1.1 {reply.status} {_REASONS.get(reply.status, 'Unknown')}"]
        if kind:
            head.append(f"content-type: {kind}")
        head += [f"{name}: {value}" for name, value in reply.headers.items()]
        self._frame = bytes
        if not reply.chunked:
            head.append("connection: close")
        elif kind.startswith("text/event-stream"):
            head.append("transfer-encoding: chunked")
            self._frame = _http_chunk
        else:
            head.append(f"content-length: {len(reply.body or b'')}")
        first = "\r\n".join([*head, "", ""]).encode("latin-1")
        if reply.pace is None and reply.write_size is None:
            self._transport.write(first + b"".join(map(self._frame, self._left)) + self._end_of_body())
            self._end()
        else:
            self._transport.write(first)
            self._next_at = self._loop.time()
            self._go_on()

    def _go_on(self) -> None:
        if self._left and self._reply.pace:
            self._next_at += self._reply.pace
            self._timer = self._loop.call_at(self._next_at, self._write_next)
        else:
            self._timer = self._loop.call_soon(self._write_next)

    def _write_next(self) -> None:
        if self._left:
            self._transport.write(self._frame(self._left.popleft()))
            self._go_on()
        else:
            self._transport.write(self._end_of_body())
            self._end()

    def _end_of_body(self) -> bytes:
        return b"0\r\n\r\n" if self._reply.end is End.WHOLE and self._frame is _http_chunk else b""

    def _end(self) -> None:
        end = self._reply.end
        if end is End.STALL:
            return
        if end is End.RESET:
            linger = struct.pack("ii", 1, 0)
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if end is not End.WHOLE or not self._reply.chunked:
            self._drop()
            return
        self._answering = False
        self._take_request()

    def _drop(self) -> None:
        self._dropped = True
        if self._reply.end is End.RESET:
            self._transport.abort()
        else:
            self._transport.close()


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
