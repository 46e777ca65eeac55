from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.bench.load import Clock, KVBudget, arrival_times, drive
from lmcache_stream.errors import UsageError


class TestArrivals:
    def test_are_the_same_for_a_seed(self) -> None:
        assert arrival_times(50, 4.0, 0.7, 3) == arrival_times(50, 4.0, 0.7, 3)
        assert arrival_times(50, 4.0, 0.7, 3) != arrival_times(50, 4.0, 0.7, 4)

    def test_are_those_of_vllm_bench_serve(self) -> None:
        rng = np.random.RandomState(7)
        gaps = [rng.gamma(shape=0.5, scale=1 / (3.0 * 0.5)) for _ in range(20)]
        expected = np.cumsum(gaps) * (20 / 3.0 / np.sum(gaps))
        assert arrival_times(20, 3.0, 0.5, 7) == pytest.approx(list(expected))

    @pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
    def test_mean_and_dispersion(self, burstiness: float) -> None:
        gaps = np.diff(arrival_times(20_000, 5.0, burstiness, 0), prepend=0.0)
        assert gaps.mean() == pytest.approx(1 / 5.0)
        assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)

    def test_the_last_one_arrives_at_count_over_rate(self) -> None:
        assert arrival_times(30, 10.0, 1.0, 1)[-1] == pytest.approx(3.0)

    @pytest.mark.parametrize(("rate", "burstiness"), [(50.0, 1e-300), (1e-320, 1.0)])
    def test_no_times_come_out_of_extremes(self, rate: float, burstiness: float) -> None:
        with pytest.raises(UsageError, match="gives no times of arrival"):
            arrival_times(2, rate, burstiness, 0)

    def test_without_bursts_they_are_even(self) -> None:
        assert arrival_times(4, 2.0, math.inf, 0) == pytest.approx([0.5, 1.0, 1.5, 2.0])

    def test_without_a_rate_all_come_at_once(self) -> None:
        assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]
        assert arrival_times(0, 1.0, 1.0, 0) == []


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class TestBudget:
    async def test_the_sum_stays_within_it(self) -> None:
        budget = KVBudget(100)
        most = 0

        async def hold(nbytes: int) -> None:
            nonlocal most
            async with budget.admit(nbytes):
                most = max(most, budget.taken)
                await asyncio.sleep(0)

        await asyncio.gather(*(hold(nbytes) for nbytes in [60, 30, 50, 100, 10, 90, 1] * 5))
        assert 60 <= most <= 100
        assert budget.taken == 0

    async def test_a_large_one_is_not_overtaken(self) -> None:
        budget = KVBudget(100)
        order: list[int] = []

        async def hold(nbytes: int) -> None:
            async with budget.admit(nbytes):
                order.append(nbytes)

        async with budget.admit(50):
            waiting = [asyncio.create_task(hold(nbytes)) for nbytes in (80, 10)]
            await settle()
            assert order == []
        await asyncio.gather(*waiting)
        assert order == [80, 10]

    async def test_one_that_cannot_fit_is_refused(self) -> None:
        with pytest.raises(UsageError, match="budget"):
            async with KVBudget(10).admit(11):
                pass

    @given(st.lists(st.tuples(st.integers(1, 10), st.booleans()), max_size=30))
    @settings(deadline=None, max_examples=50)
    def test_cancelled_ones_give_everything_back(self, wanted: list[tuple[int, bool]]) -> None:
        async def run() -> None:
            budget = KVBudget(10)

            async def hold(nbytes: int) -> None:
                async with budget.admit(nbytes):
                    await asyncio.sleep(0)

            tasks = [asyncio.create_task(hold(nbytes)) for nbytes, _ in wanted]
            await asyncio.sleep(0)
            for task, (_, cancelled) in zip(tasks, wanted, strict=True):
                if cancelled:
                    task.cancel()
            done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
            assert all(isinstance(one, asyncio.CancelledError | None) for one in done)
            assert budget.taken == 0
            async with budget.admit(10):
                pass

        asyncio.run(run())

    async def test_without_a_bound_all_come_in(self) -> None:
        async with KVBudget(None).admit(10**15), KVBudget(None).admit(10**15):
            pass


class TestDrive:
    async def test_the_bound_holds_and_all_run_once(self) -> None:
        running = most = 0
        done: list[int] = []

        async def operation(index: int, queued: float) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            assert queued >= 0
            await asyncio.sleep(0)
            running -= 1
            done.append(index)

        await drive(range(20), operation, clock=Clock(), max_concurrency=3)
        assert most == 3
        assert sorted(done) == list(range(20))

    async def test_none_starts_before_it_arrives(self) -> None:
        clock = Clock()
        started: dict[int, float] = {}

        async def operation(index: int, _queued: float) -> None:
            started[index] = clock.now()

        arrivals = [0.0, 0.01, 0.02]
        await drive(range(3), operation, clock=clock, arrivals=arrivals)
        assert list(started) == [0, 1, 2]
        assert all(started[index] >= at for index, at in enumerate(arrivals))

    async def test_time_in_the_queue_counts_from_the_arrival(self) -> None:
        queued: dict[int, float] = {}
        first_may_end = asyncio.Event()

        async def operation(index: int, waited: float) -> None:
            queued[index] = waited
            if index == 0:
                await first_may_end.wait()

        running = asyncio.create_task(drive(range(2), operation, clock=Clock(), max_concurrency=1))
        await settle()
        first_may_end.set()
        await running
        assert queued[1] > queued[0]

    async def test_an_error_ends_the_others(self) -> None:
        ended: list[int] = []

        async def operation(index: int, _queued: float) -> None:
            if index == 1:
                raise OSError("disk full")
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(index)

        with pytest.raises(OSError, match="disk full"):
            await drive(range(3), operation, clock=Clock())
        assert sorted(ended) == [0, 2]

    async def test_cancellation_goes_through(self) -> None:
        async def operation(_index: int, _queued: float) -> None:
            await asyncio.Event().wait()

        running = asyncio.create_task(drive(range(3), operation, clock=Clock(), arrivals=[0.0, 0.0, 1e6]))
        await settle()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    async def test_the_clock_goes_on_where_it_was(self) -> None:
        assert Clock(5.0).now() >= 5.0
        await asyncio.wait_for(Clock(5.0).sleep_until(5.0), 10)
