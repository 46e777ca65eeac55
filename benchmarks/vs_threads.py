"""The documented way, a thread a stream around a blocking `post_completion`, beside `AsyncBatchedStream`.

The peers are what the stream and batch documents describe: a plain generator over `requests` or `httpx` that yields a
`TokenEvent` a token, and a pool with a thread for every stream. All streams start at once. Modes: `fast` (an event a
write, the streams in turn, as fast as the engine can; few streams run again and again, so that starting is not all that
is measured) and `paced` (ten tokens a second a stream, so that the floor of the wall time is known). Every run has an
engine and a client process of its own; the fake engine stays on one core, clients may use all. An event loop runs
beside the threads as in a service that calls them; its lag is theirs. `--base-url` takes a running engine in place of
the fake one: its speed is then in the wall times.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import shlex
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from common import (
    LoopLag,
    Server,
    fake_engine,
    in_child,
    interleaved,
    machine,
    median,
    peak_rss_bytes,
    raise_file_limit,
    ratio,
    report,
    rounded,
    rss_bytes,
    span,
)

from lmcache_stream import AsyncBatchedStream, AsyncLMCacheStream, CompletionsClient, KVGeometry, TokenEvent
from lmcache_stream.kvcache import aconnect
from lmcache_stream.kvcache.memory import EmbeddedCache

OURS, REQUESTS, HTTPX = "ours", "requests, threads", "httpx, threads"
NEEDS = {REQUESTS: "requests", HTTPX: "httpx"}
PROMPT = list(range(300, 380))
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)
PACE = 0.1
LEAST = 64
"""Streams of a fast run, one batch after another."""

PostCompletion: TypeAlias = Callable[[Sequence[int], Mapping[str, Any], str], Iterator[TokenEvent]]
Work: TypeAlias = Callable[["Job"], Awaitable[int]]


@dataclass(frozen=True)
class Job:
    """What one run decodes: `rounds` times `streams` streams of `tokens` tokens each, from the engine at `url`."""

    url: str
    model: str
    streams: int
    tokens: int
    rounds: int

    @property
    def params(self) -> dict[str, Any]:
        """Sampling parameters of every request."""
        return {"max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Run:
    """One run as it was measured; memory in bytes over what the process had before."""

    wall: float
    cpu_per_token: float
    memory: float
    threads: int
    lag_p99_ms: float
    lag_max_ms: float
    engine_busy: float | None


async def ours(job: Job) -> int:
    cache = EmbeddedCache.open("memory://bench?chunk_size=32")
    cache.register_model(job.model, GEOMETRY)
    arrived = 0
    async with aconnect("memory://bench", model_name=job.model) as ctx, CompletionsClient(job.url) as client:
        for _ in range(job.rounds):
            streams = [AsyncLMCacheStream(ctx, client, PROMPT) for _ in range(job.streams)]
            if len(streams) == 1:
                await streams[0].generate(job.params)
            else:
                batch = AsyncBatchedStream(progress=False)
                batch.extend(streams)
                await batch.decode(job.params)
            arrived += sum(len(stream.output_tokens()) for stream in streams)
    return arrived


async def threads(client: Callable[[Job], PostCompletion], job: Job) -> int:
    """A thread a stream: each goes through its `post_completion` and keeps ids, text and times."""
    loop = asyncio.get_running_loop()
    post_completion = client(job)
    arrived = 0
    for _ in range(job.rounds):
        with ThreadPoolExecutor(job.streams) as pool:
            streams = [loop.run_in_executor(pool, generate, post_completion, job.params) for _ in range(job.streams)]
            arrived += sum(await asyncio.gather(*streams))
    return arrived


def generate(post_completion: PostCompletion, params: Mapping[str, Any]) -> int:
    tokens: list[int | None] = []
    text: list[str] = []
    times: list[float] = []
    for event in post_completion(PROMPT, params, ""):
        times.append(time.perf_counter())
        tokens.append(event.token_id)
        text.append(event.text)
    return len(tokens)


def with_requests(job: Job) -> PostCompletion:
    requests = importlib.import_module("requests")

    def post_completion(ids: Sequence[int], params: Mapping[str, Any], salt: str) -> Iterator[TokenEvent]:
        url, body = f"{job.url}/v1/completions", body_of(job, ids, params, salt)
        with requests.post(url, json=body, stream=True, timeout=600) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                yield from events_of(line)

    return post_completion


def with_httpx(job: Job) -> PostCompletion:
    """A client for each request, without certificates to load: one for all fails under hundreds of threads."""
    httpx = importlib.import_module("httpx")

    def post_completion(ids: Sequence[int], params: Mapping[str, Any], salt: str) -> Iterator[TokenEvent]:
        url, body = f"{job.url}/v1/completions", body_of(job, ids, params, salt)
        with (
            httpx.Client(verify=False, timeout=None) as client,
            client.stream("POST", url, json=body) as response,
        ):
            response.raise_for_status()
            for line in response.iter_lines():
                yield from events_of(line.encode())

    return post_completion


def body_of(job: Job, ids: Sequence[int], params: Mapping[str, Any], salt: str) -> dict[str, Any]:
    body = {"model": job.model, "prompt": ids, "stream": True, "return_token_ids": True, **params}
    return {**body, "cache_salt": salt} if salt else body


def events_of(line: bytes) -> Iterator[TokenEvent]:
    if not line.startswith(b"data: {"):
        return
    for choice in json.loads(line[6:])["choices"]:
        for token in choice["token_ids"] or ():
            yield TokenEvent(token, choice["text"])


def measure(work: Work, job: Job, server: Server | None) -> Run:
    """One run in this process; it has to be the only one in it."""

    async def watched() -> tuple[int, int, LoopLag]:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, threading.active_count())
                await asyncio.sleep(0.02)

        watching = asyncio.create_task(watch())
        async with LoopLag() as lag:
            arrived = await work(job)
        watching.cancel()
        return arrived, most, lag

    memory = rss_bytes()
    served, cpu, begin = server.cpu_seconds() if server else 0.0, time.process_time(), time.perf_counter()
    arrived, most, lag = asyncio.run(watched())
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    if arrived != job.rounds * job.streams * job.tokens:
        raise AssertionError(f"{arrived} of {job.rounds * job.streams * job.tokens} tokens arrived")
    return Run(
        wall=wall / job.rounds,
        cpu_per_token=cpu / arrived,
        memory=peak_rss_bytes() - memory,
        threads=most,
        lag_p99_ms=lag.p99_ms,
        lag_max_ms=lag.max_ms,
        engine_busy=(server.cpu_seconds() - served) / wall if server else None,
    )


def run_once(client: str, streams: int, tokens: int, pace: float, engine: tuple[str, str] | None) -> Run:
    """One process pair: an engine, unless there is one, and a client."""
    work = CLIENTS[client]
    if engine is not None:
        return in_child(measure, work, Job(*engine, streams, tokens, 1), None, core=None)
    with fake_engine(tokens, pace) as server:
        job = Job(server.address, "fake", streams, tokens, 1 if pace else max(1, LEAST // streams))
        return in_child(measure, work, job, server, core=None)


CLIENTS: dict[str, Work] = {
    OURS: ours,
    REQUESTS: partial(threads, with_requests),
    HTTPX: partial(threads, with_httpx),
}


def row(mode: str, streams: int, client: str, of_all: Mapping[str, list[Run]], tokens: int) -> dict[str, Any]:
    runs, base = of_all[client], of_all[OURS]
    peer = client != OURS
    busy = [run.engine_busy for run in runs if run.engine_busy is not None]
    return {
        "mode": mode,
        "streams": streams,
        "tokens": tokens,
        "client": client,
        "wall s": median([run.wall for run in runs]),
        "range": span([run.wall for run in runs]),
        "x ours": ratio([run.wall for run in runs], [run.wall for run in base]) if peer else None,
        "CPU us/token": 1e6 * median([run.cpu_per_token for run in runs]),
        "CPU x ours": ratio([run.cpu_per_token for run in runs], [run.cpu_per_token for run in base]) if peer else None,
        "peak +MiB": median([run.memory for run in runs]) / 2**20,
        "threads": int(median([run.threads for run in runs])),
        "lag p99 ms": median([run.lag_p99_ms for run in runs]),
        "lag max ms": median([run.lag_max_ms for run in runs]),
        "engine busy": median(busy) if busy else None,
    }


async def model_at(url: str) -> str:
    async with CompletionsClient(url) as client:
        return (await client.models())[0].id


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--base-url", metavar="URL", help="a running engine, in place of the fake one")
    parser.add_argument(
        "--streams", action="append", type=int, metavar="N", help="default: 1, 32, 256, 1000; real: 1, 16"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of a stream (64)")
    parser.add_argument(
        "--paced-tokens", type=int, default=32, help="of a stream in the paced mode (32); 0: without it"
    )
    parser.add_argument("--repeats", type=int, default=3, help="interleaved rounds (3); medians are reported")
    parser.add_argument("--quick", action="store_true", help="1 and 32 streams of few tokens, one round")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write rows, machine and command to this file")
    args = parser.parse_args()
    if args.quick:
        args.streams, args.tokens, args.paced_tokens, args.repeats = args.streams or [1, 32], 16, 8, 1
    args.streams = sorted(set(args.streams or ([1, 16] if args.base_url else [1, 32, 256, 1000])))
    if min(*args.streams, args.tokens, args.repeats, 1) < 1 or args.paced_tokens < 0:
        parser.error("streams, tokens and repeats are counts of at least 1")
    return args


def main() -> None:
    args = parse()
    raise_file_limit()
    missing = {name: module for name, module in NEEDS.items() if importlib.util.find_spec(module) is None}
    notes = [f"{name}: left out, {module} is not installed" for name, module in missing.items()]
    clients = [name for name in CLIENTS if name not in missing]
    for module in {NEEDS[name] for name in clients if name in NEEDS}:
        importlib.import_module(module)  # once, not in every child
    engine = (args.base_url.rstrip("/"), asyncio.run(model_at(args.base_url))) if args.base_url else None
    for client in clients:
        run_once(client, 1, 2, 0.0, None)
    modes = {"fast": (0.0, args.tokens), **({"paced": (PACE, args.paced_tokens)} if args.paced_tokens else {})}
    if engine is not None:
        modes = {"real": (0.0, args.tokens)}
        notes.append(f"the engine at {args.base_url} serves {engine[1]}; its speed is in all wall times")
    cases = {
        (mode, streams, client): partial(run_once, client, streams, tokens, pace, engine)
        for mode, (pace, tokens) in modes.items()
        for streams in args.streams
        for client in clients
    }
    results = interleaved(cases, args.repeats)

    rows = []
    summary: dict[str, Any] = {}
    for mode, (_, tokens) in modes.items():
        for streams in args.streams:
            of_all = {client: results[mode, streams, client] for client in clients}
            mine = [row(mode, streams, client, of_all, tokens) for client in clients]
            rows += mine
            for one in mine[1:]:
                found = summary.setdefault(mode, {}).setdefault(NEEDS[one["client"]], {})
                found[str(streams)] = {"wall_x_ours": one["x ours"], "cpu_x_ours": one["CPU x ours"]}
    if "paced" in modes:
        notes.append(
            f"paced: no run can be faster than {PACE * args.paced_tokens:g} s, and the watchers of loop lag and"
        )
        notes.append("threads are in the CPU time: with few streams they are most of it")
    title = "A thread a stream, beside AsyncBatchedStream"
    if args.json is not None:
        command = shlex.join(["python", "benchmarks/vs_threads.py", *sys.argv[1:]])
        content = {"title": title, "command": command, "machine": machine(), "repeats": args.repeats, "notes": notes}
        args.json.write_text(json.dumps({**content, **rounded(summary), "rows": rounded(rows)}, indent=1) + "\n")
    report(argparse.Namespace(repeats=args.repeats, json=False), title, rows, summary, notes)


if __name__ == "__main__":
    main()
