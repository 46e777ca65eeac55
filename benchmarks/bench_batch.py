"""A batch that decodes: what a token and a stream cost as streams grow, beside a thread a stream.

Modes: `full` (a stream's whole answer at once), `together` (an event a write, the streams in turn, once all are open;
the wall time is without that wait) and `paced` (ten tokens a second a stream). Every run is a process of its own on
one core, makes its streams and starts its requests inside the measured time; the fake engine has the other core. The
threads may use both. Few streams run again, with new ones, until they have made as many tokens as many.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bench_sse import HOLD, requests_in_threads
from common import (
    CLIENT_CORE,
    LoopLag,
    Server,
    arguments,
    fake_engine,
    in_child,
    interleaved,
    median,
    peak_rss_bytes,
    raise_file_limit,
    ratio,
    report,
    rss_bytes,
    span,
)

from lmcache_stream import AsyncBatchedStream, AsyncLMCacheStream, CompletionsClient, KVGeometry
from lmcache_stream.kvcache import AsyncKVCacheContext, aconnect
from lmcache_stream.kvcache.memory import EmbeddedCache

PROMPT = list(range(300, 380))
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)
BATCH, THREADS = "AsyncBatchedStream", "requests, threads"
PACE = 0.1

Work = Callable[[str, int, int], Any]


@dataclass
class Run:
    """One run as it was measured; memory in bytes over what the process had before."""

    us_per_token: float
    wall: float
    busy: float
    server_busy: float
    idle_bytes: float
    active_bytes: float
    threads: int
    lag_p99_ms: float
    lag_max_ms: float


@asynccontextmanager
async def embedded_cache() -> AsyncIterator[AsyncKVCacheContext]:
    cache = EmbeddedCache.open("memory://bench?chunk_size=32")
    cache.register_model("fake", GEOMETRY)
    try:
        async with aconnect("memory://bench", model_name="fake") as ctx:
            yield ctx
    finally:
        cache.unregister_model("fake")
        cache.close()


async def decode_batch(url: str, streams: int, tokens: int, rounds: int = 1) -> tuple[int, float]:
    """`rounds` batches in turn: the tokens that arrived, and the resident bytes that the idle streams of one took."""
    arrived = 0
    idle = 0.0
    async with embedded_cache() as ctx, CompletionsClient(url, model="fake") as client:
        for _ in range(rounds):
            before = rss_bytes()
            batch = AsyncBatchedStream(progress=False)
            batch.extend(AsyncLMCacheStream(ctx, client, PROMPT) for _ in range(streams))
            idle = max(idle, rss_bytes() - before)
            await batch.decode({"max_tokens": tokens, "temperature": 0})
            arrived += sum(len(stream.output_tokens()) for stream in batch)
    return arrived, idle


async def decode_in_threads(url: str, streams: int, tokens: int, rounds: int = 1) -> tuple[int, float]:
    arrived = 0
    for _ in range(rounds):
        got, _ = await requests_in_threads(url, streams)
        arrived += got
    return arrived, 0.0


async def _most_threads(found: list[int]) -> None:
    while True:
        found.append(threading.active_count())
        await asyncio.sleep(0.05)


def measure(work: Any, server: Server, streams: int, tokens: int, rounds: int, hold: float = 0.0) -> Run:
    """One run in this process; it has to be the only one in it."""
    threads: list[int] = []

    async def watched() -> tuple[int, float, LoopLag]:
        watch = asyncio.create_task(_most_threads(threads))
        async with LoopLag() as lag:
            arrived, idle = await work(server.address, streams, tokens, rounds)
        watch.cancel()
        return arrived, idle, lag

    memory = rss_bytes()
    served, cpu, begin = server.cpu_seconds(), time.process_time(), time.perf_counter()
    arrived, idle, lag = asyncio.run(watched())
    wall, cpu, served = time.perf_counter() - begin, time.process_time() - cpu, server.cpu_seconds() - served
    if arrived != streams * tokens * rounds:
        raise AssertionError(f"{arrived} of {streams * tokens * rounds} tokens arrived")
    return Run(
        us_per_token=1e6 * cpu / arrived,
        wall=wall / rounds - hold,
        busy=cpu / wall,
        server_busy=served / wall,
        idle_bytes=idle,
        active_bytes=peak_rss_bytes() - memory,
        threads=max(threads),
        lag_p99_ms=lag.p99_ms,
        lag_max_ms=lag.max_ms,
    )


def warm_up() -> None:
    """Does once, before the runs are forked, what a process does once in its life."""
    with fake_engine(2) as server:
        asyncio.run(_twice(server.address))


async def _twice(url: str) -> None:
    await decode_batch(url, 1, 2)
    await decode_in_threads(url, 1, 2)


def row(mode: str, streams: int, client: str, runs: list[Run]) -> dict[str, Any]:
    many = streams >= 1000
    return {
        "mode": mode,
        "streams": streams,
        "client": client,
        "us/token": median([run.us_per_token for run in runs]),
        "range": span([run.us_per_token for run in runs]),
        "wall s": median([run.wall for run in runs]),
        "busy": median([run.busy for run in runs]),
        "server": median([run.server_busy for run in runs]),
        "peak +MiB": median([run.active_bytes for run in runs]) / 2**20,
        "KiB/stream": median([run.active_bytes for run in runs]) / 1024 / streams if many else None,
        "KiB/idle": median([run.idle_bytes for run in runs]) / 1024 / streams if many and client == BATCH else None,
        "threads": int(median([run.threads for run in runs])),
        "lag p99 ms": median([run.lag_p99_ms for run in runs]),
        "lag max ms": median([run.lag_max_ms for run in runs]),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--streams", action="append", type=int, help="default: 10, 100, 1000, 3000")
    parser.add_argument("--tokens", type=int, default=64, help="of a stream")
    parser.add_argument("--paced-tokens", type=int, default=32, help="of a stream in the paced mode; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=1000, help="streams of the run with threads; 0 leaves it out")
    args = parser.parse_args()
    limit = raise_file_limit()
    counts = sorted(set(args.streams or [10, 100, 1000, 3000]))
    warm_up()

    results: dict[tuple[str, int, str], list[Run]] = {}
    with ExitStack() as stack:
        cases: dict[tuple[str, int, str], Callable[[], Run]] = {}
        full = stack.enter_context(fake_engine(args.tokens))
        for streams in counts:
            rounds = max(1, 1000 // streams)
            cases["full", streams, BATCH] = partial(
                in_child, measure, decode_batch, full, streams, args.tokens, rounds, core=CLIENT_CORE
            )
        if args.threads:
            hold = args.threads * HOLD
            together = stack.enter_context(fake_engine(args.tokens, 0.0, hold))
            for client, work, core in ((BATCH, decode_batch, CLIENT_CORE), (THREADS, decode_in_threads, None)):
                cases["together", args.threads, client] = partial(
                    in_child, measure, work, together, args.threads, args.tokens, 1, hold, core=core
                )
        if args.paced_tokens:
            paced = stack.enter_context(fake_engine(args.paced_tokens, PACE))
            for streams in dict.fromkeys([counts[0], *(streams for streams in counts if streams >= 1000)]):
                cases["paced", streams, BATCH] = partial(
                    in_child, measure, decode_batch, paced, streams, args.paced_tokens, 1, core=CLIENT_CORE
                )
        results = interleaved(cases, args.repeats)

    def us(mode: str, streams: int) -> list[float]:
        return [run.us_per_token for run in results[mode, streams, BATCH]]

    rows = [row(mode, streams, client, runs) for (mode, streams, client), runs in results.items()]
    many, few = (1000 if 1000 in counts else counts[-1]), counts[0]
    of_many = [found for found in rows if found["streams"] == many and found["client"] == BATCH]
    summary: dict[str, Any] = {
        f"cost_ratio_{many}_vs_{few}": ratio(us("full", many), us("full", few)),
        "us_per_token": {str(streams): median(us("full", streams)) for streams in counts},
        "kib_per_active_stream": max((found["KiB/stream"] or 0.0) for found in of_many),
        "kib_per_idle_stream": max((found["KiB/idle"] or 0.0) for found in of_many),
        "server_busy": {
            f"{mode}/{streams}": found["server"] for (mode, streams, _), found in zip(results, rows, strict=True)
        },
    }
    if args.threads:
        ours, theirs = results["together", args.threads, BATCH], results["together", args.threads, THREADS]
        summary["vs_threads_wall"] = ratio([run.wall for run in ours], [run.wall for run in theirs])
        summary["vs_threads_cpu"] = ratio([run.us_per_token for run in ours], [run.us_per_token for run in theirs])
    if args.paced_tokens:
        summary["paced"] = {
            f"cost_ratio_{many}_vs_{few}": ratio(us("paced", many), us("paced", few)),
            "loop_lag_p99_ms": {
                str(found["streams"]): found["lag p99 ms"] for found in rows if found["mode"] == "paced"
            },
            "loop_lag_max_ms": {
                str(found["streams"]): found["lag max ms"] for found in rows if found["mode"] == "paced"
            },
        }
    notes = [
        f"Open files allowed: {limit:,}; each open stream takes one",
        f"One core: {1e6 / median(us('full', many)):,.0f} tokens a second with {many:,} streams at full speed",
    ]
    if args.paced_tokens:
        bearable = 1e6 * PACE / median(us("paced", many))
        notes.append(
            f"One core, by its CPU time a token: {bearable:,.0f} streams of {1 / PACE:.0f} tokens a second each"
        )
    report(args, "A batch that decodes, as its streams grow", rows, summary, notes)


if __name__ == "__main__":
    main()
