"""What users see: names, twins and docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lmcache_stream
import lmcache_stream.batch
import lmcache_stream.completions
import lmcache_stream.editors
import lmcache_stream.engine
import lmcache_stream.kvcache
import lmcache_stream.metrics
import lmcache_stream.plots
import lmcache_stream.stream
import lmcache_stream.testing
from lmcache_stream import (
    AsyncBatchedStream,
    AsyncKVCacheContext,
    AsyncLMCacheStream,
    KVCacheContext,
    LMCacheBatchedStream,
    LMCacheStream,
)

PACKAGE = Path(lmcache_stream.__file__).parent
ROOMS = [
    lmcache_stream,
    lmcache_stream.batch,
    lmcache_stream.completions,
    lmcache_stream.editors,
    lmcache_stream.engine,
    lmcache_stream.kvcache,
    lmcache_stream.metrics,
    lmcache_stream.plots,
    lmcache_stream.stream,
    lmcache_stream.testing,
]
TWINS = [
    (AsyncLMCacheStream, LMCacheStream),
    (AsyncBatchedStream, LMCacheBatchedStream),
    (AsyncKVCacheContext, KVCacheContext),
]


def public_names(thing: Any) -> set[str]:
    annotated = set(inspect.get_annotations(thing)) if inspect.isclass(thing) else set()
    return {name for name in {*dir(thing), *annotated} if not name.startswith("_")}


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_exports_exist(room: Any) -> None:
    assert len(set(room.__all__)) == len(room.__all__)
    for name in room.__all__:
        assert hasattr(room, name), name


def test_the_package_shows_its_public_names_and_nothing_else() -> None:
    assert public_names(lmcache_stream) == set(lmcache_stream.__all__)
    rooms = {module.name for module in pkgutil.iter_modules([str(PACKAGE)])}
    assert not rooms & set(lmcache_stream.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        lmcache_stream.Nothing  # noqa: B018


@pytest.mark.parametrize(("asynchronous", "synchronous"), TWINS, ids=lambda twin: twin.__name__)
def test_twins_have_the_same_methods_and_parameters(asynchronous: type, synchronous: type) -> None:
    own = {"async_stream", "async_context"}
    assert public_names(asynchronous) == public_names(synchronous) - own
    for name in public_names(asynchronous):
        if name not in dir(asynchronous):
            assert isinstance(inspect.getattr_static(synchronous, name), property), name
            continue
        one, other = inspect.getattr_static(asynchronous, name), inspect.getattr_static(synchronous, name)
        assert isinstance(one, property) is isinstance(other, property), name
        if not callable(one):
            continue
        left, right = inspect.signature(one), inspect.signature(other)
        assert [(p.name, p.kind, p.default) for p in left.parameters.values()] == [
            (p.name, p.kind, p.default) for p in right.parameters.values()
        ], name
        assert not inspect.iscoroutinefunction(other), name


@pytest.mark.parametrize("face", [face for twins in TWINS for face in twins], ids=lambda face: face.__name__)
def test_every_public_coroutine_has_a_timeout(face: type) -> None:
    for name in public_names(face):
        method = inspect.getattr_static(face, name, None)
        if inspect.iscoroutinefunction(method) and name != "close":
            assert "timeout" in inspect.signature(method).parameters, name


def test_documented_signatures() -> None:
    def parameters(fn: Any) -> str:
        return ", ".join(
            p.name if p.default is p.empty else f"{p.name}={p.default!r}"
            for p in inspect.signature(fn).parameters.values()
            if p.kind is not p.KEYWORD_ONLY and p.name != "self"
        )

    for stream in (LMCacheStream, AsyncLMCacheStream):
        assert parameters(stream) == "ctx, post_completion, prompt_token_ids, cache_salt=''"
        assert parameters(stream.generate) == "sampling_params, suffix_tokens=()"
        assert parameters(stream.modify_kv) == "fn"
        assert parameters(stream.retrieve_kv) == "timeout=30, poll_interval=0.2"
        assert parameters(stream.update_kv) == "kv, tokens"
    module = lmcache_stream.stream
    assert parameters(module.create_request) == "ctx, post_completion, prompt_token_ids, cache_salt=''"
    assert parameters(module.generate) == "stream, sampling_params, suffix_tokens=()"
    assert parameters(module.get) == "stream, timeout=30, poll_interval=0.2"
    assert parameters(module.update) == "stream, kv, tokens"
    for batch in (LMCacheBatchedStream, AsyncBatchedStream):
        for phase in (batch.prefill, batch.decode):
            assert parameters(phase) == "sampling_params, fmt='terminal', width=80, stream_ids=None"
        assert parameters(batch.modify) == "fn, fmt='terminal', width=80, stream_ids=None"
        assert parameters(batch.run_streams) == "sampling_params, stream_ids=None"
        assert parameters(batch.modify_stream) == "fn, stream_ids=None"
        assert parameters(batch.get_perf_metrics) == "duration, fmt, width, mode, stream_ids=None"
    assert parameters(lmcache_stream.connect) == "url, http_url=None, model_name=None, timeout=60.0"
    assert parameters(lmcache_stream.aconnect) == "url, http_url=None, model_name=None, timeout=60.0"


def all_modules() -> list[Any]:
    """Every module of the package but those of generated code."""
    names = [module.name for module in pkgutil.walk_packages([str(PACKAGE)], "lmcache_stream.")]
    return [lmcache_stream, *(importlib.import_module(name) for name in names if "_pb2" not in name)]


def test_every_public_thing_has_a_docstring_of_its_own() -> None:
    missing = []
    for room in all_modules():
        if not room.__doc__:
            missing.append(room.__name__)
        for name in getattr(room, "__all__", ()):
            thing = getattr(room, name)
            if not (inspect.isclass(thing) or inspect.isroutine(thing)):
                continue
            if not thing.__doc__ or re.match(rf"{name}\(", thing.__doc__):
                missing.append(f"{room.__name__}.{name}")
            if not inspect.isclass(thing) or not thing.__module__.startswith("lmcache_stream"):
                continue
            for member, value in vars(thing).items():
                if member.startswith("_") or not (inspect.isfunction(value) or isinstance(value, property)):
                    continue
                if not inspect.getdoc(getattr(thing, member)):
                    missing.append(f"{room.__name__}.{name}.{member}")
    assert missing == []


def test_docstrings_say_shapes_and_units() -> None:
    """Whoever takes or gives KV says its shape; whoever takes a timeout says its unit."""
    silent = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            doc = ast.get_docstring(node)
            if doc is None or doc.count("\n") == 0:
                continue
            names = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
            if names & {"kv", "keys"} and "[" not in doc:
                silent.append(f"{path.name}:{node.name}: no shape")
            if "timeout" in names and "Args:" in doc and "econds" not in doc:
                silent.append(f"{path.name}:{node.name}: no unit")
    assert silent == []


def test_the_command_line_and_the_client_start_without_torch() -> None:
    code = (
        "import sys, lmcache_stream.cli, lmcache_stream.testing; from lmcache_stream import CompletionsClient;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_errors_are_one_tree() -> None:
    for name in lmcache_stream.errors.__all__:
        assert issubclass(getattr(lmcache_stream.errors, name), lmcache_stream.errors.LMCacheError)
        assert name in (lmcache_stream.errors.__doc__ or "")
        assert name in lmcache_stream.__all__
