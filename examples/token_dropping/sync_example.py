"""Token dropping without async: prefill, drop half of the KV, decode, for one request and for a batch.

python examples/token_dropping/sync_example.py [--model FOLDER] [--keep RATIO]
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lmcache_stream.batch as lmc_batch
import lmcache_stream.kvcache as lmc_sdk
import lmcache_stream.stream as lmc_stream
from lmcache_stream.bench.prompts import shipped_prompts
from lmcache_stream.editors import StreamingLLM
from lmcache_stream.engine import EmbeddedEngine, ensure_smollm2
from lmcache_stream.types import Completion, PostCompletion, TokenEvent, Usage

CACHE = "memory://sync-example"


def completions_at(base_url: str, model: str) -> PostCompletion:
    """A plain, blocking callable that asks an engine and yields a `TokenEvent` for each token.

    `lmcache_stream.CompletionsClient` does the same, and all that is left out here: retries, time-outs, typed errors.
    """

    def post_completion(
        prompt_token_ids: list[int], sampling_params: Mapping[str, Any], cache_salt: str
    ) -> Iterator[TokenEvent | Completion]:
        body = {
            "model": model,
            "prompt": prompt_token_ids,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            **sampling_params,
            **({"cache_salt": cache_salt} if cache_salt else {}),  # without it, the engine never sees the edit
        }
        request = urllib.request.Request(
            f"{base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        finish_reason, usage = None, None
        with urllib.request.urlopen(request, timeout=300) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    message = json.loads(line.removeprefix(b"data: "))
                    yield from events_of(message)
                    for choice in message["choices"]:
                        finish_reason = choice["finish_reason"] or finish_reason
                    usage = message.get("usage") or usage
        yield Completion(finish_reason, usage=usage and usage_of(usage))

    return post_completion


def usage_of(usage: dict[str, Any]) -> Usage:
    """What the engine counted; `cached_tokens` shows that it took an edit from the cache."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], cached)


def events_of(message: dict[str, Any]) -> Iterator[TokenEvent]:
    """The tokens of one message of the engine: a message may bring several, and its text belongs to the last."""
    if "error" in message:
        raise RuntimeError(message["error"])
    for choice in message["choices"]:
        token_ids = choice.get("token_ids") or []
        for position, token_id in enumerate(token_ids, start=1):
            yield TokenEvent(token_id, choice["text"] if position == len(token_ids) else "")


def main() -> None:
    parser = argparse.ArgumentParser(description="Drop a part of a prompt's KV before decoding.")
    parser.add_argument("--model", type=Path, help="folder of a Hugging Face model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--keep", type=float, default=0.5, help="share of the KV to keep (default: 0.5)")
    options = parser.parse_args()

    with (
        EmbeddedEngine(options.model or ensure_smollm2(), cache=CACHE) as engine,
        lmc_sdk.connect(CACHE, model_name=engine.model_name) as ctx,
    ):
        post_completion = completions_at(engine.base_url, engine.model_name)
        drop_tokens = StreamingLLM(keep=options.keep, sinks=4)
        asked = shipped_prompts()
        prompts = [prompt.token_ids(engine.tokenizer) for prompt in asked]

        stream = lmc_stream.create_request(ctx, post_completion, prompt_token_ids=prompts[-1])
        stream.generate({"max_tokens": 1, "temperature": 0})  # prefill: the engine offloads the prompt's KV
        receipt = stream.modify_kv(drop_tokens)  # retrieve, edit, store
        stream.generate({"max_tokens": 32, "temperature": 0})  # decode from the edited KV
        print(f"{receipt.tokens_before} tokens of KV, {receipt.tokens_after} kept.")
        print(f"{asked[-1].question}\n{stream.output_text().strip()}\n")

        batch = lmc_batch.LMCacheBatchedStream()
        for token_ids in prompts[:3]:
            batch.add(lmc_stream.create_request(ctx, post_completion, token_ids))
        batch.prefill({"temperature": 0}).emit()
        batch.modify(drop_tokens).emit()
        batch.decode({"temperature": 0, "max_tokens": 32}).emit()


if __name__ == "__main__":
    main()
