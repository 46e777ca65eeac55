"""Where these examples run: a small model, its engine and a cache in this process, or a vLLM and its LMCache server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lmcache_stream import AsyncKVCacheContext, CompletionsClient, LMCacheError, UsageError, aconnect
from lmcache_stream.engine import EmbeddedEngine, ensure_smollm2

T = TypeVar("T")


@dataclass(frozen=True)
class Servers:
    """An engine, its cache, and the tokenizer of its model."""

    engine: CompletionsClient
    cache: AsyncKVCacheContext
    tokenizer: Any


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows where an example may run; the description is the example's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a Hugging Face model (default: SmolLM2-135M-Instruct)")
    servers = parser.add_argument_group("servers, all three or none")
    servers.add_argument("--base-url", help="a running vLLM, such as http://localhost:8000")
    servers.add_argument("--kv-url", help="its LMCache server, such as tcp://localhost:5555")
    servers.add_argument("--kv-http-url", help="the same server's HTTP address, such as http://localhost:8080")
    return parser


def run(example: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`; what was asked for wrongly, or a server does not do, ends it with a line and no traceback."""
    try:
        return asyncio.run(example)
    except LMCacheError as error:
        sys.exit(f"{error}")


@asynccontextmanager
async def open_servers(options: argparse.Namespace, *, queries: bool = False) -> AsyncIterator[Servers]:
    """Serve the model here, or connect to the servers of `options`.

    With `queries`, the embedded engine caches the prompts' queries, too, for editors that look at attention.
    """
    urls = (options.base_url, options.kv_url, options.kv_http_url)
    if all(urls):
        async with (
            CompletionsClient(options.base_url) as client,
            aconnect(options.kv_url, options.kv_http_url, probe=client) as cache,
        ):
            yield Servers(client, cache, await asyncio.to_thread(tokenizer_of, options.model or cache.model_name))
    elif any(urls):
        raise UsageError("--base-url, --kv-url and --kv-http-url go together: give all three, or none")
    else:
        model = options.model or await asyncio.to_thread(ensure_smollm2)
        async with (
            EmbeddedEngine(model, cache="memory://examples?max_bytes=4GiB", queries=queries) as engine,
            aconnect("memory://examples?max_bytes=4GiB", model_name=engine.model_name) as cache,
            CompletionsClient(engine.base_url, model=engine.model_name) as client,
        ):
            yield Servers(client, cache, engine.tokenizer)


def tokenizer_of(model: str | Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)
