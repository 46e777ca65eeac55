"""Prefill, modify and decode for hours while servers fail: nothing wrong, nothing lost, nothing left behind.

Rounds of a storm and a calm, with many streams at a time. In a storm calls are cancelled and servers stall, lie, break
connections, forget and restart; errors are expected then, wrong tokens are not. After it every server is given time to
come back, and in the calm an error is one too many. At the end of each round all streams are at rest, and the servers
and this process must hold nothing more than before. Every token that arrives is checked: the fake engine's depend on
each value of the KV that it decoded from, and the real engine's greedy ones must equal those of a quiet run of the same
prompts and edits, made before the first storm. Where a request failed, the tokens that came before must follow from the
edit as far as the cache still held it.

    .venv/bin/python benchmarks/soak.py                      # the fake servers; SOAK_MINUTES=10
    .venv/bin/python benchmarks/soak.py --real               # a real vLLM and a real LMCache server, started here
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from common import machine, rounded
from rich.console import Console
from rich.table import Table
from soaking.holdings import Holdings, Memory, holdings, until_no_more_than
from soaking.jobs import World, live
from soaking.tally import Tally

from lmcache_stream.errors import LMCacheError, UsageError
from lmcache_stream.transfer import default_executor

if TYPE_CHECKING:
    from collections.abc import Callable

LET_GO_S = 20.0
"""Seconds that servers and this process have to let go of everything once the streams are at rest."""

SHOWN = 16
"""Kinds of faults that the table names; the JSON file has all."""

MAPPINGS = 2
"""Descriptors of the server's segment that a context may hold."""

MOST_GROWTH = 32 << 20
"""Bytes by which the memory that this process has alone may grow after the warm-up."""


@dataclass
class Soak:
    """Rounds of storm and calm in one world."""

    world: World
    tally: Tally
    seconds: float
    seed: int
    rounds: int = 0
    memory: Memory = field(default_factory=Memory)
    stopping: bool = False
    _started: float = field(default_factory=time.monotonic)
    _before: Holdings | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the first round began."""
        return time.monotonic() - self._started

    async def run(self) -> None:
        """Round after round until the time is over; the last one is whole."""
        world = self.world
        executor = default_executor()
        await asyncio.gather(*(executor.run(time.sleep, 0.1) for _ in range(executor.lanes)))  # threads of the process
        entry = holdings(world.owns)
        async with world:
            self._started = time.monotonic()
            self.memory.look(0.0)
            while not self.stopping and (self.elapsed < self.seconds or not self.rounds):
                await self._round()
        await asyncio.get_running_loop().shutdown_default_executor()
        await self._nothing_more_than(entry, "at the end")

    async def _round(self) -> None:
        world = self.world
        storm_s = min(world.storm_s, max(self.seconds - self.elapsed, 1.0))
        world.calm = False
        end = time.monotonic() + storm_s
        storm = asyncio.ensure_future(world.storm(lambda: self.stopping or time.monotonic() > end))
        await self._streams(storm_s, f"{self.rounds}-storm")
        await storm
        await world.settle()
        world.calm = True
        await self._streams(min(world.calm_s, storm_s), f"{self.rounds}-calm")
        await self._nothing_held()
        if self._before is None:
            await asyncio.sleep(min(5.0, world.calm_s))
            self._before = holdings(world.owns)
            for segment in self._before.segments:  # mapped or not, as the last storm left it
                name = f"/dev/shm/{segment}"
                self._before.descriptors[name] = max(self._before.descriptors[name], MAPPINGS)
        else:
            await self._nothing_more_than(self._before, f"after round {self.rounds + 1}")
        self.memory.look(self.elapsed)
        self.rounds += 1

    async def _streams(self, seconds: float, name: str) -> None:
        end = time.monotonic() + seconds
        workers = [
            asyncio.ensure_future(
                live(
                    self.world,
                    self.tally,
                    random.Random(f"{self.seed}-{name}-{number}"),
                    lambda: self.stopping or time.monotonic() > end,
                )
            )
            for number in range(self.world.streams)
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)

    async def _nothing_held(self) -> None:
        held: dict[str, int] = {}
        with anyio.move_on_after(LET_GO_S):
            while held := await self.world.held():  # noqa: ASYNC110
                await anyio.sleep(0.2)
        if held and (held := await self.world.of_clients(held)):
            self.tally.left.append(f"at the cache server after round {self.rounds + 1}: {held}")

    async def _nothing_more_than(self, before: Holdings, when: str) -> None:
        if more := await until_no_more_than(before, self.world.owns, LET_GO_S):
            self.tally.left.append(f"in this process {when}: {more}")

    def found(self) -> dict[str, Any]:
        """Everything that was counted, as JSON values."""
        wrong = []
        if self.memory.growth() > MOST_GROWTH:
            wrong.append(f"memory grew by {self.memory.growth() / 2**20:.0f} MiB after the warm-up")
        return {
            "world": self.world.name,
            "seconds": self.elapsed,
            "seed": self.seed,
            "rounds": self.rounds,
            "streams_at_once": self.world.streams,
            **self.tally.to_dict(),
            "held_after_first_round": self._before.counts() if self._before else None,
            "memory": self.memory.to_dict(),
            "memory_wrong": wrong,
            **self.world.describe(),
            "ok": not self.tally.bad and not wrong,
        }


def show(found: dict[str, Any]) -> None:
    """One table."""
    table = Table(title=f"Soak, {found['world']}, {found['seconds'] / 60:.1f} min", title_justify="left")
    table.add_column("what")
    table.add_column("count", justify="right")
    table.add_column("of which", max_width=110)

    def row(name: str, count: Any, detail: str = "") -> None:
        table.add_row(name, f"{count:,}" if isinstance(count, int) else str(count), detail)

    def listed(counts: dict[str, int]) -> str:
        ordered = sorted(counts.items(), key=lambda item: -item[1])
        more = f", {len(ordered) - SHOWN} kinds more" if len(ordered) > SHOWN else ""
        return ", ".join(f"{name} {count:,}" for name, count in ordered[:SHOWN]) + more

    row("rounds", found["rounds"], f"{found['streams_at_once']} streams at once")
    row("streams", found["streams"])
    row("operations", sum(found["operations"].values()), listed(found["operations"]))
    row("faults", sum(found["faults"].values()), listed(found["faults"]))
    row(
        "tokens checked",
        found["tokens_checked"],
        f"of requests that failed or were left {found['tokens_of_unfinished_requests']:,}, "
        f"said not to come from the edit {found['tokens_flagged']:,}",
    )
    row("wrong tokens", found["wrong_tokens"])
    row("states checked", found["states_checked"])
    row("wrong states", found["wrong_states"])
    row("expected errors", sum(found["expected_errors"].values()), listed(found["expected_errors"]))
    row("other errors", sum(found["unexpected_errors"].values()), listed(found["unexpected_errors"]))
    row(
        "left behind", len(found["left"]), "descriptors, threads, tasks, segments; at the server locks, sessions, slots"
    )
    memory = found["memory"]
    sizes = [size for _, size in memory["samples"]]
    row(
        "memory, MiB",
        f"{sizes[-1]:.0f}",
        f"first {sizes[0]:.0f}, most {max(sizes):.0f}; after warm-up {memory['slope_mib_per_minute']:+.2f} a minute, "
        f"{memory['growth_mib']:+.1f} in all (at most {MOST_GROWTH >> 20}); shared with the server at most "
        f"{max(memory['shared']):.0f}",
    )
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)
    for line in [*found["left"], *found["wrong"], *found["memory_wrong"]]:
        print(f"WRONG {line}")
    for name, samples in found["unexpected_samples"].items():
        for sample in samples:
            print(f"WRONG {name} in {sample}")
    print("nothing wrong, nothing left behind" if found["ok"] else "NOT CLEAN")


async def progress(soak: Soak) -> None:
    """A line that tells how far it is, where standard error is a terminal."""
    tally = soak.tally
    while True:
        await asyncio.sleep(1)
        weather = "calm" if soak.world.calm else "storm"
        sys.stderr.write(
            f"\r\x1b[K{soak.elapsed:4.0f} of {soak.seconds:.0f} s, {weather}: {tally.operations.total():,} operations, "
            f"{tally.faults.total():,} faults, {tally.tokens:,} tokens checked, {tally.bad} wrong"
        )
        sys.stderr.flush()


async def soak(world: Callable[[Tally], World], seconds: float, seed: int) -> dict[str, Any]:
    """Soak a world; what was counted."""
    tally = Tally()
    running = Soak(world(tally), tally, seconds, seed)

    work = asyncio.ensure_future(running.run())

    def stop() -> None:
        """The first signal ends the round under way, the second one everything; so does the first before any round."""
        if running.stopping or not running.memory.samples:
            work.cancel()
        running.stopping = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    line = asyncio.ensure_future(progress(running)) if sys.stderr.isatty() else None
    try:
        await work
    finally:
        if line is not None:
            line.cancel()
            sys.stderr.write("\r\x1b[K")
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return running.found()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    minutes = float(os.environ.get("SOAK_MINUTES") or 10)
    add("--minutes", type=float, default=minutes, help="how long (SOAK_MINUTES, or 10)")
    add("--real", action="store_true", help="on a real vLLM and a real LMCache server, which are started here")
    add("--model", type=Path, metavar="DIR", help="--real: model folder (default: a tiny random one)")
    add("--log-dir", type=Path, metavar="DIR", help="--real: keep the servers' logs there")
    add("--pickled", action="store_true", help="KV in pickles instead of shared memory")
    add("--streams", type=int, metavar="N", help="streams at once (default: 16, --real: 8)")
    add("--seed", type=int, default=0, help="of prompts, edits, faults and cancellations (%(default)s)")
    add("--json", type=Path, metavar="OUT", help="write everything that was counted there")
    return parser.parse_args()


def world_of(options: argparse.Namespace, folder: Path) -> Callable[[Tally], World]:
    common: dict[str, Any] = {"shared_memory": not options.pickled}
    if options.real:
        from soaking.real import RealWorld

        from lmcache_stream.testing.tiny import tiny_model

        model = options.model or tiny_model(folder / "tiny")
        common |= {"model": model, "log_dir": options.log_dir, "storm_s": 40, "calm_s": 20}
        return lambda tally: RealWorld(tally, options.seed, streams=options.streams or 8, **common)
    from soaking.fakes import FakeWorld

    common |= {"storm_s": 15, "calm_s": 5}
    return lambda tally: FakeWorld(tally, options.seed, streams=options.streams or 16, **common)


def main() -> int:
    options = arguments()
    logging.getLogger("lmcache_stream").setLevel(logging.ERROR)
    try:
        if options.minutes <= 0 or (options.streams or 1) < 1:
            raise UsageError("--minutes and --streams must be above 0")
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            found = asyncio.run(soak(world_of(options, Path(folder)), 60 * options.minutes, options.seed))
    except asyncio.CancelledError:
        return 130
    except LMCacheError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    show(found)
    if options.json is not None:
        command = shlex.join(["python", "benchmarks/soak.py", *sys.argv[1:]])
        options.json.write_text(
            json.dumps(rounded(found, 6) | {"command": command, "machine": machine()}, indent=1) + "\n"
        )
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
