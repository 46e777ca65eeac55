"""Prefill, modify, decode on a real model over real sockets, against plain `transformers`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_stream.batch import AsyncBatchedStream, LMCacheBatchedStream
from lmcache_stream.completions import CompletionsClient
from lmcache_stream.editors import EditInput, Editor, KeyDiff, Random, SnapKV, StreamingLLM
from lmcache_stream.engine import EmbeddedEngine
from lmcache_stream.errors import EditNotUsed, UsageError
from lmcache_stream.kvcache import AsyncKVCacheContext, aconnect, connect
from lmcache_stream.stream import AsyncLMCacheStream, LMCacheStream, create_request

from .reference import forward_kv, greedy

CHUNK = 16
DECODED = 24
PREFILL: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
DECODE: dict[str, Any] = {"max_tokens": DECODED, "temperature": 0, "ignore_eos": True}


class Stack:
    """An embedded engine, its cache and a client."""

    def __init__(self, engine: EmbeddedEngine, ctx: AsyncKVCacheContext, client: CompletionsClient) -> None:
        self.engine, self.ctx, self.client = engine, ctx, client

    def stream(self, prompt: list[int], **options: Any) -> AsyncLMCacheStream:
        return AsyncLMCacheStream(self.ctx, self.client, prompt, **options)

    async def prefilled(self, prompt: list[int]) -> AsyncLMCacheStream:
        stream = self.stream(prompt)
        await stream.generate(PREFILL)
        return stream


@pytest.fixture
async def stack(tiny_model_path: Path) -> AsyncIterator[Stack]:
    url = f"memory://{uuid.uuid4().hex}?chunk_size={CHUNK}"
    async with (
        EmbeddedEngine(tiny_model_path, cache=url) as engine,
        aconnect(url) as ctx,
        CompletionsClient(engine.base_url) as client,
    ):
        yield Stack(engine, ctx, client)


def prompts(count: int, length: int = 150) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(10, 2000, (count, length), generator=generator).tolist()


@pytest.mark.parametrize("length", [CHUNK, 40, 150])
async def test_an_identity_edit_changes_nothing(stack: Stack, length: int) -> None:
    (prompt,) = prompts(1, length)
    plain = await stack.prefilled(prompt)
    edited = await plain.fork()
    receipt = await edited.modify_kv(lambda kv, tokens: (kv, tokens))
    assert receipt.chunks_stored == length // CHUNK
    metrics = await edited.generate(DECODE)
    await plain.generate(DECODE)
    assert metrics.cached_tokens == length // CHUNK * CHUNK
    assert edited.output_tokens() == plain.output_tokens()
    assert plain.output_tokens() == greedy(stack.engine.model, None, prompt, DECODED + 1)


@pytest.mark.parametrize("editor", [Random(keep=0.5, seed=1), StreamingLLM(keep=0.5, sinks=4)], ids=lambda e: e.name)
async def test_an_edited_decode_equals_transformers_over_the_same_edited_cache(stack: Stack, editor: Editor) -> None:
    for prompt in prompts(4):
        stream = await stack.prefilled(prompt)
        plain = await stream.fork()
        receipt = await stream.modify_kv(editor)
        assert (receipt.tokens_before, receipt.tokens_after) == (144, 80)

        kv = forward_kv(stack.engine.model, prompt)[:, :, :144]
        geometry = stack.engine.geometry
        edit = editor.edit(EditInput(kv=kv, tokens=tuple(prompt[:144]), geometry=geometry, chunk_size=CHUNK))
        tail = [*prompt[144:], *stream.output_tokens()]
        assert stream.tokens + stream.suffix_tokens() == [*edit.tokens, *tail]

        metrics = await stream.generate(DECODE)
        await plain.generate(DECODE)
        assert metrics.cached_tokens == receipt.tokens_after
        decoded = stream.output_tokens()[1:]
        assert decoded == greedy(stack.engine.model, edit.kv, tail, DECODED)
        assert decoded != plain.output_tokens()[1:]


async def test_an_edit_of_values_alone_is_decoded_from(stack: Stack) -> None:
    def negate_values(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        kv[1].neg_()
        return kv, tokens

    for prompt in prompts(2):
        stream = await stack.prefilled(prompt)
        await stream.modify_kv(negate_values)
        first = stream.output_tokens()
        await stream.generate(DECODE)
        kv, _ = negate_values(forward_kv(stack.engine.model, prompt)[:, :, :144], [])
        assert stream.output_tokens()[1:] == greedy(stack.engine.model, kv, [*prompt[144:], *first], DECODED)
        assert stream.output_tokens() != greedy(stack.engine.model, None, prompt, DECODED + 1)


async def test_slots_of_each_head_may_lie_in_any_order(stack: Stack) -> None:
    """Attention ignores the order of slots; that is why layers and heads may keep tokens of their own."""
    generator = torch.Generator().manual_seed(3)

    def permute(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        planes, layers, count, width = kv.shape
        by_head = kv.view(planes, layers, count, -1, stack.engine.model.config.head_dim)
        order = torch.rand(layers, count, by_head.shape[3], generator=generator).argsort(dim=1)
        index = order[None, ..., None].expand(by_head.shape)
        return by_head.gather(2, index).view(planes, layers, count, width), tokens

    (prompt,) = prompts(1)
    stream = await stack.prefilled(prompt)
    plain = await stream.fork()
    await stream.modify_kv(permute)
    await stream.generate(DECODE)
    await plain.generate(DECODE)
    assert stream.output_tokens() == plain.output_tokens()


@pytest.mark.parametrize("scope", ["layer", "head"])
async def test_layers_and_heads_may_keep_tokens_of_their_own(stack: Stack, scope: Any) -> None:
    editor = KeyDiff(keep=0.5, scope=scope)
    (prompt,) = prompts(1)
    stream = await stack.prefilled(prompt)
    receipt = await stream.modify_kv(editor)
    assert receipt.kept_positions is not None
    assert receipt.kept_positions.dim() == (2 if scope == "layer" else 3)
    kv = forward_kv(stack.engine.model, prompt)[:, :, :144]
    geometry = stack.engine.geometry
    edit = editor.edit(EditInput(kv=kv, tokens=tuple(prompt[:144]), geometry=geometry, chunk_size=CHUNK))
    tail = [*prompt[144:], *stream.output_tokens()]
    await stream.generate(DECODE)
    assert stream.output_tokens()[1:] == greedy(stack.engine.model, edit.kv, tail, DECODED)


async def test_a_second_edit_builds_on_the_first(stack: Stack) -> None:
    (prompt,) = prompts(1)
    stream = await stack.prefilled(prompt)
    await stream.modify_kv(StreamingLLM(keep=96, sinks=4))
    await stream.generate({**DECODE, "max_tokens": 8})
    receipt = await stream.modify_kv(StreamingLLM(keep=48, sinks=4))
    assert receipt.tokens_before == 96
    assert receipt.tokens_after == 48
    assert (await stream.generate(DECODE)).cached_tokens == 48


async def test_editing_while_decoding_equals_the_same_passes_and_edits_by_hand(stack: Stack) -> None:
    (prompt,) = prompts(1, 100)
    editor = StreamingLLM(keep=64, sinks=4)
    stream, by_hand = stack.stream(prompt), stack.stream(prompt)
    metrics = await stream.generate({**DECODE, "max_tokens": 48}, edit_every=20, editor=editor)
    for size in (19, 1, 0, 19, 1, 0, 8):
        if size:
            await by_hand.generate({**DECODE, "max_tokens": size})
        else:
            assert (await by_hand.modify_kv(editor)).tokens_after == 64
    assert stream.output_tokens() == by_hand.output_tokens()
    assert (metrics.input_tokens, metrics.cached_tokens, metrics.output_tokens) == (100, 0, 48)
    assert metrics.edit_shortfall == 0
    assert by_hand.last_metrics is not None
    assert by_hand.last_metrics.cached_tokens is not None
    assert by_hand.last_metrics.cached_tokens >= 64
    assert stream.output_tokens() != greedy(stack.engine.model, None, prompt, 48)


async def test_a_batch_gives_each_stream_what_it_gets_alone(stack: Stack) -> None:
    batch = AsyncBatchedStream(progress=False)
    batch.extend(stack.stream(prompt) for prompt in prompts(6, 100))
    editor = StreamingLLM(keep=0.5, sinks=4)
    await batch.prefill({"temperature": 0})
    await batch.modify(editor)
    await batch.decode(DECODE)
    for prompt, stream in zip(prompts(6, 100), batch, strict=True):
        alone = await stack.prefilled(prompt)
        await alone.modify_kv(editor)
        await alone.generate(DECODE)
        assert stream.output_tokens() == alone.output_tokens()


async def test_an_edit_evicted_before_it_is_decoded_from_is_noticed(tiny_model_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}?chunk_size={CHUNK}&max_bytes=3MiB"
    async with (
        EmbeddedEngine(tiny_model_path, cache=url) as engine,
        aconnect(url) as ctx,
        CompletionsClient(engine.base_url) as client,
    ):
        first, *others = prompts(6)
        stream = AsyncLMCacheStream(ctx, client, first)
        await stream.generate(PREFILL)
        await stream.modify_kv(StreamingLLM(keep=0.5))
        for prompt in others:
            await AsyncLMCacheStream(ctx, client, prompt).generate(PREFILL)
        with pytest.raises(EditNotUsed):
            await stream.generate(DECODE)


async def test_a_client_that_drops_its_salt_is_noticed(stack: Stack) -> None:
    async def dropping(ids: list[int], params: Any, salt: str) -> AsyncIterator[Any]:
        async for item in stack.client(ids, params, ""):
            yield item

    (prompt,) = prompts(1)
    stream = AsyncLMCacheStream(stack.ctx, dropping, prompt)
    await stream.generate(PREFILL)
    await stream.modify_kv(StreamingLLM(keep=0.5))
    with pytest.raises(EditNotUsed, match="without its cache_salt"):
        await stream.generate(DECODE)


async def test_a_cancelled_decode_frees_the_engine_and_the_stream_goes_on(stack: Stack) -> None:
    (prompt,) = prompts(1)
    stream = await stack.prefilled(prompt)
    third = asyncio.Event()

    async def follow() -> None:
        async for _ in stream.events({**DECODE, "max_tokens": 2000}):
            if stream.decoded_tokens() == 3:
                third.set()

    task = asyncio.create_task(follow())
    await third.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    so_far = stream.output_tokens()
    await stream.generate({**DECODE, "max_tokens": 4})
    assert stream.output_tokens()[: len(so_far)] == so_far
    assert stream.output_tokens() == greedy(stack.engine.model, None, prompt, len(so_far) + 4)


async def test_an_editor_without_the_queries_it_needs_is_refused_before_anything_is_fetched(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Any] = []
    stream = await stack.prefilled(prompts(1)[0])
    before = stream.tokens, stream.cache_salt
    with monkeypatch.context() as patch:
        patch.setattr(stack.ctx, "retrieve", lambda *asked, **_: fetched.append(asked))
        with pytest.raises(UsageError, match=r"snapkv .* queries .* take an editor that needs none"):
            await stream.modify_kv(SnapKV(keep=0.5))
    assert not fetched
    assert (stream.tokens, stream.cache_salt) == before


def test_the_sync_face_on_the_embedded_engine(tiny_model_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}?chunk_size={CHUNK}"
    with (
        EmbeddedEngine(tiny_model_path, cache=url) as engine,
        connect(url) as ctx,
        CompletionsClient(engine.base_url) as client,
    ):
        batch = LMCacheBatchedStream(progress=False)
        for prompt in prompts(3, 100):
            batch.add(create_request(ctx, client, prompt))
        batch.prefill({"temperature": 0})
        batch.modify(StreamingLLM(keep=0.5))
        batch.decode(DECODE)
        for prompt, stream in zip(prompts(3, 100), batch, strict=True):
            assert len(stream.output_tokens()) == DECODED + 1
            assert isinstance(stream, LMCacheStream)
            assert stream.output_tokens()[0] == greedy(engine.model, None, prompt, 1)[0]
