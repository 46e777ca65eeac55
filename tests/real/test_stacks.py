"""Each stack is up, answers, and is registered at its cache server as its tests expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
import pytest

from lmcache_stream.serving.options import CacheOptions
from lmcache_stream.serving.up import CacheServer
from tests.real.conftest import STACKS

if TYPE_CHECKING:
    from lmcache_stream.serving.up import ServingStack

CHUNK = 32


async def complete(stack: ServingStack, prompt: list[int], **given: Any) -> dict[str, Any]:
    request = {"model": stack.served_model_name, "prompt": prompt, "max_tokens": 2, "temperature": 0, **given}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"{stack.base_url}/v1/completions", json=request) as response,
    ):
        answer: dict[str, Any] = await response.json()
        return answer


async def cached_tokens(stack: ServingStack, prompt: list[int], **given: Any) -> int:
    answer = await complete(stack, prompt, **given)
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


async def objects(stack: ServingStack) -> int:
    """Chunks in the cache, of all ranks."""
    count: int = (await stack.status())["storage_manager"]["l1_manager"]["total_object_count"]
    return count


async def wait_for_objects(stack: ServingStack, count: int) -> None:
    with anyio.fail_after(20):
        while await objects(stack) < count:  # noqa: ASYNC110
            await anyio.sleep(0.05)


@pytest.mark.parametrize("stack", STACKS, indirect=True)
async def test_each_rank_is_registered(stack: ServingStack, request: pytest.FixtureRequest) -> None:
    ranks = 2 if stack.options.tensor_parallel_size == 2 else 1
    registered = await stack.registrations()
    assert [each["world_size"] for each in registered] == [ranks] * ranks
    status, config = await stack.status(), await stack.cache.config()
    table = "cache_context_meta" if stack.options.lmcache_driven else "non_cuda_context_meta"
    assert len(status[table]) == ranks
    assert config["mp"]["chunk_size"] == CHUNK
    assert config["mp"]["transport"] == stack.options.transport
    assert bool(config["mp"]["shm_name"]) == stack.options.shared_memory


@pytest.mark.parametrize("stack", STACKS, indirect=True)
async def test_a_prompt_is_offloaded_and_found_again_under_its_salt_only(stack: ServingStack) -> None:
    prompt = [300 + 7 * index % 1500 for index in range(3 * CHUNK + 5)]
    ranks = stack.options.tensor_parallel_size
    before = await objects(stack)
    assert await cached_tokens(stack, prompt, cache_salt="one") == 0
    await wait_for_objects(stack, before + 3 * ranks)
    assert await cached_tokens(stack, prompt, cache_salt="one") == 3 * CHUNK
    assert await objects(stack) == before + 3 * ranks
    assert await cached_tokens(stack, prompt, cache_salt="two") == 0
    await wait_for_objects(stack, before + 6 * ranks)


@pytest.mark.parametrize("stack", STACKS, indirect=True)
async def test_a_prompt_of_whole_chunks_has_its_last_token_recomputed(stack: ServingStack) -> None:
    prompt = [310 + 11 * index % 1500 for index in range(3 * CHUNK)]
    before = await objects(stack)
    assert await cached_tokens(stack, prompt) == 0
    await wait_for_objects(stack, before + 3 * stack.options.tensor_parallel_size)
    assert await cached_tokens(stack, prompt) == 3 * CHUNK - 1


@pytest.mark.parametrize("transport", ["zmq", "grpc"])
async def test_a_cache_server_comes_back_in_the_same_place(real_python: str, transport: Any) -> None:
    async with CacheServer(CacheOptions(python=real_python, l1_gib=0.1, transport=transport)) as server:
        await server.kill()
        assert server.process.returncode is not None
        await server.start()
        assert (await server.status())["is_healthy"]
        assert (await server.config())["mp"]["port"] == server.port
