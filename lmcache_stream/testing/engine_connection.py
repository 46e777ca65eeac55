"""One connection of a fake engine, by the rules of HTTP/1.1 or as far against them as a reply orders."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from lmcache_stream.testing.replies import End

if TYPE_CHECKING:
    from lmcache_stream.testing.fake_engine import FakeEngine

__all__ = ["Connection", "RecordedRequest"]

_REASONS = {status.value: status.phrase for status in HTTPStatus}


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


class Connection(asyncio.Protocol):
    """One client's connection: requests in, the replies that the engine chooses out, one after another."""

    def __init__(self, engine: FakeEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._received = bytearray()
        self._answering = False
        self._dropped = False
        self._timer: asyncio.Handle | None = None
        self._keep_alive: asyncio.Handle | None = None
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
        for timer in (self._timer, self._keep_alive):
            if timer is not None:
                timer.cancel()
        self._engine._connections.discard(self)
        if self._answering and not self._dropped:
            self._engine.disconnects += 1
        self._engine._changed()

    def abort(self) -> None:
        """Drop the connection."""
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
        self._write_head("\r\n".join([*head, "", ""]).encode("latin-1"))

    def _write_head(self, head: bytes) -> None:
        reply = self._reply
        if reply.header_pace is not None and len(head) > 1:
            self._transport.write(head[:1])
            self._timer = self._loop.call_later(reply.header_pace, self._write_head, head[1:])
        elif reply.pace is None and reply.write_size is None and not reply.ttft:
            self._transport.write(head + b"".join(map(self._frame, self._left)) + self._end_of_body())
            self._end()
        else:
            self._transport.write(head)
            self._next_at = self._loop.time() + reply.ttft
            if reply.ttft:
                self._keep_alive_on()
                self._timer = self._loop.call_at(self._next_at, self._first_written)
            else:
                self._go_on()

    def _first_written(self) -> None:
        self._keep_alive_off()
        self._write_next()

    def _keep_alive_on(self) -> None:
        if self._reply.keep_alive is not None:
            self._keep_alive = self._loop.call_later(self._reply.keep_alive, self._keep_alive_now)

    def _keep_alive_now(self) -> None:
        self._transport.write(self._frame(b": keep-alive\n\n"))
        self._keep_alive_on()

    def _keep_alive_off(self) -> None:
        if self._keep_alive is not None:
            self._keep_alive.cancel()

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
            self._keep_alive_on()
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
