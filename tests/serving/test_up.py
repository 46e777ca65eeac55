from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lmcache_stream import cli
from lmcache_stream.serving.up import add_arguments, options_from

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(60)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_line_becomes_options() -> None:
    plain = options_from(parse("--model", "org/model"))
    assert plain.shared_memory
    assert plain.prefix_caching
    assert plain.vllm_args == ()
    assert plain.chunk_size == 32

    full = options_from(
        parse(
            *("--model", "m", "--served-model-name", "s", "--tensor-parallel-size", "2", "--chunk-size", "64"),
            *("--block-size", "64", "--kv-gib", "0.5", "--l1-gib", "3", "--dtype", "float32", "--max-model-len", "512"),
            *("--transport", "grpc", "--no-shm", "--no-prefix-caching", "--lmcache-driven", "--port", "1"),
            *("--kv-port", "2", "--kv-http-port", "3", "--log-dir", "d", "--python", "p", "--start-timeout", "9"),
            *("--", "--max-num-seqs", "8", "--seed", "1"),
        )
    )
    assert (full.model, full.served_model_name, full.tensor_parallel_size) == ("m", "s", 2)
    assert (full.chunk_size, full.block_size, full.kv_gib, full.l1_gib) == (64, 64, 0.5, 3.0)
    assert (full.dtype, full.max_model_len, full.transport) == ("float32", 512, "grpc")
    assert (full.shared_memory, full.prefix_caching, full.lmcache_driven) == (False, False, True)
    assert (full.port, full.kv_port, full.kv_http_port) == (1, 2, 3)
    assert (full.log_dir, full.python, full.start_timeout) == (Path("d"), "p", 9.0)
    assert full.vllm_args == ("--max-num-seqs", "8", "--seed", "1")


def test_options_that_cannot_be_right_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--model", "m", "--chunk-size", "33"]) == 2
    assert "multiple of the block size" in capsys.readouterr().err


def test_a_server_that_dies_exits_with_1(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STANDIN_LMCACHE", "dies")
    assert cli.main(["up", "--model", "m", "--log-dir", str(stand_ins / "logs")]) == 1
    assert "no room for the pool" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 5])
def test_a_command_runs_while_both_are_up(
    stand_ins: Path, capfd: pytest.CaptureFixture[str], left_in_shm: Callable[[], set[str]], status: int
) -> None:
    command = f"echo $LMCACHE_STREAM_KV_URL $LMCACHE_STREAM_BASE_URL $LMCACHE_STREAM_KV_MODEL; exit {status}"
    words = ("--model", "org/model", "--log-dir", str(stand_ins / "logs"), "--exec", command)
    assert cli.main(["up", *words, "--kv-port", "5555", "--port", "0"]) == status
    assert re.search(r"^tcp://127.0.0.1:5555 http://127.0.0.1:\d+ org/model$", capfd.readouterr().out, re.MULTILINE)
    assert left_in_shm() == set()


def test_a_command_ends_when_a_server_does(stand_ins: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crash = "import os, urllib.request as u; u.urlopen(os.environ['LMCACHE_STREAM_BASE_URL'] + '/crash')"
    command = f'{sys.executable} -c "{crash}" 2>/dev/null; exec sleep 600'
    assert cli.main(["up", "--model", "org/model", "--log-dir", str(stand_ins / "logs"), "--exec", command]) == 1
    assert "vLLM ended with status 7" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("when", ["starting", "running"])
async def test_a_signal_stops_both(
    stand_ins: Path,
    monkeypatch: pytest.MonkeyPatch,
    left_in_shm: Callable[[], set[str]],
    number: signal.Signals,
    when: str,
) -> None:
    if when == "starting":
        monkeypatch.setenv("STANDIN_VLLM", "silent")
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", cli.__name__, "up", "--model", "org/model", "--log-dir", str(stand_ins / "logs")),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert program.stdout is not None
    said = await program.stdout.readuntil(b"logs in" if when == "starting" else b"Ctrl-C stops both.")
    program.send_signal(number)
    rest, _ = await program.communicate()
    assert program.returncode == 0
    assert b"stopping both" in rest
    assert (b" = connect(" in said) == (when == "running")
    assert left_in_shm() == set()


async def test_json_says_where_both_are_and_nothing_else(stand_ins: Path) -> None:
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", cli.__name__, "up", "--model", "org/model", "--log-dir", str(stand_ins / "logs")),
        "--json",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert program.stdout is not None
    found = json.loads(await program.stdout.readuntil(b"\n}\n"))
    program.send_signal(signal.SIGINT)
    rest, said = await program.communicate()
    assert program.returncode == 0
    assert (rest, b"Ctrl-C stops both." in said) == (b"", True)
    assert (found["model"], found["kv_model"]) == ("model", "org/model")
    assert found["base_url"].startswith("http://127.0.0.1:")
    assert found["kv_url"].startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
        (("--log-dir", "/proc/nowhere"), "--log-dir takes a folder that can be written"),
    ],
)
def test_what_this_machine_refuses_is_said(
    stand_ins: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["up", "--model", "org/model", *words]) == 2
    assert said in capsys.readouterr().err


def test_json_does_not_go_with_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--model", "org/model", "--exec", "true", "--json"]) == 2
    assert "--json does not go with --exec" in capsys.readouterr().err
