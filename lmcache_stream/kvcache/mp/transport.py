"""How requests reach an LMCache MP server, by the scheme of its URL: `tcp`, `ipc` (ZMQ), `grpc`, `grpc+unix`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import logging
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from lmcache_stream import observe
from lmcache_stream.errors import CacheConnectionError, CacheError, CacheProtocolError, CacheTimeout, UsageError
from lmcache_stream.kvcache.mp.wire import NOOP, Operation, decode_result, encode_request, is_large, split_reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_stream.kvcache.mp.wire import Buffer

__all__ = ["Transport", "ZmqTransport", "load_transport", "open_transport", "schemes", "silence"]

R = TypeVar("R")

PATIENCE = 1.0
"""Seconds of silence after which a `noop` asks whether the server is there at all."""

CONNECT_GRACE = 4.0
"""Seconds that a request waits for a connection that is not there."""

UNHEARD = 10.0
"""Seconds without any acknowledgement after which a connection is given up and made again. Otherwise the system tries
for a quarter of an hour, in longer and longer pauses, where the other machine is gone or a router has forgotten us."""

LONGEST_ANSWER = 1 << 24
"""Bytes of a frame on the control connection, which carries no chunks."""

LONGEST_DATA = (1 << 32) + (1 << 20)
"""Bytes of a frame on the others: MessagePack has no bytes longer than 4 GiB."""

LONGEST_REQUEST = (1 << 32) - (1 << 26)
"""Bytes of chunks in a request: 4 GiB, less what a pickle says beside them."""

logger: logging.Logger = logging.getLogger(__name__)


@runtime_checkable
class Transport(Protocol):
    """Calls the remote procedures of `wire.OPERATIONS`.

    A transport has `lanes` data connections, numbered from 1, and the control connection 0. The server works on data
    calls of one connection in order, one at a time, and on those of several connections side by side.

    `longest_request` is how many bytes of chunks one call takes.
    """

    url: str
    lanes: int
    longest_request: int

    async def call(self, operation: Operation[R], *args: Any, timeout: float, lane: int = 0) -> R:
        """Call `operation` with the arguments that the protocol gives it, the key or registration as a struct.

        A cancelled call is forgotten: its reply, whenever it comes, is dropped.

        Args:
            operation: What to call.
            *args: Its arguments.
            timeout: Seconds to wait for the reply.
            lane: The connection to use.

        Raises:
            CacheConnectionError: The server is not there, or went away.
            CacheTimeout: The server is there, but did not answer this.
            CacheError: The server answered with an error (where the transport carries errors).
            CacheProtocolError: The reply makes no sense.
        """
        ...

    async def close(self) -> None:
        """Close all connections; calls in flight fail. A second close does nothing."""
        ...


_Outcome: TypeAlias = "Buffer | CacheError | None"


class _Request:
    """A call in flight. `sent` is written by the I/O thread, the rest belongs to the loop."""

    __slots__ = ("alive", "frames", "future", "lane", "loop", "operation", "sent", "uid")

    def __init__(self, uid: int, operation: Operation[Any], frames: list[Buffer], lane: int) -> None:
        self.uid = uid
        self.operation = operation
        self.frames = frames
        self.lane = lane
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Buffer | None] = self.loop.create_future()
        self.sent = False
        self.alive = False


def silence(url: str, operation: Operation[Any], timeout: float, *, alive: bool) -> CacheError:
    """Say what it means that `operation` got no answer: `noop` was answered meanwhile (`alive`), or was not."""
    if alive:
        return CacheTimeout(
            f"the cache server at {url} is up but did not answer {operation.name} within {timeout:g} s: it refused "
            "the request (a failed request gets no answer; the server's log says why), or is slow"
        )
    return CacheConnectionError(
        f"the cache server at {url} is gone: neither {operation.name} nor noop was answered within {timeout:g} s"
    )


class _Lane:
    """One DEALER socket, its monitor, and what waits to be sent on it. Belongs to the I/O thread.

    Attributes:
        connected: Whether there is a connection, as its monitor tells it. For an instant after a connection has gone,
            its socket still takes messages, which nobody gets and nobody hears of any more.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], url: str, longest: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.maxmsgsize = longest
        self.socket.linger = 0
        self.socket.sndhwm = self.socket.rcvhwm = 0
        # What waits for a connection waits with us, where it is dropped when nobody wants it any more.
        self.socket.immediate = 1
        self.socket.reconnect_ivl = 50
        self.socket.reconnect_ivl_max = 1000
        self.socket.connect_timeout = int(1000 * CONNECT_GRACE)
        self.socket.tcp_maxrt = int(1000 * UNHEARD)
        self.socket.tcp_keepalive = 1
        self.socket.tcp_keepalive_idle = int(UNHEARD)
        self.socket.tcp_keepalive_intvl = int(UNHEARD / 3)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.monitor.linger = 0
        self.connected = False
        self.waiting: deque[_Request] = deque()
        self.socket.connect(url)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()


class ZmqTransport:
    """DEALER sockets owned by one I/O thread; futures by request id, completed in batches.

    Args:
        url: `tcp://host:port` or `ipc://path`.
        lanes: Data connections beside the control connection.
    """

    def __init__(self, url: str, *, lanes: int = 2) -> None:
        self.url = url
        self.lanes = lanes
        self.longest_request = LONGEST_REQUEST
        self.dropped: int = 0
        self._uids = itertools.count(1)
        self._pending: dict[int, _Request] = {}
        self._outbox: deque[_Request] = deque()
        self._closing = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            longest = [LONGEST_ANSWER, *[LONGEST_DATA] * lanes]
            self._connections = [_Lane(self._context, url, of_lane) for of_lane in longest]
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._wake.close()
            self._woken.close()
            raise UsageError(f"{url!r} is no address that ZMQ can connect to ({error}): use tcp://host:port") from error
        self._thread = threading.Thread(target=self._run, name=f"lmcache-stream {url}", daemon=True)
        self._thread.start()

    async def call(self, operation: Operation[R], *args: Any, timeout: float, lane: int = 0) -> R:
        """See `Transport.call`."""
        with observe.rpc(operation.name, self.url, logger):
            return await self._call(operation, args, timeout, lane)

    async def _call(self, operation: Operation[R], args: tuple[Any, ...], timeout: float, lane: int) -> R:
        if self._closing:
            raise CacheConnectionError(f"the connection to {self.url} is closed")
        deadline = asyncio.get_running_loop().time() + timeout
        uid = next(self._uids)
        if is_large(args):
            frames = await asyncio.to_thread(encode_request, uid, operation, args)
        else:
            frames = encode_request(uid, operation, args)
        request = _Request(uid, operation, frames, lane)
        timers = [
            request.loop.call_later(min(PATIENCE, timeout / 2), self._ask_if_alive, request),
            request.loop.call_at(min(request.loop.time() + CONNECT_GRACE, deadline), self._give_up_unsent, request),
            request.loop.call_at(deadline, self._give_up, request, timeout),
        ]
        self._submit(request)
        try:
            frame = await request.future
        finally:
            self._pending.pop(uid, None)
            for timer in timers:
                timer.cancel()
        return decode_result(operation, frame)

    async def close(self) -> None:
        """See `Transport.close`."""
        if self._closing:
            return
        self._closing = True
        self._nudge()
        loop = asyncio.get_running_loop()
        await asyncio.shield(loop.run_in_executor(None, self._thread.join))

    # On the loop.

    def _submit(self, request: _Request) -> None:
        self._pending[request.uid] = request
        self._outbox.append(request)
        self._nudge()

    def _nudge(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # a full pipe wakes the thread just as well
            self._wake.send(b"\0")

    def _ask_if_alive(self, silent: _Request) -> None:
        if silent.future.done() or not silent.sent or self._closing:
            return
        uid = next(self._uids)
        probe = _Request(uid, NOOP, encode_request(uid, NOOP, ()), 0)

        def answered(future: asyncio.Future[Buffer | None]) -> None:
            silent.alive = not future.cancelled() and future.exception() is None

        def forget(_: object) -> None:
            self._pending.pop(uid, None)
            probe.future.cancel()

        probe.future.add_done_callback(answered)
        silent.future.add_done_callback(forget)
        self._submit(probe)

    def _give_up_unsent(self, request: _Request) -> None:
        if not request.sent and not request.future.done():
            request.future.set_exception(
                CacheConnectionError(
                    f"no cache server answers at {self.url} (for {request.operation.name}): start it, or correct the "
                    "URL (its --port, 5555 by default)"
                )
            )

    def _give_up(self, request: _Request, timeout: float) -> None:
        if request.future.done():
            return
        error = silence(self.url, request.operation, timeout, alive=request.alive)
        request.future.set_exception(error)

    # On the I/O thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        for lane in self._connections:
            poller.register(lane.socket, zmq.POLLIN)
            poller.register(lane.monitor, zmq.POLLIN)
        try:
            while not self._closing:
                events: dict[Any, int] = dict(poller.poll())
                if self._woken.fileno() in events:
                    with contextlib.suppress(BlockingIOError):
                        while self._woken.recv(4096):
                            pass
                while self._outbox:
                    request = self._outbox.popleft()
                    self._connections[request.lane].waiting.append(request)
                done: list[tuple[_Request, _Outcome]] = []
                for number, lane in enumerate(self._connections):
                    if lane.socket in events:
                        self._receive(lane, done)
                    if lane.monitor in events:
                        self._note_connection(number, lane, done)
                    flags = zmq.POLLIN if self._send(lane) else zmq.POLLIN | zmq.POLLOUT
                    poller.modify(lane.socket, flags)
                self._complete(done)
        except Exception:
            logger.exception("the connection to %s failed", self.url)
            self._closing = True
        finally:
            for lane in self._connections:
                lane.close()
            self._context.term()
            self._wake.close()
            self._woken.close()
            gone = CacheConnectionError(f"the connection to {self.url} is closed")
            self._complete([(request, gone) for request in list(self._pending.values())])

    def _send(self, lane: _Lane) -> bool:
        """Send what waits; False where the socket is to tell when it takes more."""
        while lane.waiting:
            request = lane.waiting[0]
            if request.uid in self._pending:
                if not lane.connected:
                    return True
                try:
                    lane.socket.send_multipart(request.frames, zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    return False
                request.sent = True
            request.frames = []
            lane.waiting.popleft()
        return True

    def _receive(self, lane: _Lane, done: list[tuple[_Request, _Outcome]]) -> None:
        while True:
            try:
                frames = lane.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                uid, operation, result = split_reply([frame.buffer for frame in frames])
            except CacheProtocolError as error:
                # A peer that sends nonsense may send a lot of it.
                level = logging.WARNING if self.dropped == 0 else logging.DEBUG
                logger.log(level, "dropped from %s: %s", self.url, error)
                self.dropped += 1
                continue
            request = self._pending.pop(uid, None)
            if request is None:
                self.dropped += 1
            elif operation not in (request.operation.id, request.operation.name):
                asked = request.operation.name
                done.append((request, CacheProtocolError(f"the cache server answered {operation!r} to {asked}")))
            else:
                done.append((request, result))

    def _note_connection(self, number: int, lane: _Lane, done: list[tuple[_Request, _Outcome]]) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(lane.monitor, zmq.NOBLOCK)["event"]
                lane.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                if lane.connected:
                    continue
                # A server knows a connection that comes back as a new one: what it was to answer is lost.
                for request in list(self._pending.values()):
                    if request.lane == number and request.sent and self._pending.pop(request.uid, None) is not None:
                        words = f"the connection to {self.url} broke before {request.operation.name} was answered"
                        done.append((request, CacheConnectionError(words)))

    def _complete(self, done: list[tuple[_Request, _Outcome]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Request, _Outcome]]] = {}
        for request, outcome in done:
            by_loop.setdefault(request.loop, []).append((request, outcome))
        for loop, batch in by_loop.items():
            with contextlib.suppress(RuntimeError):  # a loop that is closed waits for nothing
                loop.call_soon_threadsafe(_resolve, batch)


def _resolve(batch: list[tuple[_Request, _Outcome]]) -> None:
    for request, outcome in batch:
        if request.future.done():
            continue
        if isinstance(outcome, CacheError):
            request.future.set_exception(outcome)
        else:
            request.future.set_result(outcome)


def _zmq(url: str, lanes: int) -> Transport:
    return ZmqTransport(url, lanes=lanes)


def _grpc(url: str, lanes: int) -> Transport:
    try:
        from lmcache_stream.kvcache.mp.grpc import GrpcTransport
    except ImportError as error:
        raise UsageError(f"{url!r} needs gRPC: pip install 'lmcache-stream[grpc]' ({error})") from error
    return GrpcTransport(url, lanes=lanes)


async def load_transport(url: str) -> None:
    """Import what the transport of `url` needs, beside the loop: gRPC takes a while."""
    if urlsplit(url).scheme in ("grpc", "grpc+unix"):
        with contextlib.suppress(ImportError):  # `open_transport` says what to install
            await asyncio.to_thread(importlib.import_module, "lmcache_stream.kvcache.mp.grpc")


schemes: dict[str, Callable[[str, int], Transport]] = {"tcp": _zmq, "ipc": _zmq, "grpc": _grpc, "grpc+unix": _grpc}
"""Opens a transport, by URL scheme: called with the URL and the number of data connections."""


def open_transport(url: str, *, lanes: int = 2) -> Transport:
    """Open the transport that the URL's scheme names. It connects in the background."""
    scheme = urlsplit(url).scheme
    if scheme not in schemes:
        raise UsageError(
            f"{url!r} names no transport: use one of {', '.join(f'{name}://' for name in sorted(schemes))}"
        )
    return schemes[scheme](url, lanes)
