"""A user's program that runs a batch with a journal: `python -m tests.batch.job`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch

from lmcache_stream.batch import AsyncBatchedStream
from lmcache_stream.completions import CompletionsClient
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache import aconnect
from lmcache_stream.stream import AsyncLMCacheStream

MODEL = "job/model"
CHUNK = 16
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32, block_size=CHUNK)
STREAMS = 10
LENGTH = 70
OUTPUT = 12


def prompts(count: int = STREAMS) -> list[list[int]]:
    return [list(range(100 * index, 100 * index + LENGTH)) for index in range(count)]


def every_other(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return kv[:, :, ::2].contiguous(), tokens[::2]


async def run_job(engine_url: str, kv_url: str, kv_http_url: str, journal: str | None) -> dict[str, Any]:
    """Prefill, modify and decode; what came out."""
    async with (
        CompletionsClient(engine_url, model=MODEL) as engine,
        aconnect(kv_url, kv_http_url, MODEL, geometry=GEOMETRY) as cache,
    ):
        batch = AsyncBatchedStream(progress=False, max_concurrency=3, journal=journal)
        batch.extend(AsyncLMCacheStream(cache, engine, prompt) for prompt in prompts())
        restored = []
        await batch.prefill({"temperature": 0})
        restored.append(len(batch.restored))
        await batch.modify(every_other, timeout=60)
        restored.append(len(batch.restored))
        report = await batch.decode({"max_tokens": OUTPUT})
        restored.append(len(batch.restored))
        metrics: Any = report.to_dict()["metrics"]
        return {
            "outputs": [stream.output_tokens() for stream in batch],
            "texts": [stream.output_text() for stream in batch],
            "sequences": [stream.tokens + stream.suffix_tokens() for stream in batch],
            "input_tokens": [batch.perf_metrics[stream.stream_id()].input_tokens for stream in batch],
            "output_tokens": metrics["results"]["output_tokens"],
            "restored": restored,
        }


def main() -> None:
    *urls, journal, out = sys.argv[1:]
    engine_url, kv_url, kv_http_url = urls
    Path(out).write_text(json.dumps(asyncio.run(run_job(engine_url, kv_url, kv_http_url, journal))))


if __name__ == "__main__":
    main()
