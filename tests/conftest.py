from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A busy machine is no reason to fail.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model and its tokenizer."""
    from lmcache_stream.testing.tiny import tiny_model

    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_model(tiny_model_path: Path) -> tuple[Any, Any]:
    """The tiny model and its tokenizer, loaded with plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path).eval()
    return model, AutoTokenizer.from_pretrained(tiny_model_path)
