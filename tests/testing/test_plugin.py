from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest_plugins = "pytester"

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

MAIN_JOB = """
import urllib.request

import pytest
import torch

from lmcache_stream import AsyncLMCacheStream, CompletionsClient, LMCacheStream, aconnect, connect
from lmcache_stream.testing import End, Reply

PROMPT = list(range(40))


def keep_first(kv, tokens):
    return kv[:, :, :16].contiguous(), tokens[:16]


@pytest.mark.fake_cache_server(chunk_size=8)
@pytest.mark.fake_engine(model="a/model")
@pytest.mark.parametrize("fake_cache_server", ["shared memory", "pickle"], indirect=True)
async def test_main_job(offloading_engine, fake_cache_server, kv_geometry):
    server = fake_cache_server
    async with (
        aconnect(server.url, server.http_url, "a/model", geometry=kv_geometry) as ctx,
        CompletionsClient(offloading_engine.base_url) as client,
    ):
        stream = AsyncLMCacheStream(ctx, client, PROMPT)
        await stream.generate({"max_tokens": 1})
        receipt = await stream.modify_kv(keep_first)
        assert (receipt.tokens_before, receipt.tokens_after) == (40, 16)
        metrics = await stream.generate({"max_tokens": 4})
        assert metrics.cached_tokens == 16
    assert server.held == {} and server.clients == []


@pytest.mark.fake_cache_server(chunk_size=8, shared_memory=False)
def test_sync(offloading_engine, fake_cache_server, kv_geometry):
    assert fake_cache_server.shm_name == ""
    with (
        connect(fake_cache_server.url, fake_cache_server.http_url, geometry=kv_geometry) as ctx,
        CompletionsClient(offloading_engine.base_url) as client,
    ):
        stream = LMCacheStream(ctx, client, PROMPT)
        stream.generate({"max_tokens": 1})
        stream.modify_kv(keep_first)
        assert stream.generate({"max_tokens": 4}).cached_tokens == 16


async def test_a_fault_and_waiting_for_it(fake_engine):
    fake_engine.script(Reply(end_after=1, end=End.STALL))
    async with CompletionsClient(fake_engine.base_url) as client:
        async for token in client([1, 2], {"max_tokens": 3}):
            break
        await fake_engine.disconnected()


async def test_a_proxy(fake_engine, tcp_proxy):
    proxy = tcp_proxy(fake_engine.base_url)
    async with CompletionsClient(proxy.url, model="fake") as client:
        proxy.down.cut(0)
        assert len([item async for item in client([1, 2], {"max_tokens": 3})]) == 4
    assert proxy.accepted == 2


@pytest.mark.parametrize("fake_cache_server", ["carrier pigeon"], indirect=True)
def test_no_such_transport(fake_cache_server):
    pass
"""


def test_the_fixtures(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(MAIN_JOB)
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    plugins = ("-p", "lmcache_stream.testing.plugin", "-p", "pytest_asyncio.plugin")
    result = pytester.runpytest_subprocess(*plugins, "--strict-markers", "-W", "error")
    result.assert_outcomes(passed=5, errors=1)
    result.stdout.fnmatch_lines(["*shared memory*or*pickle*not 'carrier pigeon'*"])


def test_fixtures_and_markers_are_shown(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    result = pytester.runpytest("-p", "lmcache_stream.testing.plugin", "--fixtures", "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.fake_engine(*", "@pytest.mark.fake_cache_server(*"])


def test_loading_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, lmcache_stream.testing.plugin;"
        "heavy = {'torch', 'aiohttp', 'zmq', 'msgspec', 'numpy', 'pydantic', 'rich'};"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_is_an_entry_point() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"lmcache_stream": "lmcache_stream.testing.plugin"}
