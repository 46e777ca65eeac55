from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch
from blockbuster import blockbuster_ctx

from lmcache_stream import transfer
from lmcache_stream.errors import UsageError
from lmcache_stream.transfer import TransferExecutor, default_executor

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Gate:
    """Work that says when it began and ends when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()
        self.ended = threading.Event()

    def __call__(self, *args: Any) -> str:
        self.begun.set()
        assert self.open.wait(30)
        self.ended.set()
        return "done"

    async def wait_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 30)


@pytest.fixture
def executor() -> Iterator[TransferExecutor]:
    executor = TransferExecutor(lanes=1, device="cpu")
    yield executor
    executor.close()


async def test_work_runs_in_a_named_worker(executor: TransferExecutor) -> None:
    name = await executor.run(lambda: threading.current_thread().name)
    assert name.startswith("lmcache-stream-transfer")
    assert executor.submit(lambda: threading.current_thread().name).result(30) == name


async def test_arguments_results_and_errors_pass_through(executor: TransferExecutor) -> None:
    error = ValueError("this very one")

    def fail() -> None:
        raise error

    assert await executor.run(divmod, 17, 5) == (3, 2)
    with pytest.raises(ValueError) as caught:
        await executor.run(fail)
    assert caught.value is error


async def test_there_are_as_many_workers_as_lanes() -> None:
    executor = TransferExecutor(lanes=3, device="cpu")
    meeting = threading.Barrier(3)
    try:
        await asyncio.gather(*(executor.run(meeting.wait, 30) for _ in range(3)))
    finally:
        executor.close()


async def test_the_loop_goes_on_while_work_runs(executor: TransferExecutor) -> None:
    gate = Gate()
    with blockbuster_ctx():
        work = asyncio.create_task(executor.run(gate))
        await gate.wait_begun()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not work.done()
        gate.open.set()
        assert await work == "done"


async def test_cancelled_work_that_runs_is_waited_for(executor: TransferExecutor) -> None:
    gate = Gate()
    work = asyncio.create_task(executor.run(gate))
    await gate.wait_begun()
    for _ in range(3):  # however often
        work.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not work.done()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert gate.ended.is_set()


async def test_cancelled_work_that_fails_stays_a_cancellation(executor: TransferExecutor) -> None:
    gate = Gate()

    def fail() -> None:
        gate()
        raise RuntimeError("nobody waits for this")

    work = asyncio.create_task(executor.run(fail))
    await gate.wait_begun()
    work.cancel()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_cancelled_work_that_has_not_begun_is_dropped(executor: TransferExecutor) -> None:
    gate, never = Gate(), Gate()
    running = asyncio.create_task(executor.run(gate))
    waiting = asyncio.create_task(executor.run(never))
    await gate.wait_begun()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.open.set()
    await running
    await executor.run(int)  # whatever came before has had its turn
    assert not never.begun.is_set()


async def test_a_cancel_scope_waits_for_running_work(executor: TransferExecutor) -> None:
    gate = Gate()

    async def cancel_then_open() -> None:
        await gate.wait_begun()
        scope.cancel()
        for _ in range(50):
            await asyncio.sleep(0)
        gate.open.set()

    with anyio.CancelScope() as scope:
        helper = asyncio.create_task(cancel_then_open())
        await executor.run(gate)
    assert scope.cancelled_caught
    assert gate.ended.is_set()
    await helper


async def test_arguments_are_let_go_in_the_worker(executor: TransferExecutor) -> None:
    freed_in: list[str] = []

    class Big:
        def __del__(self) -> None:
            freed_in.append(threading.current_thread().name)

    def use(big: Big) -> None:
        assert isinstance(big, Big)

    await executor.run(use, Big())
    await executor.run(gc.collect)
    assert [name.startswith("lmcache-stream-transfer") for name in freed_in] == [True]


async def test_a_result_that_nobody_waits_for_is_let_go_in_the_worker(executor: TransferExecutor) -> None:
    gate = Gate()
    freed_in: list[str] = []

    class Big:
        def __del__(self) -> None:
            freed_in.append(threading.current_thread().name)

    def make(argument: Big) -> Big:
        gate()
        return Big()

    work = asyncio.create_task(executor.run(make, Big()))
    await gate.wait_begun()
    work.cancel()
    await asyncio.sleep(0)
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert [name.startswith("lmcache-stream-transfer") for name in freed_in] == [True, True]


async def test_copies_are_copies(executor: TransferExecutor) -> None:
    source = torch.arange(24.0).reshape(2, 3, 4)
    target = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    await executor.copy_(target, source)
    assert torch.equal(target.float(), source)
    for copy in (await executor.to_host(source.transpose(0, 2)), await executor.to_device(source.transpose(0, 2))):
        assert torch.equal(copy, source.transpose(0, 2))
        assert copy.is_contiguous()
        assert copy.device.type == "cpu"
        assert copy.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()


async def test_a_closed_executor_refuses_work(executor: TransferExecutor) -> None:
    executor.close()
    executor.close()
    assert executor.closed
    with pytest.raises(UsageError, match="closed"):
        await executor.run(int)
    with pytest.raises(UsageError, match="closed"):
        executor.submit(int)


async def test_closing_lets_work_end(executor: TransferExecutor) -> None:
    gate = Gate()
    work = asyncio.create_task(executor.run(gate))
    await gate.wait_begun()
    executor.close()
    gate.open.set()
    assert await work == "done"


@pytest.mark.parametrize(("lanes", "device"), [(0, "cpu"), (1, "meta")])
def test_an_executor_that_cannot_be_is_refused(lanes: int, device: str) -> None:
    with pytest.raises(UsageError):
        TransferExecutor(lanes=lanes, device=device)


def test_the_default_executor_is_one_for_all_loops_and_threads() -> None:
    first = default_executor()
    assert default_executor() is first
    assert asyncio.run(first.run(os.getpid)) == asyncio.run(first.run(os.getpid)) == os.getpid()


def test_a_closed_default_executor_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_default", None)  # others go on with theirs
    first = default_executor()
    first.close()
    second = default_executor()
    assert second is not first
    assert second.submit(int).result(30) == 0
    second.close()


async def test_an_executor_that_is_let_go_leaves_no_thread() -> None:
    executor = TransferExecutor(lanes=1, device="cpu")
    thread = await executor.run(threading.current_thread)
    seen = weakref.ref(executor)
    del executor
    gc.collect()
    assert seen() is None
    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()


@needs_cuda
@pytest.mark.gpu
async def test_each_lane_has_a_cuda_stream_of_its_own() -> None:
    executor = TransferExecutor(lanes=2, device="cuda")
    meeting = threading.Barrier(2)

    def stream() -> int:
        meeting.wait(30)
        return torch.cuda.current_stream().cuda_stream

    streams = await asyncio.gather(executor.run(stream), executor.run(stream))
    executor.close()
    assert len({*streams, torch.cuda.default_stream().cuda_stream}) == 3


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("numel", [0, 1, 1000, (16 << 20) // 2, 3 * (16 << 20) + 5])
async def test_copies_to_a_gpu_and_back_are_exact(numel: int) -> None:
    executor = TransferExecutor(lanes=2, device="cuda")
    source = torch.randn(numel).to(torch.bfloat16)
    there = await executor.to_device(source)
    back = await executor.to_host(there)
    assert there.device == executor.device
    assert torch.equal(back, source)
    pinned = torch.empty(numel, dtype=torch.bfloat16, pin_memory=True)
    await executor.copy_(pinned, there)
    assert torch.equal(pinned, source)
    executor.close()


@needs_cuda
@pytest.mark.gpu
async def test_strided_copies_to_a_gpu_and_back_are_exact() -> None:
    executor = TransferExecutor(lanes=1, device="cuda")
    source = torch.randn(2, 5, 64, 32).transpose(1, 2)
    there = torch.zeros(2, 64, 5, 64, device="cuda")[..., ::2]
    await executor.copy_(there, source)
    back = torch.zeros(2, 64, 5, 64)[..., ::2]
    await executor.copy_(back, there)
    assert torch.equal(back, source)
    executor.close()


@needs_cuda
@pytest.mark.gpu
async def test_work_on_a_gpu_starts_after_what_the_caller_queued_and_ends_before_it_returns() -> None:
    executor = TransferExecutor(lanes=2, device="cuda")
    a = torch.zeros(4096, 4096, device="cuda")
    for _ in range(20):
        a += torch.ones_like(a) @ torch.ones_like(a)
    doubled = await executor.run(torch.mul, a, 2)
    assert bool((doubled == 2 * 20 * 4096).all())
    executor.close()


async def test_stop_iteration_is_an_error_like_others() -> None:
    executor = TransferExecutor()
    try:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await executor.run(next, iter(()))
    finally:
        executor.close()
