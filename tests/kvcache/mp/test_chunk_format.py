from __future__ import annotations

import pytest
import torch

from lmcache_stream.errors import GeometryError, UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.context import StoreOutcome
from lmcache_stream.kvcache.mp.codec import CPUPacked, Fused, Split
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

from .opened import GEOMETRY, MODEL, TOKENS, made_kv, opened, retrieved


async def test_the_chunks_tell_what_nobody_else_does(shm_server: FakeCacheServer) -> None:
    async with opened(shm_server) as known, opened(shm_server, geometry=None) as unknown:
        kv = made_kv()
        with pytest.raises(GeometryError, match="retrieve some first"):
            await unknown.put(kv, TOKENS)
        await known.put(kv, TOKENS)
        with pytest.raises(GeometryError, match="retrieve some first"):
            await unknown.put(kv, TOKENS)
        assert torch.equal(await retrieved(unknown, TOKENS), kv)
        assert await unknown.put(kv, TOKENS, "salt") == StoreOutcome(4, taken=4)
        assert torch.equal(await retrieved(known, TOKENS, "salt"), kv)
        for wrong in (kv[..., :4], kv[:, :2], kv[:1], kv.half()):
            with pytest.raises(UsageError, match=r"kv is \[2, 3, T, 8\] of torch.float32 in the cache"):
                await unknown.put(wrong, TOKENS, "another salt")
    assert shm_server.held == {}


async def test_a_geometry_without_a_dtype_learns_it(shm_server: FakeCacheServer) -> None:
    geometry = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4)
    async with opened(shm_server) as known, opened(shm_server, geometry=geometry) as other:
        kv = made_kv()
        with pytest.raises(GeometryError, match="dtype"):
            await other.put(kv, TOKENS)
        await known.put(kv, TOKENS)
        await retrieved(other, TOKENS)
        assert other.geometry is not None
        assert other.geometry.dtype == torch.float32
        assert await other.put(kv, TOKENS, "salt") == StoreOutcome(4, taken=4)


async def test_a_proven_reading_is_enough_to_store(shm_server: FakeCacheServer) -> None:
    async with opened(shm_server, geometry=None) as context:
        context.adopt(Split(3, 2, 4), GEOMETRY)
        kv = made_kv()
        assert await context.put(kv, TOKENS) == StoreOutcome(4, taken=4)
        assert torch.equal(await retrieved(context, TOKENS), kv)


async def test_a_layout_that_can_be_read_in_two_ways_is_refused_until_one_is_proven() -> None:
    latent = KVGeometry(num_layers=3, num_kv_heads=1, head_dim=16, dtype=torch.float32, block_size=32, planes=1)
    with FakeCacheServer(chunk_size=32) as server:
        server.serve(MODEL, latent)
        geometry = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32, block_size=32)
        async with opened(server, geometry=geometry) as context:
            kv = made_kv()
            with pytest.raises(GeometryError, match="probe=engine"):
                await context.put(kv, TOKENS)
            with pytest.raises(GeometryError, match="probe=engine"):
                await context.retrieve(TOKENS)
            for codec in (Fused(3, 2, 4), CPUPacked(3, 2, 4, 32)):
                context.adopt(codec, geometry)
                assert await context.put(kv, TOKENS, codec.name) == StoreOutcome(1, taken=1)
                assert torch.equal(await retrieved(context, TOKENS, codec.name), kv)
        assert server.held == {}


@pytest.mark.parametrize(
    ("geometry", "words"),
    [
        (KVGeometry(num_layers=3, num_kv_heads=4, head_dim=4, dtype=torch.float32, block_size=4), r"\[2, 3, 8, 16\]"),
        (KVGeometry(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float16, block_size=4), "float16"),
    ],
)
async def test_chunks_that_contradict_the_geometry_are_refused(
    shm_server: FakeCacheServer, geometry: KVGeometry, words: str
) -> None:
    async with opened(shm_server) as right, opened(shm_server, geometry=geometry) as wrong:
        await right.put(made_kv(), TOKENS)
        with pytest.raises(GeometryError, match=words):
            await wrong.retrieve(TOKENS)
    assert shm_server.held == {}
