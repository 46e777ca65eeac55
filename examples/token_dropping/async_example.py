"""Token dropping with asyncio: prefill, drop half of the KV, decode, for one request and for a batch.

python examples/token_dropping/async_example.py [--model FOLDER] [--keep RATIO]
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from lmcache_stream import AsyncBatchedStream, AsyncLMCacheStream, CompletionsClient, aconnect
from lmcache_stream.bench.prompts import Prompt, shipped_prompts
from lmcache_stream.editors import StreamingLLM
from lmcache_stream.engine import EmbeddedEngine, ensure_smollm2

CACHE = "memory://async-example"


async def drop_and_decode(model: Path, keep: float, asked: list[Prompt]) -> None:
    async with (
        EmbeddedEngine(model, cache=CACHE) as engine,
        aconnect(CACHE, model_name=engine.model_name) as cache,
        CompletionsClient(engine.base_url, model=engine.model_name) as client,
    ):
        drop_tokens = StreamingLLM(keep=keep, sinks=4)
        prompts = [prompt.token_ids(engine.tokenizer) for prompt in asked]

        stream = AsyncLMCacheStream(cache, client, prompts[-1])
        await stream.generate({"max_tokens": 1, "temperature": 0})  # prefill: the engine offloads the prompt's KV
        with_all = await stream.fork()  # the same prefill, to go on from without an edit
        receipt = await stream.modify_kv(drop_tokens)  # retrieve, edit, store
        print(f"{receipt.tokens_before} tokens of KV, {receipt.tokens_after} kept.")
        print(asked[-1].question)
        for title, each in (("with all", with_all), ("with the edit", stream)):
            print(f"{title}: {each.output_text()}", end="", flush=True)
            async for event in each.events({"max_tokens": 32, "temperature": 0}):
                print(event.text, end="", flush=True)
            print()

        batch = AsyncBatchedStream(max_concurrency=8)
        batch.extend(AsyncLMCacheStream(cache, client, token_ids) for token_ids in prompts[:3])
        (await batch.prefill({"temperature": 0})).emit()
        (await batch.modify(drop_tokens, max_concurrency=2)).emit()
        (await batch.decode({"temperature": 0, "max_tokens": 32})).emit()


def main() -> None:
    parser = argparse.ArgumentParser(description="Drop a part of a prompt's KV before decoding.")
    parser.add_argument("--model", type=Path, help="folder of a Hugging Face model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--keep", type=float, default=0.5, help="share of the KV to keep (default: 0.5)")
    options = parser.parse_args()
    asyncio.run(drop_and_decode(options.model or ensure_smollm2(), options.keep, shipped_prompts()))


if __name__ == "__main__":
    main()
