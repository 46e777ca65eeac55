"""Runs one server so that nothing of it outlives the one who started it.

A program of its own, with the standard library only: ``python guard.py --grace S [--segment NAME]... -- COMMAND...``.
It stops the server when its standard input ends (its owner closed it, or died, however hard), when a byte ``k`` comes
on it (at once, without grace) or on SIGTERM. Stopping is SIGTERM to the server's process group, then SIGKILL to every
descendant still there after `grace` seconds. Afterwards the shared-memory segments that the server left are removed:
the named ones, and those that its processes had mapped or named after their process ids and that were not there when
it started. The exit status is the server's; 128 + N when signal N ended it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SHM = Path("/dev/shm")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LOOK_EVERY = 2.0
"""Seconds between looks at what the server has mapped; a server that is killed cannot be asked any more."""

ORPHAN_GRACE = 3.0
"""Seconds that the rest of a server may take after its main process has ended by itself."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grace", type=float, default=15.0)
    parser.add_argument("--segment", action="append", default=[])
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)

    owner = os.getppid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake = wake_on_signals(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    segments = Segments(options.segment)
    server = spawn(options.command)

    at_once = False
    status: int | None = None
    next_look = 0.0
    while status is None and os.getppid() == owner:
        if time.monotonic() >= next_look:
            segments.look(descendants(os.getpid()))
            next_look = time.monotonic() + LOOK_EVERY
        ready, _, _ = select.select([0, wake], [], [], 1.0)
        status = reap(server)
        if 0 in ready:
            at_once = b"k" in os.read(0, 64)
            break
        if wake in ready and set(os.read(wake, 64)) - {signal.SIGCHLD}:
            break

    segments.look(descendants(os.getpid()))
    if status is None:
        status = stop(server, 0.0 if at_once else options.grace)
    else:
        stop(server, min(options.grace, ORPHAN_GRACE))
    segments.remove()
    return status if status >= 0 else 128 - status


def spawn(command: Sequence[str]) -> int:
    """Start `command` in a session of its own and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.set_wakeup_fd(-1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def stop(server: int, grace: float) -> int:
    """End the server's process group and every other descendant; return the server's exit code, -N for signal N."""
    status: int | None = None
    if grace > 0:
        signal_group(server, signal.SIGTERM)
    deadline = time.monotonic() + grace
    pause = 0.01
    while True:
        ended = reap(server)
        status = ended if status is None else status
        left = descendants(os.getpid())
        if not left:
            return 0 if status is None else status
        if time.monotonic() >= deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)


def reap(server: int) -> int | None:
    """Collect every child that has ended; the server's exit code if it is among them."""
    code: int | None = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == server:
            code = os.waitstatus_to_exitcode(status)


def signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def wake_on_signals(*numbers: int) -> int:
    """A file descriptor that becomes readable, with the signal's number, when one of them comes."""
    wake, sleeper = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(sleeper, False)
    signal.set_wakeup_fd(sleeper)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return wake


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in processes():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            found.add(pid)
            todo.append(pid)
    return found


def processes() -> Iterator[tuple[int, int]]:
    """Every process of the machine with its parent."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError):
                stat = Path("/proc", entry, "stat").read_text()
                yield int(entry), int(stat.rpartition(")")[2].split()[1])


class Segments:
    """The shared-memory segments that a server would leave behind."""

    def __init__(self, named: Sequence[str]) -> None:
        self.named: set[str] = {name.lstrip("/") for name in named}
        self.before: set[str] = set(os.listdir(SHM)) if SHM.is_dir() else set()
        self.mapped: set[str] = set()
        self.pids: set[int] = set()

    def look(self, pids: set[int]) -> None:
        """Take note of what these processes have mapped now."""
        self.pids |= pids
        for pid in pids:
            with contextlib.suppress(OSError):
                for line in Path("/proc", str(pid), "maps").read_text().splitlines():
                    path = line.partition(f" {SHM}/")[2]
                    if path and "/" not in path and not path.endswith(" (deleted)"):
                        self.mapped.add(path)

    def remove(self) -> None:
        if not SHM.is_dir():
            return
        for name in os.listdir(SHM):
            if name in self.named or (name not in self.before and (name in self.mapped or self.named_after_pid(name))):
                with contextlib.suppress(OSError):
                    (SHM / name).unlink()

    def named_after_pid(self, name: str) -> bool:
        pid = name.removeprefix("lmcache_kv_").partition("_")[0]
        return name.startswith("lmcache_kv_") and pid.isdigit() and int(pid) in self.pids


if __name__ == "__main__":
    sys.exit(main())
