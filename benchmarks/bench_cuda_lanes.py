"""CUDA lanes: KV of 32 streams to the GPU, edited there, and back, on 1, 2 and 4 lanes.

Each stream's KV lies in ordinary memory. It travels through the lane's pinned buffers, an editor keeps half of it on
the GPU, and the half travels back. The measure is bytes moved both ways a second, against what one large copy from
pinned memory, to the GPU and back, reaches. Goal: 0.9 of it with two lanes.

Without a GPU there is nothing to measure, and it says so.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable

import torch
from common import arguments, interleaved, median, ratio, report, skip

from lmcache_stream.editors import EditInput, StreamingLLM
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.transfer import TransferExecutor

LANES = (1, 2, 4)
CHUNK = 256


def geometry() -> KVGeometry:
    return KVGeometry(num_layers=36, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, chunk_size=CHUNK)


class Streams:
    """What every run moves: the KV of some streams, and room for what comes back."""

    def __init__(self, count: int, tokens: int) -> None:
        shape = (2, 36, tokens, 8 * 128)
        self.tokens = tuple(range(tokens))
        whole = torch.randn(shape[1:], dtype=torch.float32).bfloat16()
        self.kv = [torch.stack([whole, whole]) for _ in range(count)]
        self.editor = StreamingLLM(keep=0.5, rerotate=False)
        self.kept = self.edited(self.kv[0]).cpu()
        self.back = [torch.zeros_like(self.kept) for _ in range(count)]
        self.bytes = sum(kv.nbytes for kv in self.kv) + sum(kv.nbytes for kv in self.back)

    def edited(self, kv: torch.Tensor) -> torch.Tensor:
        edit = self.editor.edit(EditInput(kv=kv, tokens=self.tokens, geometry=geometry(), chunk_size=CHUNK))
        return edit.kv

    async def on(self, executor: TransferExecutor) -> float:
        async def one(kv: torch.Tensor, back: torch.Tensor) -> None:
            on_gpu = await executor.to_device(kv)
            edited = await executor.run(self.edited, on_gpu)
            del on_gpu
            await executor.copy_(back, edited)

        bound = asyncio.Semaphore(2 * executor.lanes)  # as many at once as a modify phase would hold on a GPU

        async def bounded(kv: torch.Tensor, back: torch.Tensor) -> None:
            async with bound:
                await one(kv, back)

        for back in self.back:
            back.zero_()
        torch.cuda.synchronize()
        started = time.perf_counter()
        await asyncio.gather(*map(bounded, self.kv, self.back))
        took = time.perf_counter() - started
        for back in self.back:
            if not torch.equal(back, self.kept):
                raise SystemExit("an edit came back wrong")
        return took


def on_lanes(streams: Streams, executor: TransferExecutor) -> float:
    return asyncio.run(streams.on(executor))


def large_copies(nbytes: int) -> Callable[[], float]:
    """Seconds for `nbytes`, two thirds to the GPU and one third back, by one pinned copy each way."""
    there, back = 2 * nbytes // 3, nbytes // 3
    pinned = torch.ones(max(there, back) // 4, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty_like(pinned, device="cuda")

    def run() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(4):
            on_gpu[: there // 4].copy_(pinned[: there // 4], non_blocking=True)
        for _ in range(4):
            pinned[: back // 4].copy_(on_gpu[: back // 4], non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    return run


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        skip("no CUDA device here, and nothing else can show what CUDA lanes are worth")
        return

    streams = Streams(options.streams, options.tokens)
    executors = {lanes: TransferExecutor(lanes) for lanes in LANES}
    runs: dict[str, Callable[[], float]] = {"large copy": large_copies(streams.bytes)}
    for lanes, executor in executors.items():
        runs[f"{lanes} lanes"] = functools.partial(on_lanes, streams, executor)
    for run in runs.values():
        run()
    taken = interleaved(runs, options.repeats)
    for executor in executors.values():
        executor.close()

    base = taken["large copy"]
    rows = [
        {
            "": name,
            "s": median(values),
            "GB/s": streams.bytes / median(values) / 1e9,
            "of one large pinned copy": ratio(base, values),
        }
        for name, values in taken.items()
    ]
    summary = {"vs_large_copy": {str(lanes): ratio(base, taken[f"{lanes} lanes"]) for lanes in LANES}}
    title = f"{options.streams} streams of {options.tokens} tokens to the GPU, edited, and back"
    report(options, title, rows, summary, [torch.cuda.get_device_name()])


if __name__ == "__main__":
    main()
