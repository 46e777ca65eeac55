from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from lmcache_stream.callables import call, event_batches, runs_on_loop
from lmcache_stream.errors import UsageError
from lmcache_stream.types import Completion, TokenEvent

Item = TokenEvent | Completion
EVENTS: list[Item] = [TokenEvent(1, "a"), TokenEvent(2, "b"), Completion("stop")]


def blocking(ids: list[int], params: Any, salt: str) -> Iterator[Item]:
    yield from EVENTS


def returns_list(ids: list[int], params: Any, salt: str) -> Iterable[Item]:
    return EVENTS


async def generates(ids: list[int], params: Any, salt: str) -> AsyncIterator[Item]:
    for event in EVENTS:
        yield event


async def awaits_list(ids: list[int], params: Any, salt: str) -> Iterable[Item]:
    return EVENTS


async def awaits_generator(ids: list[int], params: Any, salt: str) -> AsyncIterator[Item]:
    return generates(ids, params, salt)


def returns_generator(ids: list[int], params: Any, salt: str) -> AsyncIterator[Item]:
    return generates(ids, params, salt)


class Callable_:
    def __call__(self, ids: list[int], params: Any, salt: str) -> Iterator[Item]:
        yield from EVENTS


class Batched:
    async def batches(self, ids: list[int], params: Any, salt: str) -> AsyncIterator[list[TokenEvent] | Completion]:
        yield [TokenEvent(1, "a"), TokenEvent(2, "b")]
        yield Completion("stop")

    async def __call__(self, ids: list[int], params: Any, salt: str) -> AsyncIterator[Item]:
        yield TokenEvent(99, "batches is the fast way")


async def collect(post_completion: Any) -> list[Item]:
    async with aclosing(event_batches(post_completion, [1], {}, "")) as batches:
        return [item async for batch in batches for item in batch]


@pytest.mark.parametrize(
    "post_completion",
    [
        blocking,
        returns_list,
        generates,
        awaits_list,
        awaits_generator,
        returns_generator,
        Callable_(),
        Batched(),
        functools.partial(generates),
        lambda *args: blocking(*args),
    ],
)
async def test_every_form_of_callable_gives_the_same(post_completion: Any) -> None:
    assert await collect(post_completion) == EVENTS


async def test_a_callable_sees_what_was_sent() -> None:
    seen: list[Any] = []

    def post_completion(ids: list[int], params: Any, salt: str) -> Iterator[Item]:
        seen.append((ids, params, salt, threading.current_thread() is threading.main_thread()))
        yield TokenEvent(1)

    async with aclosing(event_batches(post_completion, [7], {"a": 1}, "salt")) as batches:
        assert [item async for batch in batches for item in batch] == [TokenEvent(1)]
    assert seen == [([7], {"a": 1}, "salt", False)]


@pytest.mark.parametrize("post_completion", [lambda *_: 7, awaits_generator.__class__])
async def test_what_is_no_iterable_is_refused(post_completion: Any) -> None:
    with pytest.raises((UsageError, TypeError)):
        await collect(post_completion)


async def test_errors_pass_unchanged_after_what_came_before() -> None:
    def post_completion(ids: list[int], params: Any, salt: str) -> Iterator[Item]:
        yield TokenEvent(1)
        raise KeyError("mine")

    seen: list[Item] = []

    async def consume() -> None:
        async for batch in event_batches(post_completion, [1], {}, ""):
            seen.extend(batch)

    with pytest.raises(KeyError, match="mine"):
        await consume()
    assert seen == [TokenEvent(1)]


async def test_many_blocking_iterables_block_at_once() -> None:
    barrier = threading.Barrier(60)

    def post_completion(ids: list[int], params: Any, salt: str) -> Iterator[Item]:
        barrier.wait(timeout=30)
        yield TokenEvent(1)

    results = await asyncio.gather(*(collect(post_completion) for _ in range(60)))
    assert results == [[TokenEvent(1)]] * 60


async def test_leaving_early_closes_a_blocking_generator_without_waiting_for_it() -> None:
    blocked, closed = threading.Event(), threading.Event()

    def post_completion(ids: list[int], params: Any, salt: str) -> Iterator[Item]:
        try:
            yield TokenEvent(1)
            blocked.wait(30)
            yield TokenEvent(2)
        finally:
            closed.set()

    batches = event_batches(post_completion, [1], {}, "")
    assert await anext(batches) == [TokenEvent(1)]
    await batches.aclose()
    assert not closed.is_set()
    blocked.set()
    assert await asyncio.to_thread(closed.wait, 30)


async def test_a_thread_that_is_let_go_does_not_keep_the_process(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(
        "import asyncio, threading\n"
        "from lmcache_stream.callables import abandonable_thread\n"
        "async def main():\n"
        "    try:\n"
        "        await asyncio.wait_for(abandonable_thread(threading.Event().wait), 0.1)\n"
        "    except TimeoutError:\n"
        "        print('let go')\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, script, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert (out, process.returncode) == (b"let go\n", 0)


async def test_stop_iteration_from_a_blocking_call_is_an_error_like_others() -> None:
    def stop() -> None:
        next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        await call(stop)


async def test_cancelled_while_a_thread_blocks() -> None:
    release, started = threading.Event(), threading.Event()

    def post_completion(ids: list[int], params: Any, salt: str) -> Iterator[Item]:
        started.set()
        release.wait(30)
        yield TokenEvent(1)

    task = asyncio.create_task(collect(post_completion))
    assert await asyncio.to_thread(started.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()


async def test_a_producer_does_not_run_far_ahead() -> None:
    produced = 0

    def post_completion(ids: list[int], params: Any, salt: str) -> Iterator[Item]:
        nonlocal produced
        for token in range(10_000):
            produced += 1
            yield TokenEvent(token)

    received = 0
    async with aclosing(event_batches(post_completion, [1], {}, "")) as batches:
        async for batch in batches:
            received += len(batch)
            assert produced <= received + 1026
    assert received == 10_000


async def test_async_generators_are_closed_when_left_early() -> None:
    closed = False

    async def post_completion(ids: list[int], params: Any, salt: str) -> AsyncIterator[Item]:
        nonlocal closed
        try:
            yield TokenEvent(1)
            yield TokenEvent(2)
        finally:
            closed = True

    async with aclosing(event_batches(post_completion, [1], {}, "")) as batches:
        await anext(batches)
    assert closed


def test_runs_on_loop() -> None:
    assert runs_on_loop(generates)
    assert runs_on_loop(functools.partial(awaits_list))
    assert runs_on_loop(Batched())
    assert not runs_on_loop(blocking)
    assert not runs_on_loop(Callable_())
    assert not runs_on_loop(lambda: None)


async def test_call_takes_sync_and_async_functions() -> None:
    async def double(value: int) -> int:
        return 2 * value

    assert await call(lambda value: 2 * value, 4) == await call(double, 4) == 8
    assert await call(lambda value: double(value), 4) == 8
    assert await call(lambda: threading.current_thread() is threading.main_thread()) is False
