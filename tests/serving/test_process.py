from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lmcache_stream.serving.process import GUARD, ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(60)

SERVER = """
import os, signal, subprocess, sys, time
{prepare}
print("ready", os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""
IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
RUNAWAY = (
    "child = subprocess.Popen([sys.executable, '-c', "
    "'import os, signal, time; signal.signal(15, signal.SIG_IGN); os.setsid(); time.sleep(600)']); "
    "print('child', child.pid, flush=True)"
)


def server(tmp_path: Path, prepare: str = "", grace: float = 5.0, segments: tuple[str, ...] = ()) -> ServerProcess:
    command = [sys.executable, "-c", SERVER.format(prepare=prepare)]
    return ServerProcess("the server", command, log=tmp_path / "logs" / "log", grace=grace, segments=segments)


async def says(process: ServerProcess, word: str) -> int:
    """The number after `word` in the server's log, once it is there."""
    while True:
        for line in process.last_lines().splitlines():
            if line.startswith(word + " "):
                return int(line.split()[1])
        assert process.running, process.last_lines()
        await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def gone(pid: int) -> None:
    while True:
        if not alive(pid):
            return
        await asyncio.sleep(0.02)


def parent_of(pid: int) -> int:
    return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])


async def test_runs_and_stops(tmp_path: Path) -> None:
    process = server(tmp_path)
    await process.start()
    pid = await says(process, "ready")
    assert os.getpgid(pid) == pid
    await process.stop()
    assert not alive(pid)
    assert process.returncode == 128 + signal.SIGTERM
    await process.stop()


async def test_starts_again(tmp_path: Path) -> None:
    process = server(tmp_path)
    await process.start()
    first = await says(process, "ready")
    await process.kill()
    assert not alive(first)
    assert process.returncode == 128 + signal.SIGKILL
    process.log.unlink()
    await process.start()
    second = await says(process, "ready")
    assert second != first
    await process.stop()
    assert not alive(second)


async def test_its_end_is_noticed(tmp_path: Path) -> None:
    process = server(tmp_path, "print('all is lost'); sys.exit(3)")
    await process.start()
    assert await process.wait() == 3
    assert process.last_lines() == "all is lost"
    assert not process.running


async def test_a_missing_program(tmp_path: Path) -> None:
    process = ServerProcess("the server", ["/does/not/exist"], log=tmp_path / "log")
    await process.start()
    assert await process.wait() == 127
    assert "/does/not/exist: No such file" in process.last_lines()


async def test_one_that_ignores_sigterm_and_children_that_ran_away_are_killed(tmp_path: Path) -> None:
    process = server(tmp_path, f"{IGNORE}; {RUNAWAY}", grace=0.3)
    await process.start()
    pid, child = await says(process, "ready"), await says(process, "child")
    await process.stop()
    assert not alive(pid)
    assert not alive(child)
    assert process.returncode == 128 + signal.SIGKILL


async def test_children_go_when_the_server_dies(tmp_path: Path) -> None:
    process = server(tmp_path, RUNAWAY, grace=0.3)
    await process.start()
    pid, child = await says(process, "ready"), await says(process, "child")
    os.kill(pid, signal.SIGKILL)
    assert await process.wait() == 128 + signal.SIGKILL
    assert not alive(child)


OWNER = """
import asyncio, sys
from pathlib import Path
from lmcache_stream.serving.process import ServerProcess

async def main():
    process = ServerProcess("the server", [sys.executable, "-c", sys.argv[1]], log=Path(sys.argv[2]), grace=0.3)
    await process.start()
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_an_owner_that_is_killed_takes_its_server_along(tmp_path: Path) -> None:
    look = server(tmp_path)
    prepare = f"{IGNORE}; {RUNAWAY}"
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, SERVER.format(prepare=prepare), str(look.log)), start_new_session=True
    )
    look.log.parent.mkdir()
    look.log.touch()
    while "ready" not in look.last_lines():
        await asyncio.sleep(0.02)
        assert owner.returncode is None
    pid, child = (
        int(line.split()[1])
        for word in ("ready", "child")
        for line in look.last_lines().splitlines()
        if line.startswith(word)
    )
    owner.kill()
    await owner.wait()
    await gone(pid)
    await gone(child)


async def test_a_guard_that_is_killed_takes_the_server_along(tmp_path: Path) -> None:
    process = server(tmp_path)
    await process.start()
    pid = await says(process, "ready")
    os.kill(parent_of(pid), signal.SIGKILL)
    await process.wait()
    await gone(pid)


async def test_a_guard_stops_the_server_on_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVER.format(prepare="")]
    guard = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(GUARD), "--grace", "5", "--", *command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert guard.stdout is not None
    pid = int((await guard.stdout.readline()).split()[1])
    guard.terminate()
    assert await guard.wait() == 128 + signal.SIGTERM
    assert not alive(pid)
    assert guard.stdin is not None
    guard.stdin.close()


SEGMENTS = (
    "from multiprocessing import shared_memory as m, resource_tracker as r; "
    "made = [m.SharedMemory(n, create=True, size=64) for n in (None, 'lmcache_kv_%d_0' % os.getpid(), {named!r})]; "
    "[r.unregister(s._name, 'shared_memory') for s in made]; "
    "print('made', *(s.name for s in made), flush=True); "
    "made[1].close()"
)


def existing(names: list[str]) -> list[str]:
    return [name for name in names if Path("/dev/shm", name).exists()]


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_segments_that_it_left_are_removed(tmp_path: Path, end: str) -> None:
    named = f"lmcache_l1_pool_lmcache_stream_test_{os.getpid()}"
    process = server(tmp_path, SEGMENTS.format(named=named), segments=(named,))
    await process.start()
    await says(process, "ready")
    made = process.last_lines().splitlines()[0].split()[1:]
    assert named in made
    assert existing(made) == made
    await (process.stop() if end == "stop" else process.kill())
    assert existing(made) == []


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A segment that somebody else made."""
    path = Path(f"/dev/shm/lmcache_stream_test_{os.getpid()}_{time.monotonic_ns()}")
    path.write_bytes(b"x" * 64)
    yield path
    path.unlink(missing_ok=True)


async def test_segments_of_others_stay(tmp_path: Path, foreign: Path) -> None:
    prepare = (
        "from multiprocessing import shared_memory as m, resource_tracker as r; "
        f"s = m.SharedMemory({foreign.name!r}); r.unregister(s._name, 'shared_memory')"
    )
    process = server(tmp_path, prepare)
    await process.start()
    await says(process, "ready")
    await process.stop()
    assert foreign.exists()  # noqa: ASYNC240
