"""What the engine computes, against plain transformers."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from transformers import DynamicCache

from lmcache_stream.bench.scoring import cache_argument
from lmcache_stream.engine import EmbeddedEngine
from lmcache_stream.errors import UsageError
from lmcache_stream.kvcache import aconnect
from lmcache_stream.kvcache.memory import EmbeddedCache
from lmcache_stream.types import CacheKind

from .client import complete, greedy, some_ids

CHUNK = 32


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 100, 128, 129, 257, 512])
async def test_greedy_tokens_are_those_of_transformers_cold_and_warm(
    engine: EmbeddedEngine, tiny_model: tuple[Any, Any], length: int
) -> None:
    prompt = some_ids(length, seed=length)
    expected = greedy(tiny_model[0], prompt, 12)

    cold = await complete(engine.base_url, prompt, max_tokens=12)
    warm = await complete(engine.base_url, prompt, max_tokens=12)

    assert cold.ids == expected
    assert cold.cached_tokens == 0
    assert warm.ids == expected
    assert warm.cached_tokens == min(length // CHUNK * CHUNK, length - 1)


async def test_a_longer_prompt_uses_the_cached_prefix(engine: EmbeddedEngine, tiny_model: tuple[Any, Any]) -> None:
    prompt = some_ids(170, seed=-1)
    await complete(engine.base_url, prompt[:100], max_tokens=1)

    answer = await complete(engine.base_url, prompt, max_tokens=12)

    assert answer.cached_tokens == 96
    assert answer.ids == greedy(tiny_model[0], prompt, 12)


async def test_salts_do_not_share(engine: EmbeddedEngine) -> None:
    prompt = some_ids(64, seed=-2)
    await complete(engine.base_url, prompt, max_tokens=1)
    assert (await complete(engine.base_url, prompt, max_tokens=1, cache_salt="a")).cached_tokens == 0
    assert (await complete(engine.base_url, prompt, max_tokens=1, cache_salt="a")).cached_tokens == 63


async def test_generated_tokens_are_not_cached(engine: EmbeddedEngine) -> None:
    prompt = some_ids(40, seed=-3)
    answer = await complete(engine.base_url, prompt, max_tokens=40)
    async with aconnect(url="memory://tests-engine") as ctx:
        assert await ctx.lookup(prompt + answer.ids) == 32


async def test_offloaded_kv_is_the_one_of_transformers(engine: EmbeddedEngine, tiny_model: tuple[Any, Any]) -> None:
    prompt = some_ids(300, seed=-4)
    await complete(engine.base_url, prompt, max_tokens=1)

    async with aconnect(url="memory://tests-engine") as ctx:
        kv = await ctx.retrieve(prompt)

    assert kv is not None
    assert kv.shape == (2, 4, 288, 128)
    assert not kv.is_inference()
    reference = cache_of(tiny_model[0], prompt)
    for layer in range(4):
        for plane, tensor in enumerate((reference.layers[layer].keys, reference.layers[layer].values)):
            expected = tensor[0, :, :288].transpose(0, 1).flatten(1)
            torch.testing.assert_close(kv[plane, layer], expected, atol=2e-4, rtol=2e-4)


def test_geometry(engine: EmbeddedEngine) -> None:
    geometry = engine.geometry
    assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.num_heads) == (4, 2, 64, 4)
    assert (geometry.dtype, geometry.chunk_size, geometry.planes) == (torch.float32, CHUNK, 2)
    assert geometry.rotary is not None
    assert len(geometry.rotary) == 4


def drop_every_other_chunk(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    kept = [at for at in range(len(tokens)) if at // CHUNK % 2 == 0]
    return kv[:, :, kept], [tokens[at] for at in kept]


def negate_values(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return torch.stack([kv[0], -kv[1]]), tokens


@pytest.mark.parametrize("edit", [drop_every_other_chunk, negate_values])
@pytest.mark.parametrize("tail", [0, 1, 17])
async def test_decoding_from_an_edit_equals_transformers_over_the_same_edited_cache(
    engine: EmbeddedEngine,
    tiny_model: tuple[Any, Any],
    edit: Callable[[torch.Tensor, list[int]], tuple[torch.Tensor, list[int]]],
    tail: int,
) -> None:
    prompt = some_ids(256 + tail, seed=-5 - tail)
    salt = f"{edit.__name__}-{tail}"
    unedited = await complete(engine.base_url, prompt, max_tokens=24)
    async with aconnect(url="memory://tests-engine") as ctx:
        kv = await ctx.retrieve(prompt)
        assert kv is not None
        edited, kept = edit(kv, prompt[:256])
        assert await ctx.store(edited, kept, salt)
    request = kept + prompt[256:]

    answer = await complete(engine.base_url, request, max_tokens=24, cache_salt=salt)

    computed = max(tail, 1)
    assert answer.cached_tokens == len(request) - computed
    cache = DynamicCache(config=tiny_model[0].config)
    for layer in range(4):
        keys, values = edited[:, layer, : len(request) - computed].reshape(2, 1, -1, 2, 64).transpose(2, 3)
        cache.update(keys, values, layer)
    assert answer.ids == greedy(tiny_model[0], request[len(request) - computed :], 24, cache)
    assert answer.ids != unedited.ids

    again = await complete(engine.base_url, request, max_tokens=24, cache_salt=salt)
    assert again.ids == answer.ids  # generating wrote nothing into the shared chunks


async def test_an_identity_edit_under_a_fresh_salt_changes_nothing(engine: EmbeddedEngine) -> None:
    prompt = some_ids(150, seed=-6)
    before = await complete(engine.base_url, prompt, max_tokens=24)
    async with aconnect(url="memory://tests-engine") as ctx:
        kv = await ctx.retrieve(prompt)
        assert kv is not None
        await ctx.store(kv, prompt[:128], "identity")
    after = await complete(engine.base_url, prompt, max_tokens=24, cache_salt="identity")
    assert after.cached_tokens == 128
    assert after.ids == before.ids


async def test_requests_at_once_give_the_same_tokens_as_alone(
    engine: EmbeddedEngine, tiny_model: tuple[Any, Any]
) -> None:
    prompts = [some_ids(length, seed=-7 - length) for length in (5, 40, 300, 33, 64, 700, 1, 129)]
    answers = await asyncio.gather(*(complete(engine.base_url, prompt, max_tokens=16) for prompt in prompts))
    assert [answer.ids for answer in answers] == [greedy(tiny_model[0], prompt, 16) for prompt in prompts]


async def test_queries_of_the_prompt_are_kept(tiny_model_path: Path, tiny_model: tuple[Any, Any]) -> None:
    prompt = some_ids(140, seed=-8)
    expected = queries_of(tiny_model[0], prompt)
    async with EmbeddedEngine(tiny_model_path, cache="memory://queries", queries=True, prefill_tokens=50) as engine:
        answer = await complete(engine.base_url, prompt[:70], max_tokens=4)
        assert answer.ids == greedy(tiny_model[0], prompt[:70], 4)
        longer = await complete(engine.base_url, prompt, max_tokens=4)
        assert longer.cached_tokens == 64
        async with aconnect(url="memory://queries") as ctx:
            queries = await ctx.retrieve(prompt, kind=CacheKind.QUERY)

    assert queries is not None
    assert queries.shape == (1, 4, 128, 256)
    torch.testing.assert_close(queries[0], expected[:, :128], atol=2e-4, rtol=2e-4)


async def test_queries_with_a_gap_before_them_are_not_kept(tiny_model_path: Path) -> None:
    prompt = some_ids(96, seed=-9)
    async with EmbeddedEngine(tiny_model_path, cache="memory://gap", queries=True) as engine:
        await complete(engine.base_url, prompt, max_tokens=1)
        async with aconnect(url="memory://gap") as ctx:
            kv = await ctx.retrieve(prompt[:64])
            assert kv is not None
            await ctx.store(kv, prompt[:64], "edited")
            await complete(engine.base_url, prompt, max_tokens=1, cache_salt="edited")
            assert await ctx.lookup(prompt, "edited") == 96
            assert await ctx.lookup(prompt, "edited", kind=CacheKind.QUERY) == 0


async def test_a_model_object_keeps_its_attention_after_queries(tiny_model: tuple[Any, Any]) -> None:
    model, tokenizer = tiny_model
    before = model.config._attn_implementation
    async with EmbeddedEngine(model, tokenizer=tokenizer, cache="memory://object", queries=True) as engine:
        assert engine.model is model
        assert model.config._attn_implementation != before
        await complete(engine.base_url, [5, 6, 7], max_tokens=1)
    assert model.config._attn_implementation == before


async def test_nothing_is_left_when_the_engine_has_ended(tiny_model_path: Path) -> None:
    before = set(threading.enumerate())
    async with EmbeddedEngine(tiny_model_path, cache="memory://ends") as engine:
        address = urlsplit(engine.base_url)
        assert engine.model_name == "tiny"
        await complete(engine.base_url, [5, 6, 7], max_tokens=2)
        assert EmbeddedCache._by_name["ends"].models().keys() == {"tiny"}

    assert_ended(set(threading.enumerate()) - before)
    assert "ends" not in EmbeddedCache._by_name
    with pytest.raises(ConnectionRefusedError), socket.create_connection((address.hostname or "", address.port or 0)):
        pass
    with pytest.raises(UsageError, match="not running"):
        _ = engine.base_url


async def test_requests_under_way_end_as_aborted(tiny_model_path: Path) -> None:
    engine = EmbeddedEngine(tiny_model_path, cache="memory://aborts")
    async with engine:
        prompt = some_ids(CHUNK)
        answer = asyncio.create_task(complete(engine.base_url, prompt, max_tokens=4000))
        async with aconnect(url="memory://aborts") as ctx:
            assert await ctx.wait_for(prompt, timeout=30) == CHUNK
        assert engine.unfinished_requests == 1
    assert (await answer).finish_reason == "abort"
    assert engine.unfinished_requests == 0


async def test_an_engine_can_start_again_but_not_twice(tiny_model_path: Path) -> None:
    engine = EmbeddedEngine(tiny_model_path, cache="memory://again", served_model_name="other")
    for _ in range(2):
        async with engine:
            assert engine.model_name == "other"
            assert (await complete(engine.base_url, [5], max_tokens=2, model="other")).finish_reason == "length"
            with pytest.raises(UsageError, match="started already"):
                await engine.start()


async def test_a_failed_start_lets_go(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing"):
        await EmbeddedEngine(tmp_path / "missing", cache="memory://fails").start()
    assert "fails" not in EmbeddedCache._by_name


async def test_a_cancelled_start_lets_go(tiny_model_path: Path) -> None:
    before = set(threading.enumerate())
    starting = asyncio.create_task(EmbeddedEngine(tiny_model_path, cache="memory://cancelled").start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert "cancelled" not in EmbeddedCache._by_name
    assert_ended(set(threading.enumerate()) - before)


def assert_ended(threads: set[threading.Thread]) -> None:
    for thread in threads:
        if thread.name.startswith("lmcache-stream-transfer"):  # the process's own, made at first use
            continue
        thread.join(10)
        assert not thread.is_alive(), thread.name


def cache_of(model: Any, prompt: list[int]) -> Any:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([prompt]), **{cache_argument(model): cache}, use_cache=True)
    return cache


def queries_of(model: Any, prompt: list[int]) -> torch.Tensor:
    """Post-rotary queries [L, T, Dq], computed from the model's own modules."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    found = []

    def record(module: Any, args: Any, kwargs: Any) -> None:
        hidden = kwargs["hidden_states"]
        query = module.q_norm(module.q_proj(hidden).view(*hidden.shape[:-1], -1, 64)).transpose(1, 2)
        rotated, _ = apply_rotary_pos_emb(query, query, *kwargs["position_embeddings"])
        found.append(rotated[0].transpose(0, 1).flatten(1))

    hooks = [layer.self_attn.register_forward_pre_hook(record, with_kwargs=True) for layer in model.model.layers]
    try:
        with torch.inference_mode():
            model(torch.tensor([prompt]))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found)
