"""Requests that their client leaves while vLLM loads their KV."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

import anyio
import pytest

from lmcache_stream.completions import CompletionsClient
from lmcache_stream.errors import CoverageTimeout
from tests.real.served import COVERED, DECODE, prompts, served

if TYPE_CHECKING:
    from lmcache_stream.serving.up import ServingStack
    from tests.real.served import Served

ROUNDS = 6
AT_ONCE = 8


async def cached(there: Served, prompt: list[int]) -> None:
    """Have vLLM offload a prompt. It offloads none while it takes its cache server, which may stall, for dead."""
    with anyio.fail_after(200):
        while True:
            stream = await there.prefilled(prompt)
            with contextlib.suppress(CoverageTimeout):
                kv = await stream.retrieve_kv(timeout=20)
                assert kv.shape[2] == COVERED
                return


@pytest.mark.long  # the cache server stalls for half a minute in some runs, and vLLM then leaves its sessions behind
async def test_vllm_lives_when_requests_are_left_while_their_kv_is_loaded(stack_b: ServingStack) -> None:
    chance = random.Random(0)

    async def leave(client: CompletionsClient, prompt: list[int]) -> bool:
        async def ask() -> None:
            async for _ in client(prompt, DECODE):
                return

        asking = asyncio.ensure_future(ask())
        await asyncio.wait({asking}, timeout=0.05 * chance.random())
        left = asking.cancel()
        await asyncio.wait({asking})
        return left

    known = prompts(stack_b, 6, seed=17)
    async with served(stack_b) as there:
        for prompt in known:
            await cached(there, prompt)
        async with CompletionsClient(stack_b.base_url, model=stack_b.served_model_name, linger=120) as client:
            left = 0
            for _ in range(ROUNDS):
                left += sum(await asyncio.gather(*(leave(client, chance.choice(known)) for _ in range(AT_ONCE))))
        assert left > ROUNDS
        await stack_b.check()
        await there.prefilled(known[0])
