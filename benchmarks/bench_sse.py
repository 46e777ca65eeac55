"""Token ingest: what an event of a streamed completion costs the client, beside what others pay for it.

Modes: `bulk` (an event a write, the streams in turn, as fast as the engine can: a read brings what has piled up, and
the engine is the busier side), `burst` (a stream's whole answer in one write), `single` (slow enough that every read
brings one event), `paced` (ten tokens a second a stream). Every run is a process of its own on one core and starts
its requests inside the measured time; the fake engine has the other core. In `bulk` and `burst` it holds the answers
back until every stream is open (the wall time is without that wait). Every client ends with each token's id, text and
time. The first keys of the last line are those of `burst`, where the server's answers are made and sent in one write,
so that the client is what takes the time: `busy` and `server` are the shares of the wall time that the two computed.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import requests
from aiohttp.client_proto import ResponseHandler
from common import (
    LoopLag,
    Server,
    arguments,
    fake_engine,
    in_child,
    interleaved,
    median,
    raise_file_limit,
    ratio,
    report,
    span,
)

from lmcache_stream import CompletionsClient
from lmcache_stream.types import Completion, TokenEvent

PROMPT = list(range(300, 380))
PARAMS: dict[str, Any] = {"max_tokens": 4096, "temperature": 0}
BODY: dict[str, Any] = {**PARAMS, "model": "fake", "prompt": PROMPT, "stream": True, "return_token_ids": True}
PACE = 0.1
HOLD = 2e-3
"""Seconds a stream: twice what the slowest client takes to start one."""
REQUESTS, HTTPX, OPENAI, LINES = "requests, threads", "httpx lines", "openai", "aiohttp lines"
BATCHES, TOKENS = "ours, batches", "ours, by token"
BUFFERED, UVLOOP = "ours, buffered", "ours, uvloop"

Got = tuple[int, str, float]
Client = Callable[[str, int], Awaitable[tuple[int, int]]]
"""(address, streams) -> (tokens, reads that brought some; 0 where that is not known)"""


@dataclass(frozen=True)
class Case:
    """A client and what it can bear.

    Args:
        client: What runs.
        most_streams: How many streams a run may have.
        seconds: A generous guess of its time an event; `single` leaves it that much.
        uvloop: Whether it runs on uvloop.
        shorter: Its answers have that many times fewer tokens: slow clients would run for minutes.
    """

    client: Client
    most_streams: int = 1000
    seconds: float = 1.2e-4
    uvloop: bool = False
    shorter: int = 1


@dataclass(frozen=True)
class Run:
    """One run as it was measured; times in seconds, busy as a share of the wall time."""

    us_per_event: float
    wall: float
    busy: float
    server_busy: float
    events_per_read: float
    lag_p99_ms: float
    lag_max_ms: float


def _read(line: bytes | str) -> list[Got]:
    chunk = json.loads(line[6:])
    if not chunk["choices"]:
        return []
    choice = chunk["choices"][0]
    return [(choice["token_ids"][0], choice["text"], time.perf_counter())]


async def requests_in_threads(url: str, streams: int) -> tuple[int, int]:
    results: list[list[Got]] = [[] for _ in range(streams)]
    loop = asyncio.get_running_loop()
    done = [loop.create_future() for _ in range(streams)]

    def read(index: int) -> None:
        got = results[index]
        with requests.post(f"{url}/v1/completions", json=BODY, stream=True, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    got += _read(line)
        loop.call_soon_threadsafe(done[index].set_result, None)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(streams)]
    for thread in threads:
        thread.start()
    await asyncio.gather(*done)
    for thread in threads:
        thread.join()
    return sum(map(len, results)), 0


async def httpx_lines(url: str, streams: int) -> tuple[int, int]:
    httpx = importlib.import_module("httpx")

    async def read(client: Any) -> int:
        got: list[Got] = []
        async with client.stream("POST", f"{url}/v1/completions", json=BODY) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    got += _read(line)
        return len(got)

    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        return sum(await asyncio.gather(*(read(client) for _ in range(streams)))), 0


async def openai_client(url: str, streams: int) -> tuple[int, int]:
    openai = importlib.import_module("openai")

    async def read(client: Any) -> int:
        got: list[Got] = []
        chunks = await client.completions.create(
            model="fake", prompt=PROMPT, stream=True, **PARAMS, extra_body={"return_token_ids": True}
        )
        async for chunk in chunks:
            for choice in chunk.choices:
                got.append((choice.token_ids[0], choice.text, time.perf_counter()))  # noqa: PERF401
        return len(got)

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=None) as client:
        return sum(await asyncio.gather(*(read(client) for _ in range(streams)))), 0


async def aiohttp_lines(url: str, streams: int) -> tuple[int, int]:
    async def read(session: aiohttp.ClientSession) -> int:
        got: list[Got] = []
        async with session.post(f"{url}/v1/completions", json=BODY) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    got += _read(line)
        return len(got)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        return sum(await asyncio.gather(*(read(session) for _ in range(streams)))), 0


async def ours_batches(url: str, streams: int, *, buffered: bool = False) -> tuple[int, int]:
    async def read(client: CompletionsClient) -> tuple[int, int]:
        got: list[TokenEvent] = []
        reads = 0
        async for batch in client.batches(PROMPT, PARAMS):
            if not isinstance(batch, Completion):
                got += batch
                reads += 1
        return len(got), reads

    async with CompletionsClient(url, model="fake") as client:
        if buffered:
            _receive_into_one_buffer(client)
        of_streams = await asyncio.gather(*(read(client) for _ in range(streams)))
    return sum(tokens for tokens, _ in of_streams), sum(reads for _, reads in of_streams)


async def ours_by_token(url: str, streams: int) -> tuple[int, int]:
    async def read(client: CompletionsClient) -> int:
        got: list[TokenEvent] = []
        async for event in client(PROMPT, PARAMS):
            if isinstance(event, TokenEvent):
                got.append(event)  # noqa: PERF401
        return len(got)

    async with CompletionsClient(url, model="fake") as client:
        return sum(await asyncio.gather(*(read(client) for _ in range(streams)))), 0


class BufferedHandler(ResponseHandler, asyncio.BufferedProtocol):
    """aiohttp's protocol, received into one buffer that all connections share, in place of 256 KiB a read."""

    shared = memoryview(bytearray(2**18))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.shared

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self.shared[:nbytes]))


def _receive_into_one_buffer(client: CompletionsClient) -> None:
    connector: Any = client._http.open().connector
    connector._factory = partial(BufferedHandler, loop=asyncio.get_running_loop())


def cases() -> tuple[dict[str, Case], list[str]]:
    """The clients that can run here, and what is missing."""
    every = {
        REQUESTS: Case(requests_in_threads, most_streams=256, seconds=2e-4),
        HTTPX: Case(httpx_lines, most_streams=256, seconds=6e-4, shorter=4),
        OPENAI: Case(openai_client, most_streams=256, seconds=8e-4, shorter=4),
        LINES: Case(aiohttp_lines, seconds=1.5e-4),
        BATCHES: Case(ours_batches),
        TOKENS: Case(ours_by_token),
        BUFFERED: Case(partial(ours_batches, buffered=True)),
        UVLOOP: Case(ours_batches, uvloop=True),
    }
    needs = {HTTPX: "httpx", OPENAI: "openai", UVLOOP: "uvloop"}
    missing = {name: module for name, module in needs.items() if importlib.util.find_spec(module) is None}
    notes = [f"{name}: left out, {module} is not installed" for name, module in missing.items()]
    return {name: case for name, case in every.items() if name not in missing}, notes


def measure(case: Case, server: Server, streams: int, tokens: int, hold: float) -> Run:
    """One run in this process; it has to be the only one in it."""

    async def watched() -> tuple[tuple[int, int], LoopLag]:
        async with LoopLag() as lag:
            return await case.client(server.address, streams), lag

    served, cpu, begin = server.cpu_seconds(), time.process_time(), time.perf_counter()
    with asyncio.Runner(loop_factory=_loop_factory(case)) as runner:
        (received, reads), lag = runner.run(watched())
    wall, cpu, served = time.perf_counter() - begin, time.process_time() - cpu, server.cpu_seconds() - served
    if received != streams * tokens:
        raise AssertionError(f"{received} of {streams * tokens} tokens arrived")
    return Run(
        us_per_event=1e6 * cpu / received,
        wall=wall - hold,
        busy=cpu / wall if not hold else min(1.0, cpu / (wall - hold)),
        server_busy=served / (wall - hold),
        events_per_read=received / reads if reads else 0.0,
        lag_p99_ms=lag.p99_ms,
        lag_max_ms=lag.max_ms,
    )


def _loop_factory(case: Case) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if not case.uvloop:
        return None
    new_loop: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return new_loop


def warm_up(clients: dict[str, Case]) -> None:
    """Does once, before the runs are forked, what a client does once in its life."""
    with fake_engine(2) as server:
        for case in clients.values():
            with asyncio.Runner(loop_factory=_loop_factory(case)) as runner:
                runner.run(_run_once(case, server.address))


async def _run_once(case: Case, url: str) -> None:
    await case.client(url, 1)


def compare(clients: dict[str, Case], mode: str, streams: int, tokens: int, repeats: int) -> dict[str, list[Run]]:
    """Interleaved runs of every client that can bear so many streams."""
    with ExitStack() as stack:
        runs: dict[str, Callable[[], Run]] = {}
        for name, case in clients.items():
            if streams > case.most_streams:
                continue
            pace = {"bulk": 0.0, "burst": None, "single": max(2e-3, streams * case.seconds), "paced": PACE}[mode]
            hold = streams * HOLD if mode in ("bulk", "burst") else 0.0
            of_stream = max(1, tokens // case.shorter)
            server = stack.enter_context(fake_engine(of_stream, pace, hold))
            runs[name] = partial(in_child, measure, case, server, streams, of_stream, hold)
        return interleaved(runs, repeats)


def us(runs: list[Run]) -> list[float]:
    return [run.us_per_event for run in runs]


def row(mode: str, streams: int, name: str, of_all: dict[str, list[Run]]) -> dict[str, Any]:
    runs = of_all[name]
    peers = {"x requests": REQUESTS, "x aiohttp": LINES}
    reads = median([run.events_per_read for run in runs])
    return {
        "mode": mode,
        "streams": streams,
        "client": name,
        "us/event": median(us(runs)),
        "range": span(us(runs)),
        **{title: ratio(us(runs), us(of_all[peer])) if peer in of_all else None for title, peer in peers.items()},
        "ev/read": reads or None,
        "wall s": median([run.wall for run in runs]),
        "busy": median([run.busy for run in runs]),
        "server": median([run.server_busy for run in runs]),
        "lag p99 ms": median([run.lag_p99_ms for run in runs]),
        "lag max ms": median([run.lag_max_ms for run in runs]),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mode", action="append", choices=["bulk", "burst", "single", "paced"], help="default: all")
    parser.add_argument("--streams", action="append", type=int, help="default: 1, 32, 256, 1000")
    parser.add_argument(
        "--tokens", type=int, default=256, help="of a stream in bulk and burst; a quarter in single, an eighth in paced"
    )
    parser.add_argument("--client", action="append", help="default: every one that is installed")
    args = parser.parse_args()
    raise_file_limit()
    clients, notes = cases()
    if args.client:
        clients = {name: case for name, case in clients.items() if name in args.client}
    warm_up(clients)

    modes = args.mode or ["bulk", "burst", "single", "paced"]
    counts = args.streams or [1, 32, 256, 1000]
    results: dict[tuple[str, int], dict[str, list[Run]]] = {}
    for mode in modes:
        tokens = {"bulk": args.tokens, "burst": args.tokens, "single": args.tokens // 4, "paced": args.tokens // 8}[
            mode
        ]
        for streams in counts:
            if mode == "single" and streams > 256 and not args.streams:
                continue  # the paced mode has one event a read, too
            if mode == "paced" and streams < 1000 and not args.streams:
                continue
            chosen = clients
            if mode == "paced":
                chosen = {name: case for name, case in clients.items() if name not in (HTTPX, OPENAI, UVLOOP, BUFFERED)}
            results[mode, streams] = compare(chosen, mode, streams, tokens, args.repeats)

    rows = [row(mode, streams, name, of_all) for (mode, streams), of_all in results.items() for name in of_all]
    by_mode = {mode: summary(rows, mode) for mode in modes}
    headline = by_mode.get("burst") or next(iter(by_mode.values()), {})
    others = {mode: of_mode for mode, of_mode in by_mode.items() if of_mode is not headline}
    report(args, "Client CPU per token event, one token an event", rows, {**headline, **others}, notes)


def summary(rows: list[dict[str, Any]], mode: str) -> dict[str, Any]:
    """What one mode says about our client, by the number of streams."""

    def by_streams(client: str, column: str) -> dict[str, Any]:
        return {
            str(row["streams"]): row[column]
            for row in rows
            if row["mode"] == mode and row["client"] == client and row[column] is not None
        }

    def vs_ours(client: str) -> dict[str, float]:
        ours = by_streams(BATCHES, "us/event")
        return {n: us / ours[n] for n, us in by_streams(client, "us/event").items() if n in ours}

    return {
        "us_per_event": by_streams(BATCHES, "us/event"),
        "us_per_event_by_token": by_streams(TOKENS, "us/event"),
        "vs_requests": by_streams(BATCHES, "x requests"),
        "vs_aiohttp_lines_json": by_streams(BATCHES, "x aiohttp"),
        "buffered_vs_ours": vs_ours(BUFFERED),
        "uvloop_vs_ours": vs_ours(UVLOOP),
        "loop_lag_p99_ms": by_streams(BATCHES, "lag p99 ms"),
        "loop_lag_max_ms": by_streams(BATCHES, "lag max ms"),
        "client_busy": by_streams(BATCHES, "busy"),
        "server_busy": by_streams(BATCHES, "server"),
    }


if __name__ == "__main__":
    main()
