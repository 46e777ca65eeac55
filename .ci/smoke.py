"""Does the main job with an installed package, outside of its checkout, with nothing but what it brings itself."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

import lmcache_stream
from lmcache_stream import AsyncLMCacheStream, CompletionsClient, KVGeometry, aconnect
from lmcache_stream.editors import StreamingLLM
from lmcache_stream.engine import EmbeddedEngine
from lmcache_stream.testing import FakeEngine, Reply
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from lmcache_stream.testing.tiny import tiny_model

GREEDY: dict[str, Any] = {"temperature": 0}


async def embedded(folder: Path) -> None:
    """Prefill, modify and decode on a tiny model in this process."""
    url = "memory://smoke?chunk_size=16"
    async with (
        EmbeddedEngine(folder, cache=url) as server,
        aconnect(url) as cache,
        CompletionsClient(server.base_url) as engine,
    ):
        stream = AsyncLMCacheStream(cache, engine, list(range(10, 138)))
        await stream.generate({**GREEDY, "max_tokens": 1})
        receipt = await stream.modify_kv(StreamingLLM(keep=0.5))
        assert (receipt.tokens_before, receipt.tokens_after) == (128, 64), receipt
        events = [event async for event in stream.events({**GREEDY, "max_tokens": 8, "ignore_eos": True})]
        assert len(events) == 8, events
    print("embedded: 128 tokens of KV became 64, and 8 were decoded from them")


async def fakes() -> None:
    """The same steps against the fakes: a cache server's KV goes out and back, and an engine's tokens arrive."""
    geometry = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32, block_size=16)
    with FakeCacheServer(chunk_size=16) as server:
        server.serve("smoke", geometry)
        async with (
            aconnect(server.url, server.http_url, "smoke", geometry=geometry) as cache,
            FakeEngine(default=Reply(tokens=[5, 6, 7])) as fake,
            CompletionsClient(fake.base_url) as engine,
        ):
            tokens = list(range(48))
            kv = torch.randn(2, 2, 48, 16)
            assert await cache.store(kv, tokens)
            back = await cache.retrieve(tokens)
            assert back is not None
            assert torch.equal(back, kv)
            stream = AsyncLMCacheStream(cache, engine, tokens)
            await stream.generate({"max_tokens": 3})
            assert stream.output_tokens() == [5, 6, 7]
    print("fakes: 48 tokens of KV went to the cache server and came back, and 3 tokens from the engine")


def command(*words: str) -> str:
    """What the installed command prints."""
    program = Path(sysconfig.get_path("scripts"), "lmcache-stream")
    run = [str(program)] if program.is_file() else [sys.executable, "-P", "-m", "lmcache_stream.cli"]
    return subprocess.run([*run, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    checkout = Path(__file__).resolve().parent.parent
    found = Path(lmcache_stream.__file__).resolve()
    assert checkout / "lmcache_stream" not in found.parents, f"this is the checkout's own code: {found}"
    print(f"lmcache-stream {lmcache_stream.__version__} from {found.parent}")
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "tiny")
        asyncio.run(embedded(model))
        asyncio.run(fakes())
        assert lmcache_stream.__version__ in command("--version")
        assert "snapkv" in command("editors")
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text(json.dumps({"prompt": "Seven lanterns are lit at dusk. " * 16}) + "\n")
        asked = ("--model", str(model), "--prompts", str(prompts), "--max-tokens", "2", "--json")
        assert len(json.loads(command("demo", *asked))["answers"]) == 1
    print("commands: --version, editors, demo")


if __name__ == "__main__":
    main()
