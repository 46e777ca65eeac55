from __future__ import annotations

import inspect
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from blockbuster import BlockBuster
from hypothesis import settings

import lmcache_stream

from .engines import AsyncCountingEngine, CountingEngine
from .streams import Setup, opened

# A busy machine is no reason to fail.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


PACKAGE = str(Path(lmcache_stream.__path__[0])) + os.sep
ASIDE = (
    str(Path(__file__).parent) + os.sep,
    *(f"{PACKAGE}{room}{os.sep}" for room in ("testing", "bench", "serving")),
)
"""Tests, fakes and commands, whose loops serve nobody else."""


def the_package_blocks(frame: FrameType | None) -> bool:
    """Whether a coroutine of the package, or a callback, makes a call, and not what may well block."""
    ours = False
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ASIDE):
            return False
        if name.startswith(PACKAGE):
            if frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
                return True
            ours = frame.f_code.co_name != "__init__"  # what makes a thing may look whether a file is there
        frame = frame.f_back
    return ours


@pytest.fixture(scope="session", autouse=True)
def nothing_blocks_the_loop() -> Iterator[None]:
    """A call with which the library blocks an event loop is an error."""
    watching = BlockBuster("lmcache_stream")
    for function in watching.functions.values():

        def may_block(*args: Any, known: Callable[..., bool] = function.can_block_predicate, **options: Any) -> bool:
            return known(*args, **options) or not the_package_blocks(sys._getframe(1))

        function.can_block_predicate = may_block
    watching.activate()
    yield
    watching.deactivate()


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


@pytest.fixture(params=[CountingEngine, AsyncCountingEngine])
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[Setup]:
    async with opened(request.param) as made:
        yield made


@pytest.fixture
async def one() -> AsyncIterator[Setup]:
    async with opened(AsyncCountingEngine) as made:
        yield made
