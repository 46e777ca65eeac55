from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest

from lmcache_stream import portal
from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

flavour: contextvars.ContextVar[str] = contextvars.ContextVar("flavour", default="none")


async def add(a: int, b: int = 0) -> int:
    await asyncio.sleep(0)
    return a + b


async def thread_name() -> str:
    return threading.current_thread().name


def in_thread(fn: object) -> list[object]:
    out: list[object] = []
    assert callable(fn)
    thread = threading.Thread(target=lambda: out.append(fn()))
    thread.start()
    thread.join(30)
    return out


def script(source: str, *, interrupt_at: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script; send SIGINT when it prints `interrupt_at`."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    seen = ""
    try:
        if interrupt_at is not None:
            for line in process.stdout:
                seen += line
                if line.strip() == interrupt_at:
                    process.send_signal(signal.SIGINT)
                    break
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, seen + out, err)


def test_a_result_comes_back() -> None:
    assert portal.run(add, 1, b=2) == 3


def test_an_error_comes_back_unchanged() -> None:
    error = KeyError("this very one")

    async def fail() -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        portal.run(fail)
    assert caught.value is error


def test_every_call_runs_on_one_and_the_same_loop() -> None:
    here = portal.run(thread_name)
    assert in_thread(lambda: portal.run(thread_name)) == [here]
    assert here != threading.current_thread().name


async def test_it_works_where_a_loop_runs_already() -> None:
    assert portal.run(add, 2, 3) == 5


def test_a_call_on_the_loop_itself_is_refused() -> None:
    async def nested() -> None:
        portal.run(add, 1)

    async def nested_iteration() -> None:
        list(portal.iterate(count(3)))

    with pytest.raises(UsageError, match="async twin"):
        portal.run(nested)
    with pytest.raises(UsageError, match="async twin"):
        portal.run(nested_iteration)


def test_a_thread_started_by_the_loop_may_call_it() -> None:
    async def blocking_user_code() -> int:
        return await asyncio.to_thread(portal.run, add, 20, 22)

    assert portal.run(blocking_user_code) == 42


def test_context_variables_are_the_callers() -> None:
    async def read() -> str:
        return flavour.get()

    async def read_twice() -> AsyncIterator[str]:
        yield flavour.get()
        yield flavour.get()

    token = flavour.set("vanilla")
    try:
        assert portal.run(read) == "vanilla"
        assert list(portal.iterate(read_twice)) == ["vanilla", "vanilla"]
    finally:
        flavour.reset(token)


def test_many_threads_call_at_once() -> None:
    sums: list[int] = []
    threads = [threading.Thread(target=lambda i=i: sums.append(portal.run(add, i, i))) for i in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(sums) == [2 * i for i in range(50)]


def test_a_cancelled_task_is_a_cancellation_here() -> None:
    async def cancel_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        portal.run(cancel_itself)


def test_a_task_that_exits_does_not_end_the_loop_for_others() -> None:
    async def leave() -> None:
        sys.exit(3)

    with pytest.raises(SystemExit):
        portal.run(leave)
    assert portal.run(add, 1, 1) == 2


def test_ctrl_c_waits_for_the_clean_up_of_a_call() -> None:
    done = script(
        """
        import asyncio, time
        from lmcache_stream import portal

        async def work():
            try:
                print("waiting")
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.05)
                print("cleaned up")

        try:
            portal.run(work)
        except KeyboardInterrupt:
            print("interrupted")

        async def one(): return 1
        print("still works", portal.run(one))
        """,
        interrupt_at="waiting",
    )
    assert done.stdout.split("\n") == ["waiting", "cleaned up", "interrupted", "still works 1", ""], done.stderr


def test_ctrl_c_waits_for_the_clean_up_of_an_iteration() -> None:
    done = script(
        """
        import asyncio
        from lmcache_stream import portal

        async def items():
            try:
                yield "waiting"
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.05)
                print("cleaned up")

        try:
            for item in portal.iterate(items):
                print(item)
        except KeyboardInterrupt:
            print("interrupted")
        """,
        interrupt_at="waiting",
    )
    assert done.stdout.split("\n") == ["waiting", "cleaned up", "interrupted", ""], done.stderr


def test_a_script_ends_and_its_tasks_clean_up() -> None:
    done = script(
        """
        import asyncio, threading
        from lmcache_stream import portal

        started = threading.Event()
        async def forever():
            try:
                started.set()
                await asyncio.sleep(3600)
            finally:
                print("cleaned up")

        threading.Thread(target=lambda: portal.run(forever), daemon=True).start()
        started.wait()
        """
    )
    assert (done.returncode, done.stdout) == (0, "cleaned up\n"), done.stderr


def test_a_forked_child_gets_a_loop_of_its_own() -> None:
    done = script(
        """
        import os, warnings
        from lmcache_stream import portal

        warnings.simplefilter("ignore", DeprecationWarning)
        async def pid(): return os.getpid()
        assert portal.run(pid) == os.getpid()
        child = os.fork()
        if child == 0:
            os._exit(0 if portal.run(pid) == os.getpid() else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), portal.run(pid) == os.getpid())
        """
    )
    assert done.stdout == "0 True\n", done.stderr


class Counted:
    """Counts up to `n`, slowly or at once, and tells how far it came and whether it was closed."""

    def __init__(self, n: int, *, error: Exception | None = None, close_error: Exception | None = None) -> None:
        self.n = n
        self.error = error
        self.close_error = close_error
        self.produced = 0
        self.closed = threading.Event()
        self.tasks: set[object] = set()

    async def __call__(self) -> AsyncIterator[int]:
        try:
            for i in range(self.n):
                self.tasks.add(asyncio.current_task())
                self.produced += 1
                yield i
                await asyncio.sleep(0)
            if self.error:
                raise self.error
        finally:
            await asyncio.sleep(0)
            self.closed.set()
            if self.close_error:
                raise self.close_error


def count(n: int) -> Counted:
    return Counted(n)


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 3000])
def test_an_iteration_gives_every_item_once_in_order(n: int) -> None:
    counted = count(n)
    assert list(portal.iterate(counted)) == list(range(n))
    assert counted.closed.is_set()


def test_one_task_reads_the_whole_iteration() -> None:
    counted = count(1000)
    list(portal.iterate(counted))
    assert len(counted.tasks) == 1


def test_an_iteration_passes_an_error_on_after_the_items_before_it() -> None:
    error = LookupError("here")
    seen: list[int] = []
    with pytest.raises(LookupError) as caught:
        seen.extend(portal.iterate(Counted(300, error=error)))
    assert caught.value is error
    assert seen == list(range(300))


def test_leaving_an_iteration_closes_the_async_one() -> None:
    counted = count(100_000)
    iteration = portal.iterate(counted)
    assert next(iteration) == 0
    iteration.close()
    assert counted.closed.is_set()


def test_an_abandoned_iteration_closes_the_async_one() -> None:
    counted = count(100_000)
    for item in portal.iterate(counted):
        if item == 3:
            break
    gc.collect()
    assert counted.closed.is_set()


def test_an_iteration_reads_only_so_far_ahead() -> None:
    counted = count(100_000)
    iteration = portal.iterate(counted)
    next(iteration)
    ahead = -1
    while ahead != counted.produced:  # until it stands still
        ahead = counted.produced
        portal.run(asyncio.sleep, 0.01)
    assert ahead <= 2 * 256 + 1
    iteration.close()


def test_an_iteration_that_is_never_begun_opens_nothing() -> None:
    counted = count(10)
    iteration = portal.iterate(counted)
    iteration.close()
    assert counted.produced == 0


def test_an_error_while_closing_is_not_lost() -> None:
    iteration = portal.iterate(Counted(100_000, close_error=ValueError("could not close")))
    next(iteration)
    with pytest.raises(ValueError, match="could not close"):
        iteration.close()


def test_any_async_iterator_will_do() -> None:
    class Plain:
        def __init__(self) -> None:
            self.left = 3

        def __aiter__(self) -> Plain:
            return self

        async def __anext__(self) -> int:
            if not self.left:
                raise StopAsyncIteration
            self.left -= 1
            return self.left

    assert list(portal.iterate(Plain)) == [2, 1, 0]


def test_a_failing_open_is_an_error_here() -> None:
    def broken() -> AsyncIterator[int]:
        raise RuntimeError("no such stream")

    with pytest.raises(RuntimeError, match="no such stream"):
        list(portal.iterate(broken))


def test_results_are_not_kept_alive() -> None:
    class Big:
        pass

    async def make() -> Big:
        return Big()

    big = portal.run(make)
    seen = weakref.ref(big)
    del big
    deadline = time.monotonic() + 10
    while seen() is not None and time.monotonic() < deadline:
        portal.run(asyncio.sleep, 0)
    assert seen() is None
