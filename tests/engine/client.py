"""A bare client of /v1/completions, and plain transformers as the reference."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import aiohttp
import torch

from lmcache_stream.bench.scoring import cache_argument


@dataclass
class Answer:
    ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    usage: dict[str, Any]
    events: list[dict[str, Any]]

    @property
    def cached_tokens(self) -> int:
        cached: int = self.usage["prompt_tokens_details"]["cached_tokens"]
        return cached


async def post(base_url: str, path: str, body: object) -> tuple[int, str, bytes]:
    async with aiohttp.ClientSession(base_url) as session, session.post(path, json=body) as response:
        return response.status, response.headers["Content-Type"], await response.read()


def events_of(raw: bytes) -> list[dict[str, Any]]:
    parts = raw.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""]
    assert all(part.startswith(b"data: ") for part in parts[:-1])
    return [json.loads(part[len(b"data: ") :]) for part in parts[:-2]]


async def complete(base_url: str, prompt: list[int] | str, **params: Any) -> Answer:
    """Stream a completion, greedy and without end-of-text unless `params` say otherwise."""
    body = {
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        **params,
    }
    status, content_type, raw = await post(base_url, "/v1/completions", body)
    assert (status, content_type) == (200, "text/event-stream; charset=utf-8"), raw
    events = events_of(raw)
    choices = [event["choices"][0] for event in events[:-1]]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    return Answer(
        ids=[token for choice in choices for token in choice["token_ids"]],
        text="".join(choice["text"] for choice in choices),
        finish_reason=choices[-1]["finish_reason"],
        stop_reason=choices[-1]["stop_reason"],
        usage=events[-1]["usage"],
        events=events,
    )


def some_ids(count: int, seed: int = 0) -> list[int]:
    chance = random.Random(f"{seed}")
    return [chance.randrange(3, 2048) for _ in range(count)]


def greedy(model: Any, prompt: list[int], tokens: int, cache: Any = None) -> list[int]:
    """Greedy tokens of plain transformers: `generate`, or step by step behind a given cache."""
    if cache is None:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None
        )
        return [int(token) for token in output[0, len(prompt) :]]
    given = {cache_argument(model): cache}
    chosen: list[int] = []
    step = prompt
    with torch.inference_mode():
        for _ in range(tokens):
            chosen.append(int(model(torch.tensor([step]), **given, use_cache=True).logits[0, -1].argmax()))
            step = chosen[-1:]
    return chosen
