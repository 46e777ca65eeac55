"""What README says of the stock SDK, seen on the one that is installed."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

    from lmcache_stream.serving.up import CacheServer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SCRIPT = """
import importlib, inspect, pkgutil
import torch
import lmcache.sdk.batch
from lmcache.sdk.cache_kind import LMCacheSDKCacheKind
from lmcache.sdk.context import LMCacheSDKContext
from lmcache.sdk.request import LMCacheRequestStream

rooms = [importlib.import_module(f"lmcache.sdk.{room.name}") for room in pkgutil.iter_modules(lmcache.sdk.__path__)]
members = [
    member
    for room in rooms
    for _, held in inspect.getmembers(room, lambda held: getattr(held, "__module__", None) == room.__name__)
    for member in ([held, *vars(held).values()] if inspect.isclass(held) else [held])
]
url, http_url, model = json.loads(sys.argv[1])
context = LMCacheSDKContext(url, http_url, model)
context.register_caches()
ids = list(range(32))
first = torch.ones(2, 36, 32, 1024, dtype=torch.bfloat16)

def refuses(tensors, tokens):
    raise ValueError("no")

def engine(ids, params, salt):
    yield from ()

stored = context.store(first, ids, "same"), context.store(2 * first, ids, "same")
stream = LMCacheRequestStream([context], engine, ids + [7, 8], "same")
tails = []
for _ in range(2):
    try:
        stream.modify_kv(refuses)
    except ValueError:
        tails.append(list(stream.suffix_tokens))
print("@" + json.dumps({
    "coroutines": [str(member) for member in members if inspect.iscoroutinefunction(member)],
    "callables": sum(map(callable, members)),
    "stored": stored,
    "kept": context.retrieve(ids, "same").unique().tolist(),
    "tails": tails,
    "threads": "ThreadPoolExecutor" in inspect.getsource(lmcache.sdk.batch),
}))
context.close()
"""


@pytest.fixture
def stock_sdk(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("stock_sdk")


def test_it_blocks_keeps_what_the_cache_has_and_doubles_a_tail(
    stock_sdk: ModuleType, cache_server: CacheServer, real_python: str
) -> None:
    told = json.dumps([cache_server.kv_url, cache_server.kv_http_url, stock_sdk.STOCK_MODEL])
    done = subprocess.run(
        [real_python, "-c", stock_sdk.WITH_A_LAYOUT + SCRIPT, told],
        capture_output=True,
        text=True,
        timeout=200,
        env=stock_sdk.environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.rpartition("@")[2])
    assert found["callables"] > 40
    assert found["coroutines"] == []
    assert found["stored"] == [True, False]
    assert found["kept"] == [1.0]
    assert found["threads"]
    assert found["tails"] == [[7, 8], [7, 8, 7, 8]]
