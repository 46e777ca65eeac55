"""Many streams at once on a real stack, and what they leave behind."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
import torch

from lmcache_stream.batch import AsyncBatchedStream
from lmcache_stream.editors import EditInput, Random
from tests.real.served import (
    CHUNK,
    COVERED,
    DECODE,
    Served,
    equal_tokens,
    nothing_held,
    prompts,
    served,
    sessions,
    show,
)
from tests.reference import forward_kv

if TYPE_CHECKING:
    from lmcache_stream.serving.up import ServingStack

STREAMS = 64
SHORT = {**DECODE, "max_tokens": 4}
HALF = Random(keep=0.5, seed=1)


def held_by_this_process() -> dict[str, Counter[str]]:
    """Threads, open files and shared memory, by name; sockets have none worth telling."""
    files = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            files.append(os.readlink(descriptor).partition(":")[0])
        except FileNotFoundError:
            continue  # that of the listing itself
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "threads": Counter(thread.name for thread in threading.enumerate()),
        "files": Counter(files),
        "mapped segments": Counter(line.split()[-1] for line in maps if "/dev/shm/" in line),
    }


async def nothing_more_held(before: dict[str, Counter[str]]) -> None:
    """Wait until this process holds nothing that it did not hold `before`."""
    more: dict[str, Counter[str]] = {}
    with anyio.move_on_after(10):
        while True:
            more = {kind: names - before[kind] for kind, names in held_by_this_process().items()}
            if not any(more.values()):
                return
            await anyio.sleep(0.1)
    pytest.fail(f"held after 10 s: {more}")


async def run_batch(client: Served, count: int, seed: int) -> AsyncBatchedStream:
    batch = AsyncBatchedStream(progress=False)
    batch.extend(client.stream(prompt) for prompt in prompts(client.stack, count, seed=seed))
    await batch.prefill({"temperature": 0})
    await batch.modify(HALF)
    await batch.decode(SHORT)
    assert len(batch.perf_metrics) == len(batch.receipts) == count
    assert {metrics.cached_tokens for metrics in batch.perf_metrics.values()} == {COVERED // 2}
    return batch


def check_tokens(client: Served, batch: AsyncBatchedStream, seed: int) -> None:
    """Hold what each stream of `batch` decoded against the reference."""
    for prompt, stream in zip(prompts(client.stack, STREAMS, seed=seed), batch, strict=True):
        kv = forward_kv(client.model, prompt)[:, :, :COVERED]
        given = EditInput(kv=kv, tokens=tuple(prompt[:COVERED]), geometry=client.ctx.geometry, chunk_size=CHUNK)
        first, *decoded = stream.output_tokens()
        equal_tokens(client.model, HALF.edit(given).kv, [*prompt[COVERED:], first], decoded)


@pytest.mark.parametrize("stack", ["B", "C", "D"], indirect=True)
async def test_64_streams_twice_leave_nothing_behind(stack: ServingStack, capsys: pytest.CaptureFixture[str]) -> None:
    async with served(stack) as client:
        await run_batch(client, 2, seed=20)  # starts what a process starts once
    registered = (await stack.status())["worker_liveness"]["tracked_instances"]
    before = held_by_this_process()
    seconds = []
    async with served(stack) as client:
        for seed in (21, 22):
            started = anyio.current_time()
            batch = await run_batch(client, STREAMS, seed)
            seconds.append(anyio.current_time() - started)
            await nothing_held(stack)
            if stack.options.dtype == "float32":
                check_tokens(client, batch, seed)
            del batch
    assert (await stack.status())["worker_liveness"]["tracked_instances"] == registered
    await nothing_more_held(before)
    segments = [Path("/dev/shm", name) for name in stack.cache.options.segments]
    assert any(segment.exists() for segment in segments) == stack.options.shared_memory  # the server's, not ours to end
    show(capsys, f"{STREAMS} streams in {seconds[0]:.1f} s, then in {seconds[1]:.1f} s")


async def test_a_client_leaves_no_session_where_the_engine_does(stack_c: ServingStack) -> None:
    async with served(stack_c) as client:
        (prompt,) = prompts(stack_c, 1, seed=23)
        stream = await client.prefilled(prompt)
        kv = await stream.retrieve_kv()
        await nothing_held(stack_c)
        before = await sessions(stack_c)

        async def use(salt: str) -> None:
            assert await client.ctx.store(kv, prompt[:COVERED], salt)
            found = await client.ctx.retrieve(prompt, salt)
            assert found is not None
            assert torch.equal(found, kv)

        await asyncio.gather(*(use(f"salt-{number}") for number in range(STREAMS)))
        await nothing_held(stack_c)
        assert await sessions(stack_c) == before
