from __future__ import annotations

from typing import Any

import pytest
import torch

from lmcache_stream.errors import CacheConnectionError, CacheProtocolError, GeometryError
from lmcache_stream.kvcache.mp.status import SCRATCH_PREFIX, ServerConfig, parse_config, parse_status

from .statuses import MODEL, group, pulled, recorded


def test_config_as_recorded() -> None:
    config = parse_config(recorded("config"))
    assert config == ServerConfig(chunk_size=32, transfer_mode="auto", transport="zmq", eviction_policy="LRU")
    assert config.engine_driven


@pytest.mark.parametrize(
    "answer",
    [
        [],
        None,
        "ok",
        {},
        {"mp": []},
        {"mp": {}},
        {"mp": {"chunk_size": "32"}},
        {"mp": {"chunk_size": 0}},
        {"mp": {"chunk_size": 1 << 40}},
    ],
)
def test_config_that_is_none(answer: Any) -> None:
    with pytest.raises(CacheProtocolError, match=r"http://h/config.*--http-port"):
        parse_config(answer, url="http://h/config")


def test_status_of_an_engine_that_pushes_its_kv() -> None:
    state = parse_status(recorded("status-engine-driven"), MODEL)
    assert (state.healthy, state.sessions, state.read_locked, state.write_locked, state.objects) == (True, 0, 0, 0, 4)
    model = state.model
    assert (model.world_size, model.workers, model.one_plane, model.block_size) == (1, 1, True, 32)
    assert (model.formats, model.num_layers, model.dtype, model.width) == ((), None, None, None)


def test_status_of_an_engine_whose_kv_is_pulled() -> None:
    model = parse_status(recorded("status-lmcache-driven"), MODEL).model
    assert (model.formats, model.one_plane, model.block_size) == (("NL_X_NB_NH_BS_CS",), True, 32)
    assert (model.num_layers, model.dtype, model.width) == (4, torch.float32, 256)
    assert (model.num_kv_heads, model.head_dim) == (None, None)


@pytest.mark.parametrize(
    ("name", "shape", "per_token", "heads", "head_dim"),
    [
        ("NL_X_TWO_NB_BS_NH_HS", "4 x [2, 2048, 16, 8, 128]", 4 * 2 * 8 * 128 * 2, 8, 128),
        ("NL_X_NB_TWO_NH_BS_HS", "4 x [2048, 2, 8, 16, 128]", None, 8, 128),
        ("TWO_X_NL_X_NBBS_NH_HS", "2 x 4 x [32768, 8, 128]", None, 8, 128),
        ("NL_X_TWO_X_NB_BS_NH_HS", "4 x 2 x [2048, 16, 8, 128]", None, 8, 128),
        # This one prints the fused width of K and V as the head size.
        ("NL_X_NB_BS_NH_TWO_HS", "4 x [2048, 16, 8, 2, 256]", 4 * 8 * 256 * 2, 8, 128),
        ("NL_X_NB_BS_HS", "4 x [2048, 16, 576]", 4 * 576 * 2, 1, 576),
        ("NL_X_NB_BS_HS", "Unknown (shape)", 4 * 576 * 2, 1, 576),
    ],
)
def test_heads_from_a_concrete_shape(name: str, shape: str, per_token: int | None, heads: int, head_dim: int) -> None:
    model = parse_status(pulled(group(name, shape), per_token=per_token), MODEL).model
    assert (model.num_kv_heads, model.head_dim) == (heads, head_dim)


def test_groups_of_one_geometry_are_one() -> None:
    name, shape = "NL_X_TWO_NB_BS_NH_HS", "{} x [2, 2048, 16, 8, 128]"
    status = pulled(
        group(name, shape.format(5), num_layers=5), group(name, shape.format(1), num_layers=1), num_layers=6
    )
    model = parse_status(status, MODEL).model
    assert (model.num_layers, model.num_kv_heads, model.formats) == (6, 8, (name, name))


def test_groups_of_different_geometry_are_refused_by_name() -> None:
    status = pulled(
        group("NL_X_TWO_NB_BS_NH_HS", "2 x [2, 2048, 16, 8, 128]", num_layers=2),
        group("NL_X_NB_BS_HS", "2 x [2048, 16, 576]", num_layers=2),
    )
    with pytest.raises(GeometryError, match=r"NL_X_TWO_NB_BS_NH_HS, 8 heads of 128.*NL_X_NB_BS_HS"):
        parse_status(status, MODEL)


@pytest.mark.parametrize("dtype", ["torch._dynamo", "complex64", "float13", 5])
def test_a_dtype_that_no_kv_has_is_not_known(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    status = pulled(group("NL_X_TWO_NB_BS_NH_HS", "4 x [2, 2048, 16, 8, 128]", dtype=dtype))
    assert parse_status(status, MODEL).model.dtype is None
    assert not asked


def test_an_unreadable_format_is_refused_by_name() -> None:
    with pytest.raises(GeometryError, match="NL_X_NB_BSV_BSS"):
        parse_status(pulled(group("NL_X_NB_BSV_BSS", "Unknown (x)")), MODEL)


def test_a_model_that_nobody_registered_is_told_with_those_that_are() -> None:
    with pytest.raises(CacheConnectionError, match=r"'tiny' at http://h/status; registered: 'models/tiny'.*--model"):
        parse_status(recorded("status-engine-driven"), "tiny", url="http://h/status")


def test_the_only_model_needs_no_name() -> None:
    status = recorded("status-engine-driven")
    status["non_cuda_context_meta"]["7"] = {"model_name": SCRATCH_PREFIX + "x", "world_size": 1, "use_mla": True}
    status["non_cuda_context_meta"]["6"] = {"model_name": MODEL + "##query", "world_size": 1, "use_mla": True}
    state = parse_status(status)
    assert state.model.model_name == MODEL
    assert state.model_names == (MODEL,)

    status["non_cuda_context_meta"]["8"] = {"model_name": "other", "world_size": 1, "use_mla": True}
    with pytest.raises(CacheConnectionError, match=r"which model.*'models/tiny', 'other'.*model_name="):
        parse_status(status)
    with pytest.raises(CacheConnectionError, match="none; start an engine"):
        parse_status({"cache_context_meta": {}, "non_cuda_context_meta": {}})


def test_one_model_in_two_sizes_is_refused() -> None:
    status = recorded("status-engine-driven")
    status["non_cuda_context_meta"]["8"] = {"model_name": MODEL, "world_size": 2, "use_mla": True}
    with pytest.raises(GeometryError, match="1 and 2 ranks"):
        parse_status(status, MODEL)


@pytest.mark.parametrize("answer", [[], None, "ok", {}, {"is_healthy": True}, {"cache_context_meta": []}])
def test_status_that_is_none(answer: Any) -> None:
    with pytest.raises(CacheProtocolError, match=r"http://h/status.*--http-port"):
        parse_status(answer, MODEL, url="http://h/status")


@pytest.mark.parametrize("ranks", [0, -1, 1 << 20, 1 << 40, "2", None, 2.5])
def test_a_number_of_ranks_that_cannot_be(ranks: Any) -> None:
    status = recorded("status-engine-driven")
    status["non_cuda_context_meta"]["8"] = {"model_name": "m", "world_size": ranks, "use_mla": True}
    with pytest.raises(GeometryError, match="ranks"):
        parse_status(status, "m")


def test_numbers_that_cannot_be_are_not_known() -> None:
    status = pulled(group("NL_X_TWO_NB_BS_NH_HS", f"4 x [2, 2048, 16, {'9' * 5000}, 128]"), num_layers=1 << 40)
    model = parse_status(status, MODEL).model
    assert (model.num_layers, model.num_kv_heads) == (None, None)


def test_the_names_of_many_models_are_cut() -> None:
    metas = {str(i): {"model_name": "m" * 1000 + str(i), "world_size": 1} for i in range(1000)}
    with pytest.raises(CacheConnectionError) as caught:
        parse_status({"non_cuda_context_meta": metas})
    assert len(str(caught.value)) < 1000
