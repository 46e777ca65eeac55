"""The stock LMCache SDK, live in a process of its own, beside a cache server that has no engine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from typing import Final

from lmcache_stream.serving.up import CacheServer

STOCK_MODEL: Final = "stock/Qwen3-8B"
"""36 layers, 8 KV heads of 128, bfloat16, blocks of 16 tokens."""

WITH_A_LAYOUT: Final = f"""
import json, sys
import requests
LAYOUT = {{
    "model_name": "{STOCK_MODEL}", "world_size": 1,
    "kv_cache_layout": {{"num_layers": 36, "kernel_groups": [{{
        "dtype": "torch.bfloat16", "tokens_per_block": 16, "engine_kv_format": "NL_X_NB_TWO_NH_BS_HS",
        "engine_kv_concrete_shape": "36 x [1, 2, 8, 16, 128]",
    }}]}},
}}
real_get = requests.get
def get(url, *args, **kwargs):
    answer = real_get(url, *args, **kwargs)
    if url.endswith("/status"):
        content = {{**answer.json(), "cache_context_meta": {{"1": LAYOUT}}}}
        answer.json = lambda: content
    return answer
requests.get = get
"""
"""What a script does first: the SDK asks the server's `/status` for the layout of an engine's KV, and there is none."""

_THERE_AND_BACK = (
    WITH_A_LAYOUT
    + """
import ctypes, time
import torch
url, http_url, model, shape, seed, tokens = json.loads(sys.argv[1])
from lmcache.sdk.context import LMCacheSDKContext
generator = torch.Generator().manual_seed(seed)
kv = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)
context = LMCacheSDKContext(url, http_url, model)
context.register_caches()
def say(what):
    print("@" + json.dumps(what), flush=True)
say("ready")
for number, line in enumerate(sys.stdin):
    if line.startswith("populate"):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for entry in open("/proc/self/maps"):
            if "/dev/shm/lmcache_l1_pool" in entry:
                first, last = (int(end, 16) for end in entry.split()[0].split("-"))
                assert madvise(first, last - first, 23) == 0
                say("populated")
        continue
    torch.set_num_threads(int(line))
    started = time.perf_counter()
    stored = context.store(kv, tokens, f"stock-{number}")
    between = time.perf_counter()
    got = context.retrieve(tokens, f"stock-{number}")
    took = time.perf_counter() - between
    same = stored and got is not None and torch.equal(got.view(torch.int16), kv.view(torch.int16))
    del got
    say([between - started, took] if same else None)
context.close()
"""
)


def environment() -> dict[str, str]:
    """Of a process that runs the SDK: without its banner."""
    return {**os.environ, "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "ERROR"}


class StockSDK:
    """Stores random KV of `shape` for `ids` and fetches it again; raises `RuntimeError` when it does not run."""

    def __init__(self, running: CacheServer, python: str, shape: Sequence[int], seed: int, ids: Sequence[int]) -> None:
        self._log = running.log_dir / "stock.log"
        told = json.dumps([running.kv_url, running.kv_http_url, STOCK_MODEL, list(shape), seed, list(ids)])
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-c", _THERE_AND_BACK, told],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(),
            )
        try:
            self._answer()
        except RuntimeError:
            self.close()
            raise

    def there_and_back(self, torch_threads: int) -> tuple[float, float]:
        """Seconds to store, seconds to retrieve."""
        seconds = self._ask(str(torch_threads))
        if not isinstance(seconds, list):
            raise SystemExit("the stock SDK did not bring back what it stored")
        return seconds[0], seconds[1]

    def populate(self) -> None:
        """Map every page of the pool in its process."""
        self._ask("populate")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _ask(self, what: str) -> object:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> object:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise RuntimeError((self._log.read_text().strip().splitlines() or ["no reason given"])[-1])


@contextlib.contextmanager
def stock_sdk(
    running: CacheServer, python: str, shape: Sequence[int], seed: int, ids: Sequence[int], notes: list[str]
) -> Iterator[StockSDK | None]:
    """The SDK, or None and a note where it does not run."""
    try:
        stock = StockSDK(running, python, shape, seed, ids)
    except RuntimeError as error:
        notes.append(f"The stock SDK does not run here: {error}")
        yield None
        return
    try:
        yield stock
    finally:
        stock.close()


# All of it.
