"""Round trips of `noop` to a cache server over ZMQ: our transport beside a plain `zmq.asyncio` client.

`FakeCacheServer` answers, in a process of its own. Beside them stands a bare blocking socket without asyncio: what the
server and the wire take by themselves. Sequential is one call after another; outstanding keeps that many in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import zmq
import zmq.asyncio
from common import arguments, forked_server, in_child, interleaved, median, ratio, report

from lmcache_stream.kvcache.mp.transport import ZmqTransport
from lmcache_stream.kvcache.mp.wire import NOOP, decode_result, encode_request, split_reply
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

Call = Callable[[], Awaitable[object]]
OUTSTANDING = 256


class PlainClient:
    """The usual asyncio client: one DEALER socket of `zmq.asyncio`, a receiving task, futures by uid."""

    def __init__(self, url: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(url)
        self._pending: dict[int, asyncio.Future[object]] = {}
        self._uids = itertools.count()
        self._task = asyncio.create_task(self._receive())

    async def noop(self) -> object:
        uid = next(self._uids)
        future = self._pending[uid] = asyncio.get_running_loop().create_future()
        await self._socket.send_multipart(encode_request(uid, NOOP, ()))
        return await future

    async def _receive(self) -> None:
        while True:
            frames: list[bytes] = await self._socket.recv_multipart()
            uid, _, result = split_reply(frames)
            self._pending.pop(uid).set_result(decode_result(NOOP, result))

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)


def serve(ready: Callable[[str], None]) -> None:
    with FakeCacheServer(shared_memory=False) as server:
        ready(server.url)
        signal.pause()


async def one_by_one(call: Call, count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        assert await call() == "OK"
    return (time.perf_counter() - started) / count


async def all_at_once(call: Call, count: int) -> float:
    left = itertools.count()

    async def caller() -> None:
        while next(left) < count:
            assert await call() == "OK"

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(OUTSTANDING)))
    return (time.perf_counter() - started) / count


async def with_transport(url: str, run: Callable[[Call, int], Awaitable[float]], count: int) -> float:
    transport = ZmqTransport(url)
    try:
        await one_by_one(lambda: transport.call(NOOP, timeout=10), 20)
        return await run(lambda: transport.call(NOOP, timeout=10), count)
    finally:
        await transport.close()


async def with_plain_client(url: str, run: Callable[[Call, int], Awaitable[float]], count: int) -> float:
    client = PlainClient(url)
    try:
        await one_by_one(client.noop, 20)
        return await run(client.noop, count)
    finally:
        await client.close()


def bare(url: str, count: int, outstanding: int) -> float:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(url)
        frames = encode_request(1, NOOP, ())
        socket.send_multipart(frames)
        socket.recv_multipart()
        started = time.perf_counter()
        for _ in range(min(outstanding, count)):
            socket.send_multipart(frames)
        for sent in range(outstanding, count + outstanding):
            socket.recv_multipart()
            if sent < count:
                socket.send_multipart(frames)
        return (time.perf_counter() - started) / count


def ours(url: str, run: Callable[[Call, int], Awaitable[float]], count: int) -> float:
    return asyncio.run(with_transport(url, run, count))


def plain(url: str, run: Callable[[Call, int], Awaitable[float]], count: int) -> float:
    return asyncio.run(with_plain_client(url, run, count))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="one after another; ten times as many outstanding")
    options = parser.parse_args()
    few, many = options.calls, 10 * options.calls

    busy: dict[str, list[float]] = {}

    with forked_server(serve) as server:
        url = server.address

        def measured(name: str, *call: Any) -> float:
            served, begin = server.cpu_seconds(), time.perf_counter()
            seconds: float = in_child(*call)
            busy.setdefault(name, []).append((server.cpu_seconds() - served) / (time.perf_counter() - begin))
            return seconds

        calls: dict[str, tuple[Any, ...]] = {
            "ours, sequential": (ours, url, one_by_one, few),
            "zmq.asyncio, sequential": (plain, url, one_by_one, few),
            "bare socket, sequential": (bare, url, few, 1),
            "ours, outstanding": (ours, url, all_at_once, many),
            "zmq.asyncio, outstanding": (plain, url, all_at_once, many),
            "bare socket, outstanding": (bare, url, many, OUTSTANDING),
        }
        taken = interleaved({name: partial(measured, name, *call) for name, call in calls.items()}, options.repeats)

    rows = [
        {
            "client": name,
            "us one by one": median(taken[f"{name}, sequential"]) * 1e6,
            f"a second with {OUTSTANDING} outstanding": 1 / median(taken[f"{name}, outstanding"]),
            "server busy": median(busy[f"{name}, outstanding"]),
        }
        for name in ("ours", "zmq.asyncio", "bare socket")
    ]
    summary = {
        "us_sequential": median(taken["ours, sequential"]) * 1e6,
        "calls_per_s_outstanding": 1 / median(taken["ours, outstanding"]),
        "sequential_vs_zmq_asyncio": ratio(taken["ours, sequential"], taken["zmq.asyncio, sequential"]),
        "rate_vs_zmq_asyncio": ratio(taken["zmq.asyncio, outstanding"], taken["ours, outstanding"]),
    }
    summary["rate_vs_bare_socket"] = ratio(taken["bare socket, outstanding"], taken["ours, outstanding"])
    notes = [
        "The client has one core, the server another. The bare socket shows what server and wire take by themselves; "
        "server busy: the share of its core that the server used with many outstanding."
    ]
    report(options, "Round trips of noop over ZMQ", rows, summary, notes)


if __name__ == "__main__":
    main()
