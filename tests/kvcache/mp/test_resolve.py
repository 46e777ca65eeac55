from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_stream.errors import GeometryError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.resolve import find_model_config, resolve_geometry
from lmcache_stream.kvcache.mp.status import ServerConfig, ServerFacts, parse_status
from lmcache_stream.rotary import Rotary

from .statuses import MODEL, group, pulled, recorded


def facts(status: Any, chunk_size: int = 32) -> ServerFacts:
    return ServerFacts(
        http_url="http://h", config=ServerConfig(chunk_size=chunk_size), state=parse_status(status, MODEL)
    )


KV = KVGeometry(num_layers=4, num_kv_heads=2, head_dim=64)
ROTARY = Rotary((1.0, 0.1), head_dim=64)


def test_geometry_from_the_server_alone() -> None:
    status = pulled(
        group("NL_X_TWO_NB_BS_NH_HS", "4 x [2, 2048, 16, 8, 128]"), per_token=4 * 2 * 8 * 128 * 2, world_size=2
    )
    geometry = resolve_geometry(facts(status))
    assert geometry == KVGeometry(
        num_layers=4,
        num_kv_heads=16,
        head_dim=128,
        dtype=torch.bfloat16,
        chunk_size=32,
        block_size=16,
        world_size=2,
    )


def test_geometry_that_nobody_knows() -> None:
    assert resolve_geometry(facts(recorded("status-engine-driven"))) is None
    assert resolve_geometry(facts(recorded("status-lmcache-driven"))) is None


def test_the_configuration_fills_what_the_server_leaves_open_except_the_dtype() -> None:
    config = KVGeometry(
        num_layers=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, num_heads=4, rotary=(ROTARY,) * 4, alibi=True
    )
    geometry = resolve_geometry(facts(recorded("status-engine-driven")), config=config)
    assert geometry == KVGeometry(
        num_layers=4,
        num_kv_heads=2,
        head_dim=64,
        chunk_size=32,
        block_size=32,
        num_heads=4,
        rotary=(ROTARY,) * 4,
        alibi=True,
    )
    geometry = resolve_geometry(facts(recorded("status-lmcache-driven")), config=config)
    assert geometry is not None
    assert geometry.dtype is torch.float32


def test_the_caller_may_tell_other_positions_than_the_configuration() -> None:
    given = KVGeometry(num_layers=4, num_kv_heads=2, head_dim=64, rotary=(ROTARY,) * 4)
    config = KVGeometry(num_layers=4, num_kv_heads=2, head_dim=64, rotary_unknown="a regime is needed")
    geometry = resolve_geometry(facts(recorded("status-engine-driven")), given=given, config=config)
    assert geometry is not None
    assert geometry.rotary == (ROTARY,) * 4
    assert geometry.rotary_unknown is None


def kv(**changes: Any) -> KVGeometry:
    return replace(KV, **changes)


@pytest.mark.parametrize(
    ("given", "config", "words"),
    [
        (kv(num_layers=5), None, r"num_layers is 4 by http://h/status, but 5 by geometry="),
        (KV, kv(num_kv_heads=1), r"num_kv_heads is 2 by geometry=, but 1 by config.json"),
        (kv(dtype=torch.float16), None, r"dtype is torch.float32 by .*torch.float16 by geometry="),
        (kv(chunk_size=64), None, r"chunk_size is 32 by .* but 64 by geometry="),
        (kv(block_size=16), None, r"block_size is 32 by .* but 16 by geometry="),
        (kv(num_kv_heads=1, planes=1), None, r"planes is 2 by .* but 1 by geometry="),
        (kv(world_size=2), None, r"world_size is 1 by .* but 2 by geometry="),
        (None, kv(head_dim=128), r"256 stored values .* 2 KV heads \(config.json\) of 128 \(config.json\).* 512"),
    ],
)
def test_contradictions_name_both_sources(given: KVGeometry | None, config: KVGeometry | None, words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        resolve_geometry(facts(recorded("status-lmcache-driven")), given=given, config=config)


def test_chunks_must_be_whole_blocks() -> None:
    with pytest.raises(GeometryError, match=r"chunk size 48 .*block size 32 .*--chunk-size"):
        resolve_geometry(facts(recorded("status-engine-driven"), chunk_size=48), given=KV)


def test_finds_the_configuration_of_a_local_model(tmp_path: Path) -> None:
    assert find_model_config(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{}")
    assert find_model_config(str(tmp_path)) == tmp_path / "config.json"
    assert find_model_config("Qwen/Qwen3-8B") is None
    assert find_model_config("x" * 5000) is None


@pytest.mark.parametrize("name", ["~nobody-of-that-name/model", "a\0b", "x" * 10_000, "\ud800"])
def test_a_model_name_need_not_be_a_path(name: str) -> None:
    assert find_model_config(name) is None
