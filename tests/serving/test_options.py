from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from lmcache_stream.errors import UsageError
from lmcache_stream.serving import options as options_module
from lmcache_stream.serving.options import CacheOptions, StackOptions, default_device, default_python

if TYPE_CHECKING:
    from pathlib import Path


def stack(**given: Any) -> StackOptions:
    return StackOptions(**{"model": "Qwen/Qwen3-8B", "device": "cpu", "python": "py", **given})


def value(command: list[str], flag: str) -> str:
    assert command.count(flag) == 1
    return command[command.index(flag) + 1]


def test_the_two_servers_are_told_the_same() -> None:
    options = stack(chunk_size=64, transport="grpc", l1_gib=0.5)
    cache = options.cache.command(5555, 8080, 9100)
    engine = options.command(8000, 5555)

    assert value(cache, "--chunk-size") == "64"
    assert value(cache, "--port") == "5555"
    assert value(cache, "--http-port") == "8080"
    assert value(cache, "--transport") == "grpc"
    assert value(cache, "--l1-size-gb") == "0.5"
    assert value(cache, "--supported-transfer-mode") == "auto"
    assert json.loads(value(engine, "--kv-transfer-config")) == {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "grpc://127.0.0.1",
            "lmcache.mp.port": 5555,
            "lmcache.mp.heartbeat_interval": 20.0,
        },
    }
    assert value(engine, "--port") == "8000"
    assert "--enable-prompt-tokens-details" in engine


def test_shared_memory_needs_a_name_and_an_eager_pool() -> None:
    shared = CacheOptions(shm_name="name").command(1, 2, 3)
    pickled = CacheOptions(shared_memory=False).command(1, 2, 3)
    assert value(shared, "--shm-name") == "name"
    assert "--no-l1-use-lazy" in shared
    assert "--shm-name" not in pickled
    assert "--no-l1-use-lazy" not in pickled
    assert CacheOptions().shm_name != CacheOptions().shm_name


def test_a_processor_is_served_differently_from_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "cpu_computes_bfloat16", lambda: False)
    cpu, gpu = stack(), stack(device="cuda")
    on_cpu, on_gpu = cpu.command(1, 2), gpu.command(1, 2)

    assert value(on_cpu, "--block-size") == "32"
    assert value(on_cpu, "--dtype") == "float32"
    assert value(on_cpu, "--kv-cache-memory-bytes") == str(2**30)
    assert "--enforce-eager" in on_cpu
    assert value(on_gpu, "--block-size") == "16"
    assert value(on_gpu, "--dtype") == "auto"
    assert "--kv-cache-memory-bytes" not in on_gpu
    assert "--enforce-eager" not in on_gpu

    assert "VLLM_CPU_OMP_THREADS_BIND" not in gpu.environment({})
    assert "OMP_NUM_THREADS" not in gpu.environment({})


def test_bfloat16_arithmetic_keeps_the_models_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "cpu_computes_bfloat16", lambda: True)
    assert value(stack().command(1, 2), "--dtype") == "auto"
    assert value(stack(dtype="float16").command(1, 2), "--dtype") == "float16"


def test_the_environment_shares_the_cores_between_the_ranks() -> None:
    env = stack(tensor_parallel_size=2).environment({"VLLM_CPU_KVCACHE_SPACE": "7", "HOME": "/home"}, cores=8)
    assert env["OMP_NUM_THREADS"] == "4"
    assert env["HOME"] == "/home"
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    assert stack(tensor_parallel_size=4).environment({}, cores=2)["OMP_NUM_THREADS"] == "1"
    assert stack().environment({"OMP_NUM_THREADS": "3"}, cores=8)["OMP_NUM_THREADS"] == "3"


def test_lmcache_driven_is_asked_for_in_vllms_environment() -> None:
    assert stack(lmcache_driven=True).environment({})["LMCACHE_MP_TRANSFER_MODE"] == "lmcache_driven"
    assert "LMCACHE_MP_TRANSFER_MODE" not in stack().environment({})


def test_a_folder_is_known_by_its_absolute_path_and_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    local = stack(model="tiny")
    assert local.model_name == str(tmp_path / "tiny")
    assert local.served_name == "tiny"
    assert value(local.command(1, 2), "--model") == str(tmp_path / "tiny")
    assert local.environment({})["HF_HUB_OFFLINE"] == "1"

    assert stack().model_name == "Qwen/Qwen3-8B"
    assert stack().served_name == "Qwen3-8B"
    assert stack(served_model_name="mine").served_name == "mine"
    assert "HF_HUB_OFFLINE" not in stack().environment({})


def test_further_flags_come_last() -> None:
    assert stack(vllm_args=("--max-num-seqs", "8")).command(1, 2)[-2:] == ["--max-num-seqs", "8"]
    assert stack(lmcache_args=("--enable", "transfer_query")).cache.command(1, 2, 3)[-2:] == [
        "--enable",
        "transfer_query",
    ]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"chunk_size": 48}, "chunk size must be a multiple of the block size.*--chunk-size 64"),
        ({"chunk_size": 24, "device": "cuda"}, "--chunk-size 32"),
        ({"block_size": 48, "chunk_size": 48}, "multiple of 32 on a CPU"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        ({"kv_gib": 0.0}, "kv_gib must be more than 0"),
        ({"l1_gib": -1.0}, "l1_gib must be more than 0"),
        ({"model": ""}, "model must be"),
        ({"model": "./nowhere"}, r"there is no folder ./nowhere"),
        ({"port": 65536}, "port must be from 1 to 65535"),
        ({"kv_http_port": -1}, "kv_http_port must be"),
        ({"transport": "http"}, "transport must be one of zmq, grpc"),
        ({"vllm_args": ("--port=1",)}, "--port is set by the stack"),
        ({"vllm_args": ("--kv-cache-memory-bytes", "1")}, "use --kv-gib"),
    ],
)
def test_what_cannot_fit_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        stack(**given)


def test_a_block_of_another_size() -> None:
    assert value(stack(block_size=16, chunk_size=16).command(1, 2), "--block-size") == "16"
    assert value(stack(block_size=64, chunk_size=128).command(1, 2), "--block-size") == "64"


def test_the_interpreter_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_STREAM_REAL_PYTHON", "/opt/real/bin/python")
    assert default_python() == "/opt/real/bin/python"
    assert CacheOptions().command(1, 2, 3)[0] == "/opt/real/bin/python"
    monkeypatch.delenv("LMCACHE_STREAM_REAL_PYTHON")
    assert default_python() == sys.executable


def test_a_hidden_gpu_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert default_device() == "cpu"
