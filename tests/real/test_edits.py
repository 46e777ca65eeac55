"""Edits that a real vLLM decodes from, against a decode of `transformers` over the same edited cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import torch

from lmcache_stream import kvcache
from lmcache_stream.completions import CompletionsClient
from lmcache_stream.editors import EditInput, Random
from lmcache_stream.errors import EditNotUsed, StoreError
from lmcache_stream.kvcache import connect
from lmcache_stream.stream import AsyncLMCacheStream, create_request
from tests.real.served import (
    CHUNK,
    COVERED,
    DECODE,
    DECODED,
    PREFILL,
    Served,
    equal_tokens,
    nothing_held,
    prompts,
    reference_model,
    served,
    show,
)
from tests.reference import forward_kv

if TYPE_CHECKING:
    from lmcache_stream.serving.up import ServingStack

HALF = Random(keep=0.5, seed=1)
KEPT = COVERED // 2


def negate_values(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    kv[1].neg_()
    return kv, tokens


async def both_decoded(client: Served, prompt: list[int], edit: Any) -> tuple[AsyncLMCacheStream, AsyncLMCacheStream]:
    """The stream decoded from the edit, and one from the same prefill without it."""
    stream = await client.prefilled(prompt)
    plain = await stream.fork()
    receipt = await stream.modify_kv(edit)
    assert receipt.tokens_before == COVERED
    metrics, _ = await asyncio.gather(stream.generate(DECODE), plain.generate(DECODE))
    assert metrics.cached_tokens == receipt.tokens_after
    assert metrics.edit_shortfall == 0
    assert len(stream.output_tokens()) == len(plain.output_tokens()) == DECODED + 1
    return stream, plain


@pytest.mark.parametrize("stack", ["A", "B", "D"], indirect=True)
async def test_half_of_the_tokens_kept_is_decoded_from(stack: ServingStack, capsys: pytest.CaptureFixture[str]) -> None:
    asked = prompts(stack, 5, seed=2)
    results = []
    async with served(stack) as client:
        pairs = await asyncio.gather(*(both_decoded(client, prompt, HALF) for prompt in asked))
        for prompt, (stream, plain) in zip(asked, pairs, strict=True):
            kv = forward_kv(client.model, prompt)[:, :, :COVERED]
            edit = HALF.edit(
                EditInput(kv=kv, tokens=tuple(prompt[:COVERED]), geometry=client.ctx.geometry, chunk_size=CHUNK)
            )
            first, *decoded = stream.output_tokens()
            tail = [*prompt[COVERED:], first]
            assert len(edit.tokens) == KEPT
            assert stream.tokens == [*edit.tokens, *tail, *decoded]
            results.append(equal_tokens(client.model, edit.kv, tail, decoded))
            assert decoded != plain.output_tokens()[1:]
            equal_tokens(client.model, None, prompt, plain.output_tokens())
        await nothing_held(stack)
    show(capsys, f"tokens equal: {', '.join(results)}")


@pytest.mark.parametrize("stack", ["A", "D"], indirect=True)
async def test_values_changed_under_the_same_ids_are_decoded_from(
    stack: ServingStack, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stack.options.prefix_caching == (stack.options.transport == "grpc")
    asked = prompts(stack, 2, seed=3)
    results = []
    async with served(stack) as client:
        pairs = await asyncio.gather(*(both_decoded(client, prompt, negate_values) for prompt in asked))
        for prompt, (stream, plain) in zip(asked, pairs, strict=True):
            kv, _ = negate_values(forward_kv(client.model, prompt)[:, :, :COVERED], [])
            first, *decoded = stream.output_tokens()
            results.append(equal_tokens(client.model, kv, [*prompt[COVERED:], first], decoded))
            assert decoded != plain.output_tokens()[1:]
    show(capsys, f"prefix caching {stack.options.prefix_caching}, tokens equal: {', '.join(results)}")


@pytest.mark.parametrize("edit", [negate_values, HALF], ids=["values", "half"])
async def test_bfloat16_edits_are_decoded_from(stack_c: ServingStack, edit: Any) -> None:
    async with served(stack_c) as client:
        for prompt in prompts(stack_c, 2, seed=4):
            stream, plain = await both_decoded(client, prompt, edit)
            assert stream.output_tokens() != plain.output_tokens()


@pytest.mark.parametrize("stack", ["B", "C", "D"], indirect=True)
async def test_an_edit_comes_back_as_it_was_stored(stack: ServingStack) -> None:
    async with served(stack) as client:
        (prompt,) = prompts(stack, 1, seed=5)
        stream = await client.prefilled(prompt)
        before = await stream.retrieve_kv()
        await stream.modify_kv(negate_values)
        after = await stream.retrieve_kv()
        assert torch.equal(after, negate_values(before, [])[0])


@pytest.mark.parametrize("stack", ["A", "C", "D"], indirect=True)
async def test_without_a_salt_such_an_edit_is_refused(stack: ServingStack) -> None:
    async with served(stack) as client:
        (prompt,) = prompts(stack, 1, seed=6)
        stream = await client.prefilled(prompt, salt_edits=False)
        plain = await stream.fork()
        with pytest.raises(StoreError, match=f"{COVERED // CHUNK} are cached under these ids already"):
            await stream.modify_kv(negate_values)
        assert (stream.tokens, stream.suffix_tokens(), stream.cache_salt) == (plain.tokens, [], "")
        await asyncio.gather(stream.generate(DECODE), plain.generate(DECODE))
        assert stream.output_tokens() == plain.output_tokens()
        await nothing_held(stack)


def test_the_sync_face(stack_d: ServingStack, capsys: pytest.CaptureFixture[str]) -> None:
    (prompt,) = prompts(stack_d, 1, seed=7)
    model = reference_model(stack_d.model_name)
    with (
        CompletionsClient(stack_d.base_url) as engine,
        connect(stack_d.kv_url, stack_d.kv_http_url, stack_d.model_name, probe=engine) as ctx,
    ):
        stream = create_request(ctx, engine, prompt)
        stream.generate(PREFILL)
        kv = stream.retrieve_kv()
        assert torch.allclose(kv, forward_kv(model, prompt)[:, :, :COVERED], rtol=0, atol=1e-3)
        receipt = stream.modify_kv(HALF)
        assert (receipt.tokens_before, receipt.tokens_after) == (COVERED, KEPT)
        tail = [*prompt[COVERED:], *stream.output_tokens()]
        decoded = [event.token_id for event in stream.events(DECODE)]
        assert stream.last_metrics is not None
        assert stream.last_metrics.cached_tokens == KEPT

        edit = HALF.edit(EditInput(kv=kv, tokens=tuple(prompt[:COVERED]), geometry=ctx.geometry, chunk_size=CHUNK))
        assert decoded == stream.output_tokens()[1:]
        show(capsys, f"tokens equal: {equal_tokens(model, edit.kv, tail, stream.output_tokens()[1:])}")

        assert kvcache.store(ctx, kv=kv, tokens=prompt[:COVERED])
        assert not kvcache.store(ctx, kv=-kv, tokens=prompt[:COVERED])
        again = kvcache.retrieve(ctx, prompt)
        assert again is not None
        assert torch.equal(again, kv)


async def clear(stack: ServingStack) -> None:
    """Let the cache server forget everything."""
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"{stack.kv_http_url}/cache/clear"),
    ):
        pass


async def test_an_edit_evicted_before_it_is_decoded_from_is_noticed(stack_d: ServingStack) -> None:
    async with served(stack_d) as client:
        (prompt,) = prompts(stack_d, 1, seed=8)
        stream = await client.prefilled(prompt)
        await stream.modify_kv(HALF)
        tokens, suffix = stream.tokens, stream.suffix_tokens()
        await clear(stack_d)
        with pytest.raises(EditNotUsed, match=f"holds 0 of the edit's {KEPT} tokens") as caught:
            await stream.generate(DECODE)
        assert (caught.value.used, caught.value.arrived) == (0, 0)
        assert (stream.tokens, stream.suffix_tokens()) == (tokens, suffix)


async def test_an_edit_evicted_when_the_request_is_under_way_is_noticed(stack_d: ServingStack) -> None:
    async with served(stack_d) as client:

        async def evicting(ids: list[int], params: Any, salt: str) -> AsyncIterator[Any]:
            if salt:
                await clear(stack_d)
            async for item in client.engine(ids, params, salt):
                yield item

        (prompt,) = prompts(stack_d, 1, seed=9)
        stream = AsyncLMCacheStream(client.ctx, evicting, prompt)
        await stream.generate(PREFILL)
        await stream.modify_kv(HALF)
        with pytest.raises(EditNotUsed, match="evicted") as caught:
            await stream.generate(DECODE)
        assert (caught.value.stored, caught.value.used, caught.value.arrived) == (KEPT, 0, DECODED)


@pytest.mark.parametrize("stack", ["A", "D"], indirect=True)
async def test_a_client_that_drops_the_salt_is_noticed(stack: ServingStack) -> None:
    async with served(stack) as client:

        async def dropping(ids: list[int], params: Any, salt: str) -> AsyncIterator[Any]:
            async for item in client.engine(ids, params, ""):
                yield item

        (prompt,) = prompts(stack, 1, seed=10)
        stream = AsyncLMCacheStream(client.ctx, dropping, prompt)
        await stream.generate(PREFILL)
        await stream.modify_kv(HALF)
        with pytest.raises(EditNotUsed, match="without its cache_salt") as caught:
            await stream.generate(DECODE)
        assert caught.value.used < caught.value.stored == KEPT
