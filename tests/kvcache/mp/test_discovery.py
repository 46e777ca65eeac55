from __future__ import annotations

import asyncio
import contextlib
import json
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from aiohttp import web

from lmcache_stream.errors import CacheConnectionError, CacheError, CacheProtocolError, GeometryError, UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.discovery import (
    SCRATCH_PREFIX,
    ServerConfig,
    ServerFacts,
    check_server,
    discover,
    find_model_config,
    parse_config,
    parse_status,
    resolve_geometry,
)
from lmcache_stream.rotary import Rotary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

HTTP = Path(__file__).parents[2] / "data" / "http"
MODEL = "models/tiny"


def recorded(name: str) -> Any:
    return json.loads((HTTP / f"{name}.json").read_bytes())


def pulled(
    *groups: Mapping[str, Any], num_layers: int = 4, per_token: int | None = None, world_size: int = 1
) -> dict[str, Any]:
    """A `/status` with the given kernel groups."""
    layout = {"num_layers": num_layers, "cache_size_per_token": per_token, "kernel_groups": list(groups)}
    entry = {"model_name": MODEL, "world_size": world_size, "kv_cache_layout": layout}
    return {"cache_context_meta": {str(i): entry for i in range(world_size)}, "non_cuda_context_meta": {}}


def group(name: str, shape: str, *, num_layers: int = 4, dtype: str = "torch.bfloat16") -> dict[str, Any]:
    return {
        "num_layers": num_layers,
        "tokens_per_block": 16,
        "dtype": dtype,
        "engine_kv_format": name,
        "engine_kv_concrete_shape": shape,
    }


def facts(status: Any, chunk_size: int = 32) -> ServerFacts:
    return ServerFacts(
        http_url="http://h", config=ServerConfig(chunk_size=chunk_size), state=parse_status(status, MODEL)
    )


def test_config_as_recorded() -> None:
    config = parse_config(recorded("config"))
    assert config == ServerConfig(
        chunk_size=32, shm_name="heldout", transfer_mode="auto", transport="zmq", eviction_policy="LRU"
    )
    assert config.engine_driven


@pytest.mark.parametrize("shm_name", [None, ""])
def test_config_without_shared_memory(shm_name: str | None) -> None:
    assert parse_config({"mp": {"chunk_size": 256, "shm_name": shm_name}}).shm_name is None


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


@pytest.mark.parametrize("transfer_mode", ["auto", "engine_driven", None])
def test_accepts_a_server_with_engine_driven_operations(transfer_mode: str | None) -> None:
    config = ServerConfig(chunk_size=32, transfer_mode=transfer_mode, transport="zmq")
    check_server(config, url="tcp://h:5555", http_url="http://h")


def test_refuses_a_server_in_a_wrong_mode() -> None:
    config = ServerConfig(chunk_size=32, transfer_mode="lmcache_driven")
    with pytest.raises(CacheConnectionError, match="start the LMCache server with --supported-transfer-mode auto"):
        check_server(config, url="tcp://h:5555", http_url="http://h")


def test_refuses_a_url_of_the_wrong_transport() -> None:
    over_grpc, over_zmq = (ServerConfig(chunk_size=32, transport=name) for name in ("grpc", "zmq"))
    check_server(over_grpc, url="grpc+unix:///s", http_url="http://h")
    with pytest.raises(CacheConnectionError, match=r"speaks grpc.*use grpc://host:port"):
        check_server(over_grpc, url="tcp://h:5555", http_url="http://h")
    with pytest.raises(CacheConnectionError, match=r"speaks zmq.*use tcp://host:port"):
        check_server(over_zmq, url="grpc://h:5555", http_url="http://h")


@contextlib.asynccontextmanager
async def serving(routes: Mapping[str, tuple[int, str, bytes] | None]) -> AsyncIterator[str]:
    """An HTTP server with fixed answers (status, content type, body); None: it never answers."""

    leaving = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path not in routes:
            raise web.HTTPNotFound
        fixed = routes[request.path]
        if fixed is None:
            await leaving.wait()
        status, content_type, body = fixed or (200, "text/plain", b"")
        return web.Response(status=status, content_type=content_type, body=body)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        leaving.set()
        await runner.cleanup()


def json_answer(name: str) -> tuple[int, str, bytes]:
    return 200, "application/json", (HTTP / f"{name}.json").read_bytes()


@pytest.mark.parametrize("config_path", ["/config", "/conf"])
async def test_discovers_a_server(config_path: str) -> None:
    routes = {config_path: json_answer("config"), "/status": json_answer("status-lmcache-driven")}
    async with serving(routes) as url:
        found = await discover(url + "/", MODEL)
    assert found.http_url == url
    assert (found.chunk_size, found.shm_name, found.model.num_layers) == (32, "heldout", 4)


JSON, TEXT = "application/json", "text/plain"


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ((503, JSON, b'{"error":"not initialized"}'), CacheConnectionError, r"503.*not initialized.*not ready"),
        ((200, JSON, b"[]"), CacheProtocolError, "chunk size"),
        ((200, "text/html", b"<html>hello</html>"), CacheProtocolError, r"no JSON.*<html>hello"),
        ((500, TEXT, b"oops"), CacheProtocolError, r"500.*oops"),
        ((302, TEXT, b""), CacheProtocolError, "302"),
        ((200, JSON, b""), CacheProtocolError, "no JSON"),
        ((200, JSON, b"[" * 100_000), CacheProtocolError, "no JSON"),
        ((200, JSON, b'"\xff'), CacheProtocolError, "no JSON"),
        ((200, JSON, b'{"a": ' + b"9" * 5000 + b"}"), CacheProtocolError, "no JSON"),
        ((500, TEXT, b"\x1b]0;owned\x07"), CacheProtocolError, r"500 \(\?\]0;owned\?\)"),
        (None, CacheConnectionError, "did not answer in time"),
    ],
)
async def test_an_answer_that_is_none_is_one_error_with_the_url(
    answer: tuple[int, str, bytes] | None, error: type[CacheError], words: str
) -> None:
    async with serving({"/config": answer, "/status": json_answer("status-engine-driven")}) as url:
        with pytest.raises(error, match=words) as raised:
            await discover(url, MODEL, timeout=0.2 if answer is None else 60)
    assert f"{url}/config" in str(raised.value)


async def test_an_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_stream.bodies.MOST_BYTES", 1 << 16)
    async with serving({"/config": (200, JSON, b" " * (1 << 20))}) as url:
        with pytest.raises(CacheProtocolError, match=r"/config answers more than 65536 bytes"):
            await discover(url, MODEL)


async def test_nobody_there() -> None:
    async with serving({}) as url:
        pass
    with pytest.raises(
        CacheConnectionError, match=r"cannot reach http://127.0.0.1:\d+/config.*start the LMCache server"
    ):
        await discover(url, MODEL)


async def test_neither_config_nor_conf() -> None:
    async with serving({}) as url:
        with pytest.raises(CacheProtocolError, match=r"/conf answers 404"):
            await discover(url, MODEL)


@pytest.mark.parametrize(
    "url",
    ["tcp://localhost:5555", "localhost:8080", "http://", "http://host/?x=1", "http://host:port", "http://a\nb", 5],
)
async def test_a_url_that_is_not_http(url: Any) -> None:
    with pytest.raises(UsageError, match="http_url"):
        await discover(url, MODEL)


async def test_credentials_are_refused_and_not_repeated() -> None:
    for url in ("http://user:hunter2@host", "http://hunter2@host", "http://user:hunter2/x@host"):
        with pytest.raises(UsageError, match="http_url") as caught:
            await discover(url, MODEL)
        assert "hunter2" not in "".join(traceback.format_exception(caught.value))


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


@pytest.mark.parametrize("name", ["~nobody-of-that-name/model", "a\0b", "x" * 10_000, "\ud800"])
def test_a_model_name_need_not_be_a_path(name: str) -> None:
    assert find_model_config(name) is None
