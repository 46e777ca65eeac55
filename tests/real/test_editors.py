"""Token-dropping editors by name, from a prefill by a real vLLM to its decode from what they kept."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lmcache_stream.editors import Edit, EditInput, KeyDiff, SnapKV, StreamingLLM
from lmcache_stream.errors import UsageError
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
    served,
    show,
)
from tests.reference import forward_kv

if TYPE_CHECKING:
    from lmcache_stream.editors import Editor
    from lmcache_stream.serving.up import ServingStack

HALF = COVERED // 2
EVERY, BUDGET = 24, 4 * CHUNK


def edited(client: Served, editor: Editor, kv: torch.Tensor, tokens: list[int]) -> Edit:
    return editor.edit(EditInput(kv=kv, tokens=tuple(tokens), geometry=client.ctx.geometry, chunk_size=CHUNK))


@pytest.mark.parametrize(
    "editor",
    [StreamingLLM(keep=0.5), KeyDiff(keep=0.5), KeyDiff(keep=0.5, scope="head")],
    ids=["streaming-llm", "keydiff", "keydiff-by-head"],
)
async def test_the_kept_half_is_decoded_from(
    stack_a: ServingStack, editor: Editor, capsys: pytest.CaptureFixture[str]
) -> None:
    results, changed = [], 0
    async with served(stack_a) as client:
        for prompt in prompts(stack_a, 2, seed=30):
            stream = await client.prefilled(prompt)
            plain = await stream.fork()
            kv = await plain.retrieve_kv()
            assert torch.allclose(kv, forward_kv(client.model, prompt)[:, :, :COVERED], rtol=0, atol=1e-3)
            edit = edited(client, editor, kv, prompt[:COVERED])
            assert edit.kept_positions is not None

            receipt = await stream.modify_kv(editor)
            assert (receipt.tokens_before, receipt.tokens_after, receipt.recomputed) == (COVERED, HALF, 0)
            assert receipt.kept_positions is not None
            assert torch.equal(receipt.kept_positions, edit.kept_positions)
            metrics, _ = await asyncio.gather(stream.generate(DECODE), plain.generate(DECODE))
            assert (metrics.cached_tokens, metrics.edit_shortfall) == (HALF, 0)

            first, *decoded = stream.output_tokens()
            tail = [*prompt[COVERED:], first]
            assert stream.tokens == [*edit.tokens, *tail, *decoded]
            results.append(equal_tokens(client.model, edit.kv, tail, decoded))
            changed += decoded != plain.output_tokens()[1:]
        await nothing_held(stack_a)
    assert changed
    show(capsys, f"tokens equal: {', '.join(results)}; {changed} of {len(results)} differ from the unedited")


async def test_snapkv_is_refused_before_anything_is_fetched(
    stack_a: ServingStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def objects() -> int:
        count: int = (await stack_a.status())["storage_manager"]["l1_manager"]["total_object_count"]
        return count

    fetched: list[Any] = []
    async with served(stack_a) as client:
        (prompt,) = prompts(stack_a, 1, seed=31)
        stream = await client.prefilled(prompt, cache_salt="snapkv")
        assert await client.ctx.wait_for(prompt, timeout=30, cache_salt="snapkv") == COVERED
        plain, before = await stream.fork(), await objects()
        with monkeypatch.context() as patch:
            patch.setattr(client.ctx, "retrieve", lambda *asked, **_: fetched.append(asked))
            with pytest.raises(
                UsageError, match=r"snapkv .* queries .* take an editor that needs none, such as .*keydiff"
            ):
                await stream.modify_kv(SnapKV(keep=0.5))
        assert not fetched
        assert await objects() == before
        await nothing_held(stack_a)

        assert (stream.tokens, stream.cache_salt, stream.last_receipt) == (plain.tokens, "snapkv", None)
        await stream.generate(DECODE)
        await plain.generate(DECODE)
        assert stream.output_tokens() == plain.output_tokens()


async def test_edits_while_decoding_are_those_made_by_hand(
    stack_a: ServingStack, capsys: pytest.CaptureFixture[str]
) -> None:
    editor = KeyDiff(keep=BUDGET, window=CHUNK)
    async with served(stack_a) as client:
        (prompt,) = prompts(stack_a, 1, seed=32)
        stream = await client.prefilled(prompt)
        by_hand = await stream.fork()

        metrics = await stream.generate({**DECODE, "max_tokens": 2 * EVERY + DECODED}, edit_every=EVERY, editor=editor)
        assert (metrics.output_tokens, metrics.cached_tokens, metrics.edit_shortfall) == (
            2 * EVERY + DECODED,
            COVERED,
            0,
        )

        edit, tail = None, []
        for _ in range(2):
            await by_hand.generate({**DECODE, "max_tokens": EVERY - 1})
            await by_hand.generate({**PREFILL, "ignore_eos": True})
            kv = await by_hand.retrieve_kv()
            covered = kv.shape[2]
            edit = edited(client, editor, kv, by_hand.tokens[:covered])
            tail = by_hand.tokens[covered:]
            receipt = await by_hand.modify_kv(editor)
            assert (receipt.tokens_before, receipt.tokens_after) == (covered, BUDGET)
        assert (await by_hand.generate(DECODE)).cached_tokens == BUDGET
        assert stream.output_tokens() == by_hand.output_tokens()
        assert stream.tokens == by_hand.tokens

        assert edit is not None
        result = equal_tokens(client.model, edit.kv, tail, by_hand.output_tokens()[-DECODED:])
        await nothing_held(stack_a)
    show(capsys, f"tokens equal after the second edit: {result}")
