"""The probe on KV that a real vLLM computed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from lmcache_stream.completions import CompletionsClient
from lmcache_stream.errors import GeometryError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.kvcache.mp.judge import judge
from lmcache_stream.kvcache.mp.probe import SPAN, probe_prompt
from lmcache_stream.kvcache.mp.readings import readings
from tests.real.conftest import STACKS

if TYPE_CHECKING:
    from lmcache_stream.kvcache.mp.context import MPKVCacheContext
    from lmcache_stream.serving.up import ServingStack


async def connect(stack: ServingStack, geometry: KVGeometry | None = None) -> MPKVCacheContext:
    return await open_context(
        stack.kv_url, http_url=stack.kv_http_url, model_name=stack.model_name, timeout=60, geometry=geometry
    )


@pytest.mark.parametrize("stack", STACKS, indirect=True)
async def test_finds_the_right_reading(stack: ServingStack) -> None:
    config = KVGeometry.from_config(stack.model_name)
    dtype = getattr(torch, str(stack.options.dtype))
    async with CompletionsClient(stack.base_url) as engine, await connect(stack) as context:
        result = await context.probe(engine, timeout=120)
        (accepted,) = (verdict for verdict in result.verdicts if verdict.accepted)
        assert result.codec.name == "cpu-packed"
        assert result.span >= SPAN
        assert (result.geometry.num_kv_heads, result.geometry.head_dim) == (config.num_kv_heads, config.head_dim)
        assert result.geometry.dtype is dtype
        if dtype is torch.float32:
            assert all(accepted.pairs_proven)
            assert not result.unproven
        # Nothing is read in the same KV scrambled token by token, nor under another base.
        prompt = probe_prompt(context.chunk_size)[:-1]
        assert result.geometry.rotary is not None
        rotary = result.geometry.rotary[0]
        assert rotary is not None
        off = replace(rotary, inv_freq=tuple(one * 1.01 ** (i / 32) for i, one in enumerate(rotary.inv_freq)))
        salt = "probe-again"
        async for _ in engine(prompt, {"max_tokens": 1, "temperature": 0}, salt):
            pass
        assert await context.wait_for(prompt, timeout=60, cache_salt=salt) == len(prompt)
        stored = await context.retrieve_stored(prompt, salt)
        assert stored is not None
        for chunks in stored:
            kv = torch.empty(2, config.num_layers, len(prompt), result.codec.width, dtype=dtype)
            for i, chunk in enumerate(chunks):
                result.codec.decode(chunk, kv[:, :, i * 32 : (i + 1) * 32])
            scrambled = kv[:, :, torch.randperm(len(prompt))]
            for i, chunk in enumerate(chunks):
                result.codec.encode(scrambled[:, :, i * 32 : (i + 1) * 32], chunk)
            candidates = readings(chunks[0], result.geometry, len(stored))
            assert not any(verdict.accepted for verdict in judge(chunks, prompt, candidates))
            for i, chunk in enumerate(chunks):
                result.codec.encode(kv[:, :, i * 32 : (i + 1) * 32], chunk)
            wrong = [replace(reading, rotary=off) for reading in candidates]
            assert not any(verdict.accepted for verdict in judge(chunks, prompt, wrong))


async def test_a_wrong_geometry_does_not_prove_itself(stack_d: ServingStack) -> None:
    given = replace(KVGeometry.from_config(stack_d.model_name), num_kv_heads=1, head_dim=128, rotary=None, dtype=None)
    async with CompletionsClient(stack_d.base_url) as engine:
        with pytest.raises(GeometryError):
            async with await connect(stack_d, given) as context:
                await context.probe(engine, timeout=120)
