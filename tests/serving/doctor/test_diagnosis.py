from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from lmcache_stream import portal
from lmcache_stream.errors import UsageError
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.serving.doctor import DoctorOptions, diagnose
from lmcache_stream.serving.doctor.diagnosis import printable
from tests.serving.doctor.examination import examined, only_failure, the
from tests.serving.doctor.stack import CHUNK, options_for, stack


async def test_everything_passes_and_nothing_is_left(model: str) -> None:
    async with stack(model) as (options, server):
        clients = server.clients
        found = await examined(options)
        assert the(found, "pass") == list(found)
        assert server.clients == clients
        assert server.wrong_publications == server.wrong_unlocks == 0
    assert "0.99.0" in found["engine version"].detail
    assert "2 layers, 2 KV heads of 64" in found["geometry"].detail
    assert f"{model}/config.json" in found["geometry"].detail
    assert "packing split" in found["reading"].detail
    assert "96 tokens" in found["round trip"].detail
    assert found["prefix caching"].detail.startswith("on;")


async def test_pickles_are_a_warning(model: str) -> None:
    async with stack(model, server={"shared_memory": False}) as (options, _):
        found = await examined(options)
    assert the(found, "warn") == ["shared memory"]
    assert "--shm-name NAME --no-l1-use-lazy" in found["shared memory"].remedy
    assert the(found, "pass") == [name for name in found if name != "shared memory"]


async def test_a_probe_is_left_out_if_asked(model: str) -> None:
    async with stack(model) as (options, _):
        found = {each.name: each for each in await diagnose(replace(options, probe=False))}
    assert the(found, "skip") == ["reading"]
    assert found["round trip"].status == "pass"


async def test_a_short_context_is_examined_with_shorter_prompts(model: str) -> None:
    async with stack(model, max_model_len=1000) as (options, _):
        found = await examined(options)
    assert the(found, "pass") == list(found)
    async with stack(model, max_model_len=CHUNK) as (options, _):
        found = await examined(options)
    only_failure(found, "offload", "no chunk of 32", "smaller --chunk-size")


async def test_what_an_engine_does_not_publish_is_no_fault(model: str) -> None:
    async with stack(model, metrics="") as (options, _):
        found = await examined(options)
    assert found["prefix caching"].detail.startswith("not told")
    assert found["cache version"].detail == "not published"
    assert the(found, "pass") == list(found)


async def test_cancelled_it_leaves_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack(model, offloads=False) as (options, server):
        clients = server.clients
        waiting = asyncio.Event()
        wait_for = MPKVCacheContext.wait_for

        async def told(self: MPKVCacheContext, *args: Any, **given: Any) -> int:
            waiting.set()
            return await wait_for(self, *args, **given)

        monkeypatch.setattr(MPKVCacheContext, "wait_for", told)
        task = asyncio.create_task(diagnose(options))
        async with asyncio.timeout(20):
            await waiting.wait()
            assert len(server.clients) > len(clients)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert server.clients == clients
        assert server.held == {}


def test_ctrl_c_leaves_nothing(model: str) -> None:
    held = stack(model, offloads=False)
    options, server = portal.run(held.__aenter__)
    clients = server.clients
    program = """
import argparse, sys
from lmcache_stream.serving import doctor
parser = argparse.ArgumentParser()
doctor.add_arguments(parser)
try:
    doctor.run(parser.parse_args())
except KeyboardInterrupt:
    sys.exit(130)
"""
    urls = ["--base-url", options.base_url, "--kv-url", options.kv_url, "--kv-http-url", options.kv_http_url]
    try:
        with subprocess.Popen([sys.executable, "-c", program, *urls], stdout=subprocess.PIPE) as process:
            deadline = time.monotonic() + 60
            # It looks again and again for KV that does not come.
            while server.calls["lookup"] < 3 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            assert len(server.clients) > len(clients)
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=20)[0] == b""
            assert process.returncode == 130
        assert server.clients == clients
        assert server.held == {}
    finally:
        portal.run(held.__aexit__, None, None, None)


async def test_refuses_an_engine_that_is_no_address() -> None:
    with pytest.raises(UsageError, match="--base-url is"):
        await diagnose(DoctorOptions(base_url="here", kv_url="tcp://a:1", kv_http_url="http://a"))


def test_servers_words_do_not_steer_the_terminal() -> None:
    assert "\x1b" not in printable("\x1b[2Jgone\nand more")


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_url": "http://user:hunter2@127.0.0.1:1"},
        {"kv_url": "tcp://user:hunter2@127.0.0.1:1"},
        {"kv_http_url": "http://user:hunter2@127.0.0.1:1"},
        {"kv_http_url": "http://127.0.0.1:1?key=hunter2"},
    ],
)
async def test_an_address_with_a_secret_is_refused_and_not_repeated(wrong: dict[str, Any]) -> None:
    right = options_for("http://127.0.0.1:1", "tcp://127.0.0.1:1", "http://127.0.0.1:1")
    with pytest.raises(UsageError) as caught:
        await diagnose(replace(right, **wrong))
    assert "hunter2" not in str(caught.value)
