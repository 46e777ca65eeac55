"""The documents' own snippets, run after exactly one substitution: in a script, in a thread, in a Jupyter kernel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import nbclient
import pytest
from nbformat.v4 import new_code_cell, new_notebook

SPEC = Path(__file__).parent / "data" / "spec"

# What the documents take as given: an engine and its cache, a callable that asks it, prompts, and an edit.
GIVEN = """
import json
import os
import urllib.request
from contextlib import ExitStack

import lmcache_stream.kvcache
from lmcache_stream.editors import StreamingLLM
from lmcache_stream.engine import EmbeddedEngine
from lmcache_stream.types import TokenEvent

served = ExitStack()
engine = served.enter_context(
    EmbeddedEngine(os.environ["TINY_MODEL"], cache="memory://default", served_model_name="Qwen/Qwen3-8B")
)
ctx = served.enter_context(lmcache_stream.kvcache.connect("memory://default", model_name="Qwen/Qwen3-8B"))


def post_completion(prompt_token_ids, sampling_params, cache_salt):
    body = {"prompt": prompt_token_ids, "stream": True, "return_token_ids": True, **sampling_params}
    if cache_salt:
        body["cache_salt"] = cache_salt
    url, headers = engine.base_url + "/v1/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    for token_id in choice["token_ids"] or ():
                        yield TokenEvent(token_id, choice["text"])


prompts = [[(start + 7 * place) % 500 + 3 for place in range(70 + start)] for start in range(3)]
source_tokens = prompts[0]
drop_tokens = StreamingLLM(keep=0.5)
given_ctx = ctx
"""

CHECKS = {
    "stream.md": """
assert 1 < stream.decoded_tokens() <= 257
assert len(stream.output_tokens()) == stream.decoded_tokens()
assert stream.suffix_tokens() == []
assert len(stream.tokens) == 32 + (len(source_tokens) - 64) + stream.decoded_tokens()
""",
    "batch.md": """
assert data["title"] == "Decode"
assert data["metrics"]["config"] == {"num_streams": 3}
assert 3 <= data["metrics"]["results"]["output_tokens"] <= 3 * 256
for stream in batch:
    assert len(stream.output_tokens()) == stream.decoded_tokens() > 1
""",
}
CLOSE = """
if ctx is not given_ctx:
    ctx.close()
served.close()
"""


def snippets(document: str) -> list[str]:
    return re.findall(r"^```(?:py|python)\n(.*?)^```$", (SPEC / document).read_text(), re.DOTALL | re.MULTILINE)


def program(document: str) -> str:
    (snippet,) = snippets(document)
    return "\n".join([GIVEN, snippet.replace("lmcache.sdk", "lmcache_stream"), CHECKS[document], CLOSE])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from lmcache_stream.testing.tiny import tiny_model

    folder = tmp_path_factory.mktemp("snippets")
    environment = {"TINY_MODEL": str(tiny_model(folder / "tiny")), "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder)}
    return {name: value for name, value in {**os.environ, **environment}.items() if "LMCACHE_STREAM" not in name}


@pytest.mark.parametrize("document", CHECKS)
def test_in_a_script(document: str, environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(program(document))
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # A plain callable cannot say what the engine took from the cache.
    (warning,) = done.stderr.splitlines()
    assert "--enable-prompt-tokens-details" in warning
    assert ("Output throughput" in done.stdout) == (document == "batch.md")


@pytest.mark.parametrize("document", CHECKS)
def test_in_a_thread(document: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_MODEL", environment["TINY_MODEL"])
    monkeypatch.delenv("LMCACHE_STREAM_KV_URL", raising=False)
    monkeypatch.delenv("LMCACHE_STREAM_KV_HTTP_URL", raising=False)
    faults: list[BaseException] = []

    def run() -> None:
        names: dict[str, Any] = {}
        try:
            exec(program(document), names)
        except BaseException as fault:
            faults.append(fault)
            if "served" in names:
                names["served"].close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=120)
    assert not thread.is_alive()
    for fault in faults:
        raise fault


@pytest.mark.parametrize("document", CHECKS)
async def test_in_a_kernel(document: str, environment: dict[str, str]) -> None:
    (snippet,) = snippets(document)
    cells = [GIVEN, snippet.replace("lmcache.sdk", "lmcache_stream"), CHECKS[document], CLOSE]
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3")
    await client.async_execute(env=environment)
    shown = "".join(output.get("text", "") for cell in notebook.cells for output in cell.outputs)
    assert ("Output throughput" in shown) == (document == "batch.md")


# The documented addresses, in a network of the script's own, where their ports are free.
CACHE_SERVER = """
import asyncio
import fcntl
import json
import socket
import struct
import threading
from pathlib import Path

import torch

from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache import connect
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as loopback:
    fcntl.ioctl(loopback, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: up and running

model = "Qwen/Qwen3-8B"
config = {"model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 8, "num_attention_heads": 2,
          "num_key_value_heads": 2, "head_dim": 4, "torch_dtype": "float32", "rope_theta": 10000.0,
          "max_position_embeddings": 512}
Path(model).mkdir(parents=True)
Path(model, "config.json").write_text(json.dumps(config))
server = FakeCacheServer(chunk_size=8).start()
server.serve(model, KVGeometry(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32, block_size=4))


def forward(port, to):
    async def pipe(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def accept(reader, writer):
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", to)
        await asyncio.gather(pipe(reader, other_writer), pipe(other_reader, writer), return_exceptions=True)

    async def main():
        server = await asyncio.start_server(accept, "localhost", port)
        ready.set()
        await server.serve_forever()

    ready = threading.Event()
    threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start()
    ready.wait(10)


forward(5555, int(server.url.rsplit(":", 1)[1]))
forward(8080, int(server.http_url.rsplit(":", 1)[1]))
tokens, toks = list(range(20)), list(range(100, 116))
cached = torch.arange(2 * 3 * 16 * 8, dtype=torch.float32).view(2, 3, 16, 8)
with connect(server.url, server.http_url, model, geometry=KVGeometry.from_config(Path(model))) as first:
    assert first.store(cached, tokens[:16])
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode != 0
    if shutil.which("unshare")
    else True,
    reason="no network namespaces here",
)
def test_the_documented_cache_snippet_at_the_documented_addresses(tmp_path: Path) -> None:
    (snippet,) = snippets("kvcache.md")
    script = tmp_path / "script.py"
    checks = "assert torch.equal(kv, cached)\nassert ok is True\nserver.stop()\n"
    script.write_text("\n".join([CACHE_SERVER, snippet.replace("lmcache.sdk", "lmcache_stream"), checks]))
    done = subprocess.run(
        ["unshare", "--net", sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
