"""README's snippets and commands, as they are printed."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_stream import cli
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from lmcache_stream.testing.tiny import tiny_model
from tests.bench.offloading import CHUNK, OffloadingEngine, geometry_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
SNIPPETS = [code for language, code in BLOCKS if language in ("py", "python")]
SERVED = re.compile(r"(tcp|http)://localhost:(\d+)")


def commands() -> list[str]:
    """Every command in a block that is no Python, without its remark."""
    lines = "".join(code for language, code in BLOCKS if language in ("", "sh", "bash", "console"))
    found = (re.split(r"\s+# ", line)[0].strip() for line in re.sub(r"\\\n\s*", "", lines).splitlines())
    return [line for line in found if line and not line.startswith("#")]


def is_whole(command: str) -> bool:
    """Whether it can be run as it is: without servers, and without a path of one's own."""
    words = shlex.split(command)
    return (
        words[:1] == ["lmcache-stream"]
        and words[1] not in ("up", "doctor")
        and not re.search(r"\.\.\.|\b[A-Z]{4,}\b|localhost", command)
    )


def as_script(code: str) -> str:
    """`code`, with what awaits put into a coroutine."""
    if "async with" not in code or "async def" in code:
        return code
    head, body = code.split("async with", 1)
    main = textwrap.indent("async with" + body, "    ")
    return f"{head}\nasync def main():\n{main}\nimport asyncio\nasyncio.run(main())\n"


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("code", [code for code in SNIPPETS if not SERVED.search(code)])
def test_a_snippet_runs_as_printed(code: str, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(as_script(code))
    done = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "Output throughput (tok/s)" in done.stdout


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Stand-ins for the servers that README finds on this machine, by the ports it names."""
    model = tiny_model(tmp_path / "tiny", hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32)
    geometry = geometry_of(model)
    with FakeCacheServer(chunk_size=CHUNK, pool_bytes=32 << 20) as cache:
        cache.serve(str(model), geometry)
        with OffloadingEngine(cache, geometry, str(model)) as engine:
            yield {"8000": engine.base_url, "5555": cache.url, "8080": cache.http_url}


@pytest.mark.parametrize("code", [code for code in SNIPPETS if SERVED.search(code)])
def test_a_snippet_for_servers_runs_with_their_addresses(code: str, servers: dict[str, str]) -> None:
    here = SERVED.sub(lambda found: servers[found[2]], code)
    names = "import asyncio\nfrom lmcache_stream import *\n"
    asyncio.run(asyncio.to_thread(exec, compile(names + as_script(here), "README.md", "exec"), {}))


@pytest.mark.parametrize("command", commands())
def test_a_command_is_there(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in words[1:] if "=" not in word} <= targets
    elif words[0] == "lmcache-stream":
        asked = [word for word in words[1:] if word != "..."]
        parser = cli._parser(asked)
        assert parser.parse_known_args(asked)[1] == []
    else:
        assert words[0] in ("pip", "python", "python3", "git", "cd", "export"), command


def anchors(page: str) -> set[str]:
    """What a link may name after `#`: the headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", README)
    assert len(links) > 20
    for link in links:
        path, _, anchor = link.partition("#")
        if not path.startswith("http"):
            assert (ROOT / path).exists(), link
            assert not anchor or anchor in anchors((ROOT / path).read_text(encoding="utf-8")), link


def test_every_cell_about_another_tool_is_shown_somewhere() -> None:
    table = README.partition("## Beside other tools")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|")[1:] for line in table.splitlines() if line.startswith("|")][2:]
    cells = [cell.strip() for row in rows for cell in row]
    assert len(cells) >= 32
    assert [cell for cell in cells if cell != "–" and "](" not in cell] == []


def test_the_rates_beside_the_stock_sdk_are_the_measured_ones() -> None:
    found = json.loads((ROOT / "benchmarks/results.json").read_text())["results"]["bench_kv.py"]
    assert f"{found['store_vs_stock']:.1f} and {found['retrieve_vs_stock']:.1f} times as fast" in README


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [command for command in commands() if is_whole(command)])
def test_a_command_runs_as_printed(command: str, tmp_path: Path) -> None:
    run = [sys.executable, "-m", "lmcache_stream.cli", *shlex.split(command)[1:]]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
