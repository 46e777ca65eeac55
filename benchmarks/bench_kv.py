"""KV in and out of a cache, 2,048 tokens at Qwen3-8B's geometry (302 MB), beside memmove and the stock LMCache SDK.

A real LMCache server, from the interpreter in `LMCACHE_STREAM_REAL_PYTHON`, serves our client and the stock SDK in
turn; it needs no engine. Every result is compared with what was stored. One torch thread copies in a lane. All rates
count each byte once; `of memmove` is against memmove on one core into memory that is there already.

- copy: between slots of mapped shared memory and a tensor that is there already, on 1 or 2 lanes; no server.
- stock formulation: a contiguous copy of the KV, then slot by slot; back by `torch.cat` into new memory; no server.
- shared memory: whole calls of our client, lookups, locks and messages included; the event loop's lag meanwhile.
- stock SDK: its own whole calls, in its own process, with 1 and 2 torch threads. All clients store into slots that were
  not used before, as in a server that is filling up; our client maps the pool ahead, the stock SDK does not. In the end
  its mapping is populated for it, as if it had touched every page before, and it runs again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import functools
import itertools
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import aiohttp
import torch
from common import LoopLag, arguments, interleaved, median, order_of_round, percentile, ratio, report, skip
from stock_sdk import stock_sdk

from lmcache_stream.errors import LMCacheError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.context import AsyncKVCacheContext
from lmcache_stream.kvcache.memory import open_context as open_memory
from lmcache_stream.kvcache.mp.codec import Split
from lmcache_stream.kvcache.mp.connect import open_context as open_mp
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.serving.options import PYTHON_VARIABLE, CacheOptions
from lmcache_stream.serving.up import CacheServer
from lmcache_stream.transfer import TransferExecutor

MODEL = "Qwen/Qwen3-8B"
CHUNK, TOKENS, SEED = 256, 2048, 7
GEOMETRY = KVGeometry(
    num_layers=36, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, chunk_size=CHUNK, block_size=16, num_heads=32
)
SHAPE = (2, GEOMETRY.num_layers, TOKENS, GEOMETRY.hidden_dim)
CODEC = Split(GEOMETRY.num_layers, GEOMETRY.num_kv_heads, GEOMETRY.head_dim)
BYTES = torch.Size(SHAPE).numel() * 2
IDS = list(range(1000, 1000 + TOKENS))
LAG_INTERVAL = 0.002
NON_TEMPORAL = "glibc.cpu.x86_non_temporal_threshold=0x40000"

Pair = tuple[float, float]
"""Seconds to store, seconds to retrieve."""


def some_kv() -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(-(2**15), 2**15, SHAPE, dtype=torch.int16, generator=generator).view(torch.bfloat16)


def check_same(got: torch.Tensor | None, kv: torch.Tensor, who: str) -> None:
    if got is None or not torch.equal(got.view(torch.int16), kv.view(torch.int16)):
        raise SystemExit(f"{who}: what came back is not what was stored")


# Copies without a server.


class Copies:
    """Slots in mapped shared memory, and a tensor of their KV."""

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv
        self.out = torch.zeros_like(kv)
        slots = torch.frombuffer(mmap.mmap(-1, BYTES), dtype=torch.bfloat16)
        self.slots = list(slots.view(TOKENS // CHUNK, *CODEC.stored_shape(CHUNK)))
        for index, slot in enumerate(self.slots):
            slot.copy_(self.part(kv, index))

    def part(self, kv: torch.Tensor, index: int) -> torch.Tensor:
        return kv.narrow(2, index * CHUNK, CHUNK)

    def memmove(self) -> Pair:
        started = time.perf_counter()
        ctypes.memmove(self.out.data_ptr(), self.kv.data_ptr(), BYTES)
        took = time.perf_counter() - started
        check_same(self.out, self.kv, "memmove")
        return took, took

    def in_lanes(self, executor: TransferExecutor) -> Pair:
        into = self._timed(executor, lambda index: CODEC.encode(self.part(self.kv, index), self.slots[index]))
        self.out.zero_()
        out = self._timed(executor, lambda index: CODEC.decode(self.slots[index], self.part(self.out, index)))
        check_same(self.out, self.kv, "copy")
        return into, out

    def with_numpy(self) -> Pair:
        kv, out = self.kv.view(torch.int16).numpy(), self.out.view(torch.int16).numpy()
        slots = [slot.view(torch.int16).numpy() for slot in self.slots]
        started = time.perf_counter()
        for index, slot in enumerate(slots):
            slot[...] = kv[:, :, index * CHUNK : (index + 1) * CHUNK]
        between = time.perf_counter()
        for index, slot in enumerate(slots):
            out[:, :, index * CHUNK : (index + 1) * CHUNK] = slot
        return between - started, time.perf_counter() - between

    def stock_formulation(self) -> Pair:
        started = time.perf_counter()
        whole = self.kv[:, :, :TOKENS].detach().cpu().contiguous()
        for index, slot in enumerate(self.slots):
            slot.copy_(whole[:, :, index * CHUNK : (index + 1) * CHUNK])
        between = time.perf_counter()
        joined = torch.cat(self.slots, dim=2)
        took = time.perf_counter() - between
        check_same(joined, self.kv, "stock formulation")
        return between - started, took

    def _timed(self, executor: TransferExecutor, copy: Callable[[int], None]) -> float:
        count = len(self.slots)
        bounds = [count * lane // executor.lanes for lane in range(executor.lanes + 1)]

        def copy_some(first: int, last: int) -> None:
            for index in range(first, last):
                copy(index)

        started = time.perf_counter()
        for future in [executor.submit(copy_some, *span) for span in itertools.pairwise(bounds)]:
            future.result()
        return time.perf_counter() - started


def copy_cases(kv: torch.Tensor, executors: dict[int, TransferExecutor]) -> dict[str, Callable[[], Pair]]:
    copies = Copies(kv)
    return {
        "memmove": copies.memmove,
        "copy, 1 lane": lambda: copies.in_lanes(executors[1]),
        "copy, 2 lanes": lambda: copies.in_lanes(executors[2]),
        "copy, numpy": copies.with_numpy,
        "stock formulation": copies.stock_formulation,
    }


# Whole calls.


class Client:
    """One of our contexts, and how late the loop was while it moved KV."""

    def __init__(self, context: AsyncKVCacheContext, kv: torch.Tensor) -> None:
        self._context = context
        self._kv = kv
        self._salts = 0
        self.lag: list[float] = []

    async def there_and_back(self) -> Pair:
        self._salts += 1
        salt = f"{id(self)}-{self._salts}"
        async with LoopLag(LAG_INTERVAL) as lag:
            started = time.perf_counter()
            stored = await self._context.store(self._kv, IDS, salt)
            between = time.perf_counter()
            got = await self._context.retrieve(IDS, salt)
            took = time.perf_counter() - between
        self.lag += lag.seconds
        if not stored:
            raise SystemExit("a store did not take every chunk")
        check_same(got, self._kv, type(self._context).__name__)
        return between - started, took


def there_and_back(runner: asyncio.Runner, one: Client) -> Pair:
    return runner.run(one.there_and_back())


@contextlib.asynccontextmanager
async def server(*, shared_memory: bool, pool_gib: float) -> AsyncIterator[CacheServer]:
    options = CacheOptions(chunk_size=CHUNK, l1_gib=pool_gib, shared_memory=shared_memory)
    async with CacheServer(options) as running:
        yield running


async def client(running: CacheServer, executor: TransferExecutor, *, populate: bool = False) -> MPKVCacheContext:
    context = await open_mp(
        running.kv_url,
        http_url=running.kv_http_url,
        model_name=MODEL,
        geometry=GEOMETRY,
        executor=executor,
        lanes=executor.lanes,
        serve=True,
        populate=populate,
    )
    for thread in threading.enumerate():
        if thread.name == "lmcache-stream pages":
            await asyncio.to_thread(thread.join)
    return context


async def clear(running: CacheServer) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{running.kv_http_url}/cache/clear", json={"tier": "l1"}) as answer,
    ):
        answer.raise_for_status()


def measure(options: argparse.Namespace, python: str, notes: list[str]) -> tuple[dict[str, list[Pair]], list[float]]:
    kv = some_kv()
    executors = {lanes: TransferExecutor(lanes, device="cpu") for lanes in (1, 2)}
    with asyncio.Runner() as runner, contextlib.ExitStack() as stack:

        def opened(context: contextlib.AbstractAsyncContextManager[CacheServer]) -> CacheServer:
            running = runner.run(context.__aenter__())
            stack.callback(lambda: runner.run(context.__aexit__(None, None, None)))
            return running

        def used(context: AsyncKVCacheContext) -> Client:
            stack.callback(lambda: runner.run(context.close()))
            return Client(context, kv)

        shared = opened(server(shared_memory=True, pool_gib=1.3 * 4 * (options.repeats + 1) * BYTES / 2**30))
        ours = {
            f"shared memory, {lanes} lane{'s' * (lanes > 1)}": used(runner.run(client(shared, executor, populate=True)))
            for lanes, executor in executors.items()
        }
        others = {
            "embedded memory": used(
                runner.run(
                    open_memory(
                        f"memory://bench?chunk_size={CHUNK}&max_bytes=700MiB",
                        http_url=None,
                        model_name=MODEL,
                        timeout=60.0,
                        geometry=GEOMETRY,
                        probe=None,
                    )
                )
            )
        }
        pickled = None
        if not options.no_pickle:
            pickled = opened(server(shared_memory=False, pool_gib=2.0))
            others["pickle, 2 lanes"] = used(runner.run(client(pickled, executors[2])))
        cases = copy_cases(kv, executors)
        for name, one in {**ours, **others}.items():
            cases[name] = functools.partial(there_and_back, runner, one)
        stock = stack.enter_context(stock_sdk(shared, python, SHAPE, SEED, IDS, notes))
        if stock is not None:
            for number in (1, 2):
                cases[f"stock SDK, {number} thread{'s' * (number > 1)}"] = functools.partial(
                    stock.there_and_back, number
                )

        taken: dict[str, list[Pair]] = {}
        for turn in range(options.repeats + 1):
            round_ = {name: [cases[name]()] for name in order_of_round(list(cases), turn)}
            if pickled is not None:
                runner.run(clear(pickled))
            if turn == 0:  # pages are touched and buffers made in the first round
                for one in ours.values():
                    one.lag.clear()
                notes.append(
                    "First calls, buffers still to be made: "
                    + ", ".join(f"{name} {BYTES / round_[name][0][1] / 1e9:.1f} GB/s" for name in ours)
                )
                continue
            for name, pairs in round_.items():
                taken.setdefault(name, []).extend(pairs)
        if stock is not None:
            stock.populate()
            for turn in range(options.repeats + 1):
                runner.run(clear(shared))
                for number in (1, 2):
                    pair = stock.there_and_back(number)
                    if turn:
                        name = f"stock SDK, populated, {number} thread{'s' * (number > 1)}"
                        taken.setdefault(name, []).append(pair)
        lag = [late for one in ours.values() for late in one.lag]
    for executor in executors.values():
        executor.close()
    return taken, lag


def measure_copies(repeats: int) -> dict[str, list[Pair]]:
    executors = {lanes: TransferExecutor(lanes, device="cpu") for lanes in (1, 2)}
    cases = copy_cases(some_kv(), executors)
    interleaved(cases, 1)
    taken = interleaved(cases, repeats)
    for executor in executors.values():
        executor.close()
    return taken


def tuned_copies(repeats: int) -> dict[str, list[Pair]]:
    """The copies alone in a process with glibc's non-temporal threshold lowered; empty where that does not run."""
    command = [sys.executable, str(Path(__file__)), "--copies-only", "--repeats", str(repeats)]
    environment = {**os.environ, "GLIBC_TUNABLES": NON_TEMPORAL}
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    return json.loads(answer.stdout) if answer.returncode == 0 else {}


def stores(pairs: Sequence[Pair]) -> list[float]:
    return [pair[0] for pair in pairs]


def retrieves(pairs: Sequence[Pair]) -> list[float]:
    return [pair[1] for pair in pairs]


def rate(seconds: Sequence[float]) -> float:
    return BYTES / median(seconds) / 1e9


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--torch-threads", type=int, default=1, help="torch threads of our process (each lane's copies)"
    )
    parser.add_argument("--no-pickle", action="store_true", help="leave out the pickled transfer, which takes seconds")
    parser.add_argument("--copies-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.torch_threads)
    if options.copies_only:
        print(json.dumps(measure_copies(options.repeats)))
        return

    python = os.environ.get(PYTHON_VARIABLE)
    if python is None:
        skip(f"set {PYTHON_VARIABLE} to an interpreter that has lmcache: make real installs one in .venv-real")
        return
    notes: list[str] = []
    tuned = tuned_copies(options.repeats)
    try:
        taken, lag = measure(options, python, notes)
    except LMCacheError as error:
        raise SystemExit(str(error)) from error
    memmove = stores(taken["memmove"])
    rows = []
    for name, pairs in taken.items():
        rows.append(
            {
                "": name,
                "store GB/s": rate(stores(pairs)),
                "store, of memmove": ratio(memmove, stores(pairs)),
                "retrieve GB/s": rate(retrieves(pairs)),
                "retrieve, of memmove": ratio(memmove, retrieves(pairs)),
                "store tuned": rate(stores(tuned[name])) if name in tuned else None,
                "retrieve tuned": rate(retrieves(tuned[name])) if name in tuned else None,
            }
        )
    notes.append(f"{options.torch_threads} torch thread(s) in our process. tuned: {NON_TEMPORAL}, GB/s.")
    summary = {**of_memmove(taken, "2 lanes"), **of_stock(taken)}
    summary["loop_lag_p99_ms"] = percentile(lag, 99) * 1e3
    summary["loop_lag_max_ms"] = max(lag) * 1e3
    report(options, f"{BYTES / 1e6:.0f} MB of KV", rows, {**summary, "1 lane": of_memmove(taken, "1 lane")}, notes)


def of_memmove(taken: dict[str, list[Pair]], lanes: str) -> dict[str, float | None]:
    memmove = stores(taken["memmove"])
    copies = taken[f"copy, {lanes}"]
    calls = taken[f"shared memory, {lanes}"]
    return {
        "copy_vs_memmove": min(ratio(memmove, stores(copies)), ratio(memmove, retrieves(copies))),
        "retrieve_vs_memmove": ratio(memmove, retrieves(calls)),
        "store_vs_memmove": ratio(memmove, stores(calls)),
    }


def of_stock(taken: dict[str, list[Pair]]) -> dict[str, float | None]:
    """Ours on two lanes against the stock SDK with the number of threads that suits it better."""
    calls = taken["shared memory, 2 lanes"]
    result: dict[str, float | None] = {}
    for suffix, prefix in (("", "stock SDK, "), ("_populated", "stock SDK, populated, ")):
        stock = [taken[name] for name in (f"{prefix}1 thread", f"{prefix}2 threads") if name in taken]
        result[f"retrieve_vs_stock{suffix}"] = min(
            (ratio(retrieves(pairs), retrieves(calls)) for pairs in stock), default=None
        )
        result[f"store_vs_stock{suffix}"] = min((ratio(stores(pairs), stores(calls)) for pairs in stock), default=None)
    return result


if __name__ == "__main__":
    main()
