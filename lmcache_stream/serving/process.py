"""A server as a child process: its log in a file, its end noticed at once, nothing of it left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ServerProcess"]

GUARD = Path(__file__).with_name("guard.py")
REACTION = 10.0
"""Seconds beyond its grace that the guard may take for killing and clearing up."""


class ServerProcess:
    """One server under a guard process that outlives its owner just long enough to stop the server.

    Args:
        name: What messages call it.
        command: The program and its arguments.
        log: File that its output is appended to.
        env: The whole environment; None for this process's own.
        segments: Names in `/dev/shm` to remove when the server has ended.
        grace: Seconds between SIGTERM to its process group and SIGKILL to whatever is left.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        segments: Sequence[str] = (),
        grace: float = 15.0,
    ) -> None:
        self.name = name
        self.command: tuple[str, ...] = tuple(command)
        self.log = log
        self.env = env
        self.segments: tuple[str, ...] = tuple(segments)
        self.grace = grace
        self._guard: asyncio.subprocess.Process | None = None
        self._leash = -1

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._guard is not None and self._guard.returncode is None

    @property
    def returncode(self) -> int | None:
        """The server's exit code, 128 + N when signal N ended it; None while it runs or before it was started."""
        return None if self._guard is None else self._guard.returncode

    async def start(self) -> None:
        """Start the server, again if it has ended."""
        if self.running:
            return
        self._let_go()
        segments = [word for name in self.segments for word in ("--segment", name)]
        log = await anyio.to_thread.run_sync(open_log, self.log)
        leash_end, self._leash = os.pipe()
        os.set_blocking(self._leash, False)
        try:
            self._guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", str(GUARD), "--grace", str(self.grace), *segments, "--", *self.command),
                stdin=leash_end,
                stdout=log,
                stderr=log,
                env=self.env,
                start_new_session=True,
            )
        except BaseException:
            self._let_go()
            raise
        finally:
            os.close(leash_end)
            os.close(log)

    async def wait(self) -> int:
        """Wait until the server has ended and nothing of it is left; its exit code."""
        if self._guard is None:
            return 0
        return await self._guard.wait()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after `grace` seconds; returns when nothing of the server is left."""
        await self._end(self.grace)

    async def kill(self) -> None:
        """SIGKILL at once to every process of the server."""
        if self.running:
            with contextlib.suppress(OSError):
                os.write(self._leash, b"k")
        await self._end(0.0)

    async def _end(self, grace: float) -> None:
        self._let_go()
        if self._guard is None:
            return
        with anyio.CancelScope(shield=True):
            try:
                async with asyncio.timeout(grace + REACTION):
                    await self._guard.wait()
            except TimeoutError:
                self._guard.kill()
                await self._guard.wait()

    def _let_go(self) -> None:
        if self._leash >= 0:
            os.close(self._leash)
            self._leash = -1

    def last_lines(self) -> str:
        """The last 20 lines of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 65536))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-20:])


def open_log(path: Path) -> int:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise UsageError(
            f"cannot write {path} ({error.strerror}): --log-dir takes a folder that can be written"
        ) from error
