"""What the benchmarks share: pinned processes, interleaved repeats, loop lag, one table and one JSON line."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from types import TracebackType
    from typing import Self

K = TypeVar("K")
T = TypeVar("T")

CORES = sorted(os.sched_getaffinity(0))
CLIENT_CORE = CORES[0]
SERVER_CORE = CORES[-1]
LAG_INTERVAL = 0.01  # often enough for a 99th percentile, seldom enough to cost next to nothing

_fork = multiprocessing.get_context("fork")


def arguments(description: str | None, *, repeats: int = 5) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=repeats, help="interleaved rounds; medians are reported")
    parser.add_argument(
        "--json", action="store_true", help="put the machine, the command and every row into the last line, too"
    )
    return parser


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packages = ["torch", "aiohttp", "msgspec", "requests", "httpx", "openai", "uvloop", "pyzmq", "lmcache"]
    return {
        "cpu": cpu,
        "cores": len(CORES),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version for name in packages if (version := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def raise_file_limit() -> int:
    """Lifts the soft limit of open files to the hard one; each open stream takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def cpu_seconds(pid: int) -> float:
    """CPU time of another process so far, all its threads together."""
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3), which Python does not wrap


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes() -> int:
    """Highest resident memory of this process so far; a forked child counts from its own beginning."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_child(fn: Callable[..., T], /, *args: Any, core: int | None = CLIENT_CORE, **kwargs: Any) -> T:
    """`fn(*args, **kwargs)` in a fresh child process on `core` (None: on any), forked so that imports are paid once."""
    _settle()
    ours, theirs = _fork.Pipe(duplex=False)
    child = _fork.Process(target=_answer, args=(theirs, core, fn, args, kwargs), daemon=True)
    child.start()
    theirs.close()
    try:
        result, error = ours.recv()
    except EOFError:
        child.join()
        raise SystemExit(f"a measuring process died with exit code {child.exitcode}") from None
    child.join()
    if error is not None:
        raise SystemExit(f"a measuring process failed:\n{error}")
    answer: T = result
    return answer


def _answer(
    connection: Connection, core: int | None, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        if core is not None:
            os.sched_setaffinity(0, {core})
        connection.send((fn(*args, **kwargs), None))
    except BaseException:
        connection.send((None, traceback.format_exc()))


def _settle() -> None:
    """What is imported by now is no garbage: no child's collector should walk over it."""
    gc.collect()
    gc.freeze()


@dataclass
class Server:
    """A server in a process of its own.

    Args:
        address: What it announced when it was ready.
        pid: Its process.
    """

    address: str
    pid: int

    def cpu_seconds(self) -> float:
        """CPU time that it has used."""
        return cpu_seconds(self.pid)


@contextmanager
def forked_server(serve: Callable[[Callable[[str], None]], None], core: int | None = SERVER_CORE) -> Iterator[Server]:
    """A server on `core`: `serve(ready)` calls `ready(address)` when it listens, and is killed at the end."""
    _settle()
    ours, theirs = _fork.Pipe(duplex=False)
    child = _fork.Process(target=_serve, args=(theirs, core, serve), daemon=True)
    child.start()
    theirs.close()
    try:
        yield Server(ours.recv(), child.pid or 0)
    finally:
        child.kill()
        child.join()


def _serve(connection: Connection, core: int | None, serve: Callable[[Callable[[str], None]], None]) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    serve(connection.send)


@contextmanager
def started(
    argv: Sequence[str], *, core: int | None = SERVER_CORE, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A command as a server on `core`; the first line that it prints is its address."""
    command = list(argv) if core is None else ["taskset", "-c", str(core), *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
    try:
        assert process.stdout is not None
        yield Server(process.stdout.readline().strip(), process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def interleaved(cases: Mapping[K, Callable[[], T]], repeats: int) -> dict[K, list[T]]:
    """Results of each case, from `repeats` rounds over all of them; no case always follows the same one."""
    results: dict[K, list[T]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(repeats):
        for name in order_of_round(names, turn):
            results[name].append(cases[name]())
    return results


def order_of_round(names: Sequence[K], turn: int) -> list[K]:
    """The order of round number `turn`: it begins with another one each time, and every other round runs backwards."""
    first = turn % max(1, len(names))
    order = [*names[first:], *names[:first]]
    return order if turn % 2 == 0 else order[::-1]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def span(values: Sequence[float]) -> str:
    """The lowest and the highest, as a cell."""
    return f"{_cell(float(min(values)))} - {_cell(float(max(values)))}"


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Median of the ratios of one round each, which what slows a whole round down does not touch."""
    return statistics.median(value / of for value, of in zip(values, base, strict=True))


def markdown_row(cells: Iterable[object]) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def between_markers(page: str, name: str, text: str) -> str:
    """The page with `text` between `<!-- NAME -->` and `<!-- end of NAME -->`."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    between = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    return between.sub(lambda _: f"{begin}\n{text}\n{end}", page)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


@dataclass
class LoopLag:
    """How late the running event loop wakes a sleeper, looked at every few milliseconds: `async with LoopLag() as lag`.

    Attributes:
        seconds: How late each time.
    """

    interval: float = LAG_INTERVAL
    seconds: list[float] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        await asyncio.sleep(0)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _watch(self) -> None:
        due = time.perf_counter() + self.interval
        try:
            while True:
                await asyncio.sleep(due - time.perf_counter())
                now = time.perf_counter()
                self.seconds.append(now - due)
                due = now + self.interval
        except asyncio.CancelledError:
            self.seconds.append(max(0.0, time.perf_counter() - due))

    @property
    def max_ms(self) -> float:
        """The longest, in milliseconds."""
        return 1e3 * max(self.seconds, default=0.0)

    @property
    def p99_ms(self) -> float:
        """The 99th percentile, in milliseconds."""
        return 1e3 * percentile(self.seconds, 99)


def rounded(value: Any, digits: int = 3) -> Any:
    """`value` with every float in it cut to `digits` significant ones, for people to read."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value


def report(
    args: argparse.Namespace,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> None:
    """Prints the table, the notes, and last the summary as one line of JSON.

    Args:
        args: Of a parser made by `arguments`.
        title: What the table shows.
        rows: Column name -> cell; columns in the order in which they first appear.
        summary: The JSON object.
        notes: Lines between the two.
    """
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    facts = machine()
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in names:
        numbers = all(isinstance(row.get(name, 0), int | float | None) for row in rows)
        table.add_column(name, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    console.print(table)
    for note in notes:
        console.print(note, markup=False)
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, Python {facts['python']}; "
        f"medians of {args.repeats} interleaved rounds",
        markup=False,
    )
    line = dict(rounded(summary))
    if args.json:
        command = shlex.join(["python", *(Path(arg).name if index == 0 else arg for index, arg in enumerate(sys.argv))])
        line |= {
            "title": title,
            "rows": rounded(list(rows)),
            "notes": list(notes),
            "repeats": args.repeats,
            "command": command,
            "machine": facts,
        }
    print(json.dumps(line), flush=True)


def skip(reason: str) -> None:
    """Says why there is nothing to measure here, last as one line of JSON."""
    print(f"skipped: {reason}")
    print(json.dumps({"skipped": reason}), flush=True)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        short = f"{value:.3g}"
        return f"{value:,.0f}" if "e" in short else short
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def completion_body(tokens: int) -> list[bytes]:
    """The events of one streamed completion in vLLM's shape, one token an event, with usage and `[DONE]` at the end."""
    head = {"id": "cmpl-86e2dc614250e884", "object": "text_completion", "created": 1795968331, "model": "fake"}
    events: list[bytes] = []
    for index in range(tokens):
        choice = {
            "index": 0,
            "text": f" word{index % 10}",
            "logprobs": None,
            "finish_reason": "length" if index == tokens - 1 else None,
            "stop_reason": None,
            "prompt_token_ids": list(range(300, 380)) if index == 0 else None,
            "token_ids": [1000 + index],
        }
        events.append(_event({**head, "choices": [choice]}))
    usage = {"prompt_tokens": 80, "total_tokens": 80 + tokens, "completion_tokens": tokens}
    return [*events, _event({**head, "choices": [], "usage": usage}), b"data: [DONE]\n\n"]


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


@contextmanager
def fake_engine(tokens: int, pace: float | None = None, hold: float = 0.0) -> Iterator[Server]:
    """A fake engine on the server's core whose answers are made beforehand, so that it has little to do.

    As uvicorn does, it sends every event in an HTTP chunk of its own.

    Args:
        tokens: Of every answer, one an event.
        pace: Seconds between two events of a stream; 0: each in a write of its own, the streams in turn, as fast as it
            can; None: the whole answer in one write.
        hold: Seconds from the first request to the answers of all that have come by then, so that streams are open
            together and none is over before the next one begins.
    """
    from lmcache_stream.testing import FakeEngine, RecordedRequest, Reply

    events = completion_body(tokens)
    if pace is None:
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
        reply = Reply(body=chunks + b"0\r\n\r\n", chunked=False, headers={"transfer-encoding": "chunked"})
    else:
        reply = Reply(body=b"".join(events), pace=pace)

    class Together(FakeEngine):
        answers_at = 0.0

        def _reply_to(self, request: RecordedRequest) -> tuple[Reply, Iterable[bytes]]:
            answer, writes = super()._reply_to(request)
            now = time.monotonic()
            if now > self.answers_at:
                self.answers_at = now + hold
            return replace(answer, header_delay=self.answers_at - now), writes

    def serve(ready: Callable[[str], None]) -> None:
        async def main() -> None:
            async with Together(default=reply) if hold else FakeEngine(default=reply) as engine:
                ready(engine.base_url)
                await asyncio.Event().wait()

        asyncio.run(main())

    with forked_server(serve) as server:
        yield server
