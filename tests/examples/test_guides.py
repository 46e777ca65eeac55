"""The guides' code runs as it is printed, and their tables name what is there."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import shlex
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lmcache_stream
import lmcache_stream.engine
from lmcache_stream import cli
from lmcache_stream.serving import options as serving
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from tests.bench.conftest import cache_server, offloading_engine, small_model  # noqa: F401  (fixtures)
from tests.bench.offloading import OffloadingEngine
from tests.examples.conftest import EXAMPLES
from tests.examples.remedies import remedies

GUIDE = (EXAMPLES / "README.md").read_text()
ONE_LINE = " ".join(GUIDE.split())


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


def test_every_block_has_a_language_that_is_checked() -> None:
    assert set(re.findall(r"^```(\w*)\n.*?^```", GUIDE, re.MULTILINE | re.DOTALL)) == {"py", "sh"}


async def test_the_python_runs_from_block_to_block(
    cache_server: FakeCacheServer,  # noqa: F811
    offloading_engine: OffloadingEngine,  # noqa: F811
    tiny_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(lmcache_stream.engine, "ensure_smollm2", lambda: tiny_model_path)
    monkeypatch.setenv("LMCACHE_STREAM_BASE_URL", offloading_engine.base_url)
    monkeypatch.setenv("LMCACHE_STREAM_KV_URL", cache_server.url)
    monkeypatch.setenv("LMCACHE_STREAM_KV_HTTP_URL", cache_server.http_url)
    names: dict[str, Any] = {"__name__": "guide"}
    *most, last = blocks("py")
    try:
        for number, block in enumerate(most):
            await run(block, f"block {number}", names)
    finally:
        if "engine" in names:
            await run(last, "last block", names)
    assert names["server"].unfinished_requests == 0
    assert "cached_tokens" not in capsys.readouterr().err


async def run(block: str, name: str, names: dict[str, Any]) -> None:
    code = compile(block, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if code.co_flags & inspect.CO_COROUTINE:
        await types.FunctionType(code, names)()
    else:
        await asyncio.to_thread(exec, code, names)


def commands() -> Iterator[list[str]]:
    for block in blocks("sh"):
        lines = re.sub(r"\\\n", "", block)
        quoted = re.sub(r"'[^']*'", lambda found: found[0].replace("\n", " "), lines)
        yield from (shlex.split(line) for line in quoted.splitlines() if line.strip())


@pytest.mark.parametrize("command", list(commands()), ids=lambda command: " ".join(command[:2]))
def test_a_command_has_flags_that_are_known(command: list[str], examples: Path) -> None:
    program, *arguments = command
    if program == "lmcache-stream":
        cli._parser(arguments).parse_args(arguments)
    elif program == ".venv/bin/python":
        source = (examples.parent / arguments[0]).read_text() + (examples / "servers.py").read_text()
        known = set(re.findall(r'add_argument\("(--[\w-]+)"', source))
        assert set(flags(arguments)) <= known
    elif program == ".venv/bin/jupyter":
        assert (examples.parent / arguments[-1]).is_file()
    else:
        assert program in ("lmcache", "vllm")
        ours = inspect.getsource(serving)
        assert set(flags(arguments)) <= set(re.findall(r'"(--[\w-]+)"', ours))
        for value in arguments:
            if value.startswith("{"):
                given = json.loads(value)
                assert given.keys() | given["kv_connector_extra_config"].keys() <= set(re.findall(r'"([\w.]+)":', ours))


def flags(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if argument.startswith("--")]


def test_every_script_is_named_and_every_named_file_is_there() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)\)", GUIDE))
    assert {path.name for path in EXAMPLES.glob("*.py")} <= linked
    assert {path.name for path in EXAMPLES.glob("*.ipynb")} <= linked
    assert not [name for name in linked if not (EXAMPLES / name).exists()]


def moved() -> list[str]:
    table = GUIDE[GUIDE.index("## Moving from") : GUIDE.index("An edit that was written for")]
    last = [row.rstrip("|\n ").rpartition("|")[2] for row in table.splitlines()[4:] if row.startswith("|")]
    return sorted({name for cell in last for name in re.findall(r"`([A-Za-z_.]+)", cell)} - {"fn"})


def test_what_the_stock_sdk_calls_otherwise_is_called_so_here() -> None:
    assert len(moved()) > 20
    for name in moved():
        found: Any = None
        for room in (lmcache_stream, lmcache_stream.kvcache, lmcache_stream.stream):
            first, *rest = name.removeprefix("lmcache_stream.").split(".")
            found = getattr(room, first, None)
            for attribute in rest:
                found = getattr(found, attribute)
            if found is not None:
                break
        assert found is not None, name


def test_the_page_names_everything_that_doctor_asks_for() -> None:
    asked = list(remedies())
    assert len(asked) > 40
    missing = [remedy for remedy in asked if not named(remedy.parts)]
    assert missing == []


def named(parts: tuple[str, ...]) -> bool:
    """Whether the page has these words, with something between the parts."""
    pattern = r"\S+".join(re.escape(" ".join(part.split(" "))) for part in parts)
    return re.search(pattern, ONE_LINE) is not None


def test_the_page_has_doctors_checks_in_their_order() -> None:
    from lmcache_stream.serving.doctor.diagnosis import CHECKS

    table = GUIDE[GUIDE.index("## Troubleshooting") :]
    rows = re.findall(r"^\| `([\w ]+)` \|", table, re.MULTILINE)
    order = [check.name for check in CHECKS]
    assert [name for name in order if name in rows] == rows
