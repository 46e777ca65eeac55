"""A real stack as a client sees it, beside the same model in plain `transformers`."""

from __future__ import annotations

import functools
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from lmcache_stream.bench.prompts import shipped_prompts
from lmcache_stream.completions import CompletionsClient
from lmcache_stream.kvcache import aconnect
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.stream import AsyncLMCacheStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from lmcache_stream.geometry import KVGeometry
    from lmcache_stream.kvcache.mp.codec import Codec
    from lmcache_stream.serving.up import ServingStack

CHUNK = 32
LENGTH = 205
COVERED = LENGTH // CHUNK * CHUNK
DECODED = 24
NEARLY_A_TIE = 1e-3
"""Logits of two tokens closer than this are one to float32: engines may choose either."""

PREFILL: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
DECODE: dict[str, Any] = {"max_tokens": DECODED, "temperature": 0, "ignore_eos": True}

_readings: dict[str, tuple[Codec, KVGeometry]] = {}


@dataclass(frozen=True)
class Served:
    """A client's end of a stack, and its model in float32."""

    stack: ServingStack
    ctx: MPKVCacheContext
    engine: CompletionsClient

    @property
    def model(self) -> Any:
        return reference_model(self.stack.model_name)

    def stream(self, prompt: list[int], **options: Any) -> AsyncLMCacheStream:
        return AsyncLMCacheStream(self.ctx, self.engine, prompt, **options)

    async def prefilled(self, prompt: list[int], **options: Any) -> AsyncLMCacheStream:
        stream = self.stream(prompt, **options)
        await stream.generate(PREFILL)
        return stream


@asynccontextmanager
async def served(stack: ServingStack) -> AsyncIterator[Served]:
    """Connect to a stack; how its KV is read is proven by the first connection to it."""
    async with CompletionsClient(stack.base_url) as engine:
        if stack.kv_url not in _readings:
            async with probed(stack, engine) as ctx:
                assert ctx.codec is not None
                assert ctx.geometry is not None
                _readings[stack.kv_url] = ctx.codec, ctx.geometry
        async with await open_context(
            stack.kv_url, http_url=stack.kv_http_url, model_name=stack.model_name, timeout=60
        ) as ctx:
            ctx.adopt(*_readings[stack.kv_url])
            yield Served(stack, ctx, engine)


@asynccontextmanager
async def probed(stack: ServingStack, engine: CompletionsClient) -> AsyncIterator[MPKVCacheContext]:
    """Connect as users do."""
    async with aconnect(stack.kv_url, stack.kv_http_url, stack.model_name, probe=engine) as ctx:
        assert isinstance(ctx, MPKVCacheContext)
        yield ctx


@functools.cache
def reference_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()


def prompts(stack: ServingStack, count: int, *, seed: int) -> list[list[int]]:
    """Prompts of `LENGTH` ids: text for a model of language, random ids for the tiny one."""
    if "SmolLM2" not in stack.model_name:
        generator = torch.Generator().manual_seed(seed)
        ids: list[list[int]] = torch.randint(10, 2000, (count, LENGTH), generator=generator).tolist()
        return ids
    tokenizer = AutoTokenizer.from_pretrained(stack.model_name)
    texts = shipped_prompts()
    del texts[1]  # it ends amid a sentence that is repeated, whatever came before: no edit of it shows
    return [prompt.token_ids(tokenizer)[:LENGTH] for prompt in texts[:count]]


@dataclass(frozen=True)
class Departure:
    """A step at which an engine chose another token than the reference."""

    step: int
    expected: int
    chosen: int
    gap: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.chosen} for {self.expected}, logits {self.gap:.1e} apart"


@torch.no_grad()
def departures(model: Any, kv: torch.Tensor | None, ids: list[int], decoded: list[int]) -> list[Departure]:
    """Where a greedy decode after cache `kv` `[2, L, T, D]` (None: empty) and then `ids` leaves `decoded`.

    After each of them the reference goes on from what the engine chose.
    """
    cache = DynamicCache()
    past = 0
    if kv is not None:
        past = kv.shape[2]
        for layer in range(kv.shape[1]):
            keys, values = (
                kv[plane, layer].view(past, -1, model.config.head_dim).transpose(0, 1)[None].clone() for plane in (0, 1)
            )
            cache.update(keys, values, layer)
    feed = [*ids, *decoded[:-1]]
    positions = torch.arange(past, past + len(feed))[None]
    logits = model(torch.tensor([feed]), cache=cache, position_ids=positions, use_cache=True).logits[0]
    found = []
    for step, (row, chosen) in enumerate(zip(logits[len(ids) - 1 :], decoded, strict=True)):
        expected = int(row.argmax())
        if expected != chosen:
            found.append(Departure(step, expected, chosen, float(row[expected] - row[chosen])))
    return found


def equal_tokens(model: Any, kv: torch.Tensor | None, ids: list[int], decoded: list[int]) -> str:
    """Hold what an engine decoded against the reference, and say what came out."""
    found = departures(model, kv, ids, decoded)
    assert all(departure.gap < NEARLY_A_TIE for departure in found), [str(departure) for departure in found]
    ties = "".join(f" ({departure})" for departure in found)
    return f"{len(decoded) - len(found)} of {len(decoded)}{ties}"


async def sessions(stack: ServingStack) -> int:
    """Sessions that are open at the cache server, of clients and of the engine."""
    count: int = (await stack.status())["active_sessions"]
    return count


async def nothing_held(stack: ServingStack) -> None:
    """Wait until the cache server counts no session, lock or reservation.

    Where the server pulls the KV, sessions do not count: LMCache 0.5.6 opens that of a request again when it pulls
    after vLLM has ended it.
    """
    held: dict[str, int] = {}
    with anyio.move_on_after(10):
        while True:
            status = await stack.status()
            l1 = status["storage_manager"]["l1_manager"]
            counts = {"active_prefetch_jobs": status["active_prefetch_jobs"]}
            if not stack.options.lmcache_driven:
                counts["active_sessions"] = status["active_sessions"]
            counts |= {name: l1[name] for name in ("write_locked_count", "read_locked_count", "temporary_count")}
            held = {name: count for name, count in counts.items() if count}
            if not held:
                return
            await anyio.sleep(0.1)
    pytest.fail(f"held at the cache server after 10 s: {held}")


def show(capsys: pytest.CaptureFixture[str], figures: str) -> None:
    """Write past the capture: what was measured belongs to the output of a run."""
    with capsys.disabled():
        sys.stdout.write(f"\n    {figures}\n")
