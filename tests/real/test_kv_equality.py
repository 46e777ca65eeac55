"""KV as the client hands it out, against forward passes of the same model in `transformers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from lmcache_stream.completions import CompletionsClient
from lmcache_stream.stream import AsyncLMCacheStream
from tests.real.served import COVERED, PREFILL, probed, prompts, reference_model, show
from tests.reference import forward_kv

if TYPE_CHECKING:
    from lmcache_stream.serving.up import ServingStack

FLOAT32_ERROR = 1e-3


async def retrieved(stack: ServingStack, prompt: list[int]) -> torch.Tensor:
    async with CompletionsClient(stack.base_url) as engine, probed(stack, engine) as ctx:
        stream = AsyncLMCacheStream(ctx, engine, prompt)
        await stream.generate(PREFILL)
        return await stream.retrieve_kv()


def errors(kv: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Largest absolute error of keys and of values in each layer, `[2, L]`."""
    return (kv.float() - reference).abs().amax((2, 3))


@pytest.mark.parametrize("stack", ["A", "B", "D"], indirect=True)
async def test_float32_equals_a_forward_pass(stack: ServingStack, capsys: pytest.CaptureFixture[str]) -> None:
    (prompt,) = prompts(stack, 1, seed=1)
    kv = await retrieved(stack, prompt)
    reference = forward_kv(reference_model(stack.model_name), prompt)[:, :, :COVERED]
    assert kv.dtype is torch.float32
    assert kv.shape == reference.shape
    worst = errors(kv, reference)
    show(capsys, f"{kv.shape[1]} layers, largest error: keys {worst[0].max():.1e}, values {worst[1].max():.1e}")
    assert bool((worst < FLOAT32_ERROR).all()), worst


async def test_bfloat16_is_as_near_as_transformers_is(
    stack_c: ServingStack, capsys: pytest.CaptureFixture[str]
) -> None:
    (prompt,) = prompts(stack_c, 1, seed=1)
    kv = await retrieved(stack_c, prompt)
    reference = forward_kv(reference_model(stack_c.model_name), prompt)[:, :, :COVERED]
    rounded = forward_kv(reference_model(stack_c.model_name, torch.bfloat16), prompt)[:, :, :COVERED]
    assert kv.dtype is torch.bfloat16
    assert kv.shape == reference.shape
    ours, theirs = errors(kv, reference), errors(rounded, reference)
    ratio = ours / theirs
    show(
        capsys,
        f"{kv.shape[1]} layers, largest error: {ours.max():.1e}, of transformers {theirs.max():.1e}; "
        f"by layer at most {ratio.max():.2f} times as large",
    )
    assert bool((ratio <= 2).all()), ratio
