"""The same KV, whichever way it went through the cache server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from lmcache_stream.serving.options import StackOptions
from lmcache_stream.serving.up import ServingStack
from tests.real.served import COVERED, prompts, served

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.conftest import Stacks


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_transports_and_transfer_modes_give_the_same_bytes(
    stacks: Stacks, real_python: str, tiny_model_path: Path, tmp_path: Path
) -> None:
    stacks.stop()
    seen: dict[tuple[bool, bool], torch.Tensor] = {}
    for lmcache_driven in (False, True):
        for shared_memory in (True, False):
            options = StackOptions(
                model=tiny_model_path,
                python=real_python,
                log_dir=tmp_path / f"{lmcache_driven}-{shared_memory}",
                dtype="float32",
                l1_gib=1.0,
                kv_gib=1.0,
                device="cpu",
                lmcache_driven=lmcache_driven,
                shared_memory=shared_memory,
            )
            async with ServingStack(options) as stack, served(stack) as client:
                (prompt,) = prompts(stack, 1, seed=11)
                stream = await client.prefilled(prompt)
                seen[lmcache_driven, shared_memory] = await stream.retrieve_kv()
    first = seen[False, True]
    assert first.shape[2] == COVERED
    for way, kv in seen.items():
        assert torch.equal(kv, first), way
