"""`lmcache-stream up`: an LMCache server and a vLLM that fit together, as one thing to start and stop."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from lmcache_stream.console import JsonOutput, add_json_flag
from lmcache_stream.errors import LMCacheError, UsageError
from lmcache_stream.serving.options import PYTHON_VARIABLE, SCHEMES, StackOptions, default_python
from lmcache_stream.serving.stack import CacheServer, ServingStack

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CacheServer", "ServingStack", "add_arguments", "options_from", "run"]

COMMAND_GRACE = 10.0

COMMAND_VARIABLES = (
    "LMCACHE_STREAM_KV_URL",
    "LMCACHE_STREAM_KV_HTTP_URL",
    "LMCACHE_STREAM_KV_MODEL",
    "LMCACHE_STREAM_BASE_URL",
    "LMCACHE_STREAM_SERVED_MODEL",
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
