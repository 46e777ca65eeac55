"""What to start and how: the command lines and environments of an LMCache server and a vLLM that fit together."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CacheOptions", "Device", "StackOptions", "Transport"]

Transport: TypeAlias = Literal["zmq", "grpc"]
Device: TypeAlias = Literal["cpu", "cuda"]

PYTHON_VARIABLE = "LMCACHE_STREAM_REAL_PYTHON"
POOL_PREFIX = "lmcache_l1_pool_"
SCHEMES: Mapping[str, str] = {"zmq": "tcp", "grpc": "grpc"}
OWN_FLAGS = {
    "--model": "--model",
    "--host": "--host",
    "--port": "--port",
    "--served-model-name": "--served-model-name",
    "--tensor-parallel-size": "--tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
    "--block-size": "--block-size",
    "--dtype": "--dtype",
    "--max-model-len": "--max-model-len",
    "--kv-transfer-config": "the options of the cache",
    "--kv-cache-memory-bytes": "--kv-gib",
    "--enable-prefix-caching": "--prefix-caching",
    "--no-enable-prefix-caching": "--no-prefix-caching",
}


def default_python() -> str:
    """The interpreter that has the servers: the one in LMCACHE_STREAM_REAL_PYTHON, else the one that runs now."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


def default_device() -> Device:
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return "cpu"
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() else "cpu"


def unique_name() -> str:
    return f"lmcache_stream_{uuid.uuid4().hex[:12]}"


@functools.cache
def cpu_computes_bfloat16() -> bool:
    """Whether this processor has bfloat16 arithmetic; emulated it is several times slower than float32."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = {
        flag for line in cpuinfo.splitlines() if line.lower().startswith(("flags", "features")) for flag in line.split()
    }
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """An LMCache server.

    Args:
        chunk_size: Tokens a chunk.
        l1_gib: GiB of host memory for KV.
        transport: How it is spoken to: `tcp://` (ZMQ) or `grpc://`.
        shared_memory: Hand KV over in a shared-memory segment instead of pickled.
        transfer_mode: `auto` serves every client; the others leave one way of moving KV out.
        eviction_policy: What goes first when memory is full.
        workers: Threads for requests that move KV, and for lookups.
        shm_name: Name of the segment; unique by default.
        host: Address that both endpoints listen on.
        port: Of the requests; 0 for a free one.
        http_port: Of `/status` and `/config`; 0 for a free one.
        log_dir: Folder of `lmcache.log`; None for a new temporary one.
        python: Interpreter that has `lmcache`; by default $LMCACHE_STREAM_REAL_PYTHON, else this one.
        args: Further arguments for `lmcache server`.
        start_timeout: Seconds until it must be healthy.
        grace: Seconds between SIGTERM and SIGKILL when it is stopped.
    """

    chunk_size: int = 32
    l1_gib: float = 2.0
    transport: Transport = "zmq"
    shared_memory: bool = True
    transfer_mode: Literal["auto", "engine_driven", "lmcache_driven"] = "auto"
    eviction_policy: str = "LRU"
    workers: int = 2
    shm_name: str = field(default_factory=unique_name)
    host: str = "127.0.0.1"
    port: int = 0
    http_port: int = 0
    log_dir: Path | None = None
    python: str = field(default_factory=default_python)
    args: tuple[str, ...] = ()
    start_timeout: float = 120.0
    grace: float = 15.0

    def __post_init__(self) -> None:
        at_least_one(chunk_size=self.chunk_size, workers=self.workers)
        positive(l1_gib=self.l1_gib, start_timeout=self.start_timeout)
        if self.transport not in SCHEMES:
            raise UsageError(f"transport must be one of {', '.join(SCHEMES)}, not {self.transport!r}")

    @property
    def segments(self) -> tuple[str, ...]:
        """Names in `/dev/shm` that the server makes."""
        return (POOL_PREFIX + self.shm_name, self.shm_name) if self.shared_memory else ()

    def command(self, port: int, http_port: int, prometheus_port: int) -> list[str]:
        """The command line of the server, on these ports."""
        command = [self.python, "-m", "lmcache.cli.main", "server", "--transport", self.transport]
        command += ["--host", self.host, "--port", str(port), "--http-host", self.host, "--http-port", str(http_port)]
        command += ["--chunk-size", str(self.chunk_size), "--l1-size-gb", f"{self.l1_gib:g}"]
        command += ["--supported-transfer-mode", self.transfer_mode, "--eviction-policy", self.eviction_policy]
        command += ["--max-workers", str(self.workers), "--disable-metrics", "--prometheus-port", str(prometheus_port)]
        if self.shared_memory:
            command += ["--shm-name", self.shm_name, "--no-l1-use-lazy"]
        return [*command, *self.args]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of the server: `base` and what is missing in it."""
        return {**quiet(), **base}


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """An LMCache server and a vLLM over it.

    Args:
        model: Folder or Hugging Face name. As vLLM's `--model` it is also the name that LMCache knows.
        served_model_name: Name in requests to vLLM; by default the last part of `model`.
        tensor_parallel_size: Ranks.
        chunk_size: Tokens a chunk, a multiple of the block size. An edit keeps whole chunks: small ones lose less.
        block_size: Tokens a block of vLLM's KV; None for 32 on a CPU, 16 on a GPU.
        kv_gib: GiB of vLLM's own KV, each rank; None for 1 on a CPU, for what vLLM finds on a GPU.
        l1_gib: GiB of host memory for KV in LMCache.
        dtype: vLLM's `--dtype`; None for the model's own, but float32 on CPUs without bfloat16 arithmetic.
        max_model_len: Tokens of the longest sequence; None for the model's own.
        transport: `zmq` or `grpc`, between vLLM and LMCache and for clients.
        shared_memory: Hand KV over in a shared-memory segment instead of pickled.
        prefix_caching: vLLM's own prefix cache.
        lmcache_driven: Let the cache server pull the KV out of vLLM, instead of vLLM bringing it.
        host: Address that everything listens on.
        port: Of vLLM; 0 for a free one.
        kv_port: Of the cache's requests; 0 for a free one.
        kv_http_port: Of the cache's `/status` and `/config`; 0 for a free one.
        log_dir: Folder of `lmcache.log` and `vllm.log`; None for a new temporary one.
        python: Interpreter that has `vllm` and `lmcache`; by default $LMCACHE_STREAM_REAL_PYTHON, else this one.
        device: `cpu` or `cuda`; by default what the machine has.
        vllm_args: Further arguments for vLLM.
        lmcache_args: Further arguments for `lmcache server`.
        start_timeout: Seconds until both must be healthy.
        grace: Seconds between SIGTERM and SIGKILL when a server is stopped.
    """

    model: str | Path
    served_model_name: str | None = None
    tensor_parallel_size: int = 1
    chunk_size: int = 32
    block_size: int | None = None
    kv_gib: float | None = None
    l1_gib: float = 2.0
    dtype: str | None = None
    max_model_len: int | None = None
    transport: Transport = "zmq"
    shared_memory: bool = True
    prefix_caching: bool = True
    lmcache_driven: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    kv_port: int = 0
    kv_http_port: int = 0
    log_dir: Path | None = None
    python: str = field(default_factory=default_python)
    device: Device = field(default_factory=default_device)
    vllm_args: tuple[str, ...] = ()
    lmcache_args: tuple[str, ...] = ()
    start_timeout: float = 600.0
    grace: float = 20.0

    def __post_init__(self) -> None:
        ports(port=self.port, kv_port=self.kv_port, kv_http_port=self.kv_http_port)
        at_least_one(tensor_parallel_size=self.tensor_parallel_size, chunk_size=self.chunk_size, block_size=self.block)
        positive(l1_gib=self.l1_gib, start_timeout=self.start_timeout)
        if self.kv_gib is not None:
            positive(kv_gib=self.kv_gib)
        if self.device == "cpu" and self.block % 32 and self.block != 16:
            raise UsageError(f"block size must be a multiple of 32 on a CPU (16 for MLA models), not {self.block}")
        if self.chunk_size % self.block:
            raise UsageError(
                f"chunk size must be a multiple of the block size: {self.chunk_size} is none of {self.block}; "
                f"take --chunk-size {self.block * math.ceil(self.chunk_size / self.block)}"
            )
        if not str(self.model):
            raise UsageError("model must be a folder or a Hugging Face name")
        if str(self.model).startswith(("/", "./", "../", "~")) and not self.is_local:
            raise UsageError(f"there is no folder {self.model}: --model takes one with config.json and the weights")
        for word in self.vllm_args:
            flag = word.partition("=")[0]
            if flag in OWN_FLAGS:
                raise UsageError(f"{flag} is set by the stack itself: use {OWN_FLAGS[flag]} before the `--`")
        _ = self.cache, self.dtype_flag  # looked up now: both may read files, and the first has checks of its own

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether the model is a folder here."""
        return Path(self.model).is_dir()

    @property
    def model_name(self) -> str:
        """The name that LMCache keeps KV under: vLLM's `--model`."""
        return str(Path(self.model).absolute()) if self.is_local else str(self.model)

    @functools.cached_property
    def dtype_flag(self) -> str:
        """vLLM's `--dtype`."""
        if self.dtype is not None:
            return self.dtype
        return "float32" if self.device == "cpu" and not cpu_computes_bfloat16() else "auto"

    @property
    def served_name(self) -> str:
        """The name in requests to vLLM."""
        return self.served_model_name or self.model_name.rstrip("/").rpartition("/")[2]

    @property
    def block(self) -> int:
        """Tokens a block of vLLM's KV."""
        if self.block_size is not None:
            return self.block_size
        return 32 if self.device == "cpu" else 16

    @functools.cached_property
    def cache(self) -> CacheOptions:
        """The cache server of this stack."""
        return CacheOptions(
            chunk_size=self.chunk_size,
            l1_gib=self.l1_gib,
            transport=self.transport,
            shared_memory=self.shared_memory,
            host=self.host,
            port=self.kv_port,
            http_port=self.kv_http_port,
            log_dir=self.log_dir,
            python=self.python,
            args=self.lmcache_args,
            start_timeout=self.start_timeout,
            grace=self.grace,
        )

    def command(self, port: int, kv_port: int) -> list[str]:
        """The command line of vLLM, on `port` and with the cache server at `kv_port`."""
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model_name]
        command += ["--served-model-name", self.served_name, "--host", self.host, "--port", str(port)]
        command += ["--block-size", str(self.block), "--tensor-parallel-size", str(self.tensor_parallel_size)]
        command += ["--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"]
        command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(self.transfer_config(kv_port))]
        command += ["--dtype", self.dtype_flag]
        if self.max_model_len is not None:
            command += ["--max-model-len", str(self.max_model_len)]
        kv_gib = 1.0 if self.kv_gib is None and self.device == "cpu" else self.kv_gib
        if kv_gib is not None:
            command += ["--kv-cache-memory-bytes", str(int(kv_gib * 2**30))]
        if self.device == "cpu":
            command += ["--enforce-eager"]
        return [*command, *self.vllm_args]

    def transfer_config(self, kv_port: int) -> dict[str, object]:
        """vLLM's `--kv-transfer-config`: the connector to the cache server at `kv_port`."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"{SCHEMES[self.transport]}://{self.host}",
                "lmcache.mp.port": kv_port,
                # On few cores answers may take 10 s, its default; then vLLM fails what it loads, with ranks for good.
                "lmcache.mp.heartbeat_interval": 20.0,
            },
        }

    def environment(self, base: Mapping[str, str], *, cores: int | None = None) -> dict[str, str]:
        """The environment of vLLM: `base`, what is missing in it, and what these options ask for."""
        env = {**quiet(), **base}
        if self.is_local:
            env["HF_HUB_OFFLINE"] = "1"
        if self.lmcache_driven:
            env["LMCACHE_MP_TRANSFER_MODE"] = "lmcache_driven"
        if self.device == "cpu":
            env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over --kv-cache-memory-bytes
            env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            threads = (cores or os.cpu_count() or 1) // self.tensor_parallel_size
            env.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
        return env


def quiet() -> dict[str, str]:
    """No banner, no reports home, and one hash seed for all ranks."""
    return {
        "DO_NOT_TRACK": "1",
        "LMCACHE_DISABLE_BANNER": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")


def ports(**values: int) -> None:
    for name, value in values.items():
        if not 0 <= value <= 65535:
            raise UsageError(f"{name} must be from 1 to 65535, or 0 for a free one, not {value}")


def positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise UsageError(f"{name} must be more than 0, not {value:g}")
