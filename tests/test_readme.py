"""README's snippets, as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def snippet(having: str) -> str:
    """The one Python snippet that has a line of its own."""
    (found,) = [code for code in re.findall(r"```py\n(.*?)```", README.read_text(), re.S) if having in code]
    return str(found)


def as_script(code: str) -> str:
    """`code`, with what stands at its top level and awaits put into a coroutine."""
    if "async with" not in code:
        return code
    head, body = code.split("async with", 1)
    main = textwrap.indent("async with" + body, "    ")
    return f"{head}\nasync def main():\n{main}\nimport asyncio\nasyncio.run(main())\n"


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("having", ["AsyncBatchedStream(max_concurrency=256)", "lmc_batch.LMCacheBatchedStream()"])
def test_a_snippet_runs_as_printed(having: str, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(as_script(snippet(having)))
    done = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "Output throughput (tok/s)" in done.stdout
