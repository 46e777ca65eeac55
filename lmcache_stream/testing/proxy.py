"""A TCP proxy that delays, throttles, holds back and cuts what goes through it, before real servers and fakes."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from lmcache_stream.errors import UsageError
from lmcache_stream.testing.entered import Entered, listen

__all__ = ["Direction", "TcpProxy"]

_READ = 1 << 16
_PIECES_A_SECOND = 50


@dataclass(eq=False)
class _Cut:
    after: int
    times: int
    reset: bool


class _CutError(Exception):
    """This connection is to be cut."""


class Direction:
    """What happens to bytes that go one way. Orders may be given at any time, from any thread.

    Attributes:
        delay: Seconds that bytes wait before they are passed on.
        rate: Bytes a second at most; None: no bound.
        passed: Bytes that went through, over all connections.
    """

    def __init__(self) -> None:
        self.delay: float = 0.0
        self.rate: float | None = None
        self.passed: int = 0
        self._cut: _Cut | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def hold(self) -> None:
        """Keep bytes back until `heal`; connections stay open."""
        self._on_loop(self._open.clear)

    def cut(self, after: int = 0, *, times: int = 1, reset: bool = False) -> None:
        """Cut connections, in the middle of a message or not.

        Args:
            after: Bytes that a connection still passes on, counted from now or from its begin.
            times: How many connections are cut.
            reset: Reset them instead of closing them.
        """
        self._cut = _Cut(after, times, reset)

    def heal(self) -> None:
        """Pass everything on again, at once."""
        self.delay, self.rate, self._cut = 0.0, None, None
        self._on_loop(self._open.set)

    def _on_loop(self, change: Callable[[], object]) -> None:
        if self._loop is None or self._loop.is_closed():
            change()
        else:
            self._loop.call_soon_threadsafe(change)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> None:
        cut, left = None, 0
        while data := await reader.read(_READ):
            if self.delay:
                await asyncio.sleep(self.delay)
            while data:
                await self._open.wait()
                if self._cut is not cut:
                    cut = self._cut
                    left = cut.after if cut is not None else 0
                size = len(data) if self.rate is None else max(1, int(self.rate / _PIECES_A_SECOND))
                piece = data[:size] if cut is None else data[: min(size, left)]
                writer.write(piece)
                await writer.drain()
                data = data[len(piece) :]
                self.passed += len(piece)
                if cut is not None:
                    left -= len(piece)
                    if data and left <= 0:
                        self._cut_now(cut, link)
                if self.rate is not None:
                    await asyncio.sleep(len(piece) / self.rate)
        writer.write_eof()

    def _cut_now(self, cut: _Cut, link: _Link) -> None:
        cut.times -= 1
        if cut.times <= 0 and self._cut is cut:
            self._cut = None
        link.reset = cut.reset
        raise _CutError


@dataclass(eq=False)
class _Link:
    """One connection: its sockets, and whether they are reset when it ends."""

    writers: list[asyncio.StreamWriter]
    task: asyncio.Task[None] | None = None
    reset: bool = False


class TcpProxy(Entered):
    """A proxy on 127.0.0.1 and a free port. Use it with `async with`, or with a plain `with`.

    Args:
        target: Where connections go on to: a URL with a host and a port, such as `http://127.0.0.1:8000` or
            `tcp://127.0.0.1:5555`.

    Attributes:
        up: What happens to bytes on their way to the target.
        down: What happens to bytes on their way back.
        refusing: Whether new connections are reset as they come.
        accepted: Connections accepted so far.

    Raises:
        UsageError: `target` names no host and port.
    """

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        if not parts.hostname or not parts.port:
            raise UsageError(
                f"TcpProxy needs a host and a port to go on to, as in tcp://127.0.0.1:5555, not {target!r}"
            )
        self.up: Direction = Direction()
        self.down: Direction = Direction()
        self.refusing: bool = False
        self.accepted: int = 0
        self._scheme, self._host, self._target_port = parts.scheme, parts.hostname, parts.port
        self._server: asyncio.Server | None = None
        self._port = 0
        self._links: set[_Link] = set()

    @property
    def url(self) -> str:
        """Where to connect to, with the target's scheme."""
        if self._port == 0:
            raise UsageError("this TcpProxy does not run: enter it first")
        return f"{self._scheme}://127.0.0.1:{self._port}"

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._links)

    def heal(self) -> None:
        """Accept connections and pass everything on again, both ways, at once."""
        self.refusing = False
        self.up.heal()
        self.down.heal()

    async def drop(self, *, reset: bool = False) -> None:
        """Cut every connection that is open now, and wait until that is done.

        Args:
            reset: Reset them instead of closing them.
        """
        loop = self.up._loop
        if loop is not None and loop is not asyncio.get_running_loop():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.drop(reset=reset), loop))
            return
        tasks = []
        for link in self._links:
            link.reset = reset
            if link.task is not None:
                link.task.cancel()
                tasks.append(link.task)
        if tasks:
            await asyncio.wait(tasks)

    async def start(self) -> None:
        """Begins to listen."""
        self.up._loop = self.down._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._accepted, "127.0.0.1", self._port, start_serving=False)
        self._port = await listen(server)
        self._server = server

    async def stop(self) -> None:
        """Stops listening and cuts every connection. A second stop does nothing."""
        if self._server is not None:
            self._server.close()
            await self.drop()
            self._server = None
            self.up._loop = self.down._loop = None

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        link = _Link([writer])
        self._links.add(link)
        link.task = asyncio.create_task(self._serve(link, reader, writer))

    async def _serve(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.refusing:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection(self._host, self._target_port)
            link.writers.append(far_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self.up._pass_on(reader, far_writer, link))
                both.create_task(self.down._pass_on(far_reader, writer, link))
        except* (OSError, _CutError):
            link.reset = link.reset or len(link.writers) == 1
        finally:
            self._links.discard(link)
            for one in link.writers:
                _close(one, reset=link.reset)


def _close(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    if not reset:
        writer.close()
        return
    opened = writer.get_extra_info("socket")
    if opened is not None and opened.fileno() >= 0:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
