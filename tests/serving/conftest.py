"""Small programs that stand in for the servers, as the modules that the real ones are started by."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

COMMON = """
import http.server, json, os, signal, socketserver, sys, time
from multiprocessing import resource_tracker, shared_memory

def option(name, default=None):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default

def behave(mode):
    print("stand-in", mode, os.getpid(), flush=True)
    if mode == "dies":
        print("no room for the pool", flush=True)
        sys.exit(3)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "silent":
        time.sleep(600)

def make_segment(name):
    segment = shared_memory.SharedMemory(name, create=True, size=4096)
    resource_tracker.unregister(segment._name, "shared_memory")
    with open(os.environ["STANDIN_SEGMENTS"], "a") as file:
        file.write(segment.name + "\\n")
    return segment

def serve(port, answers):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(answers[self.path]()).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def log_message(self, *_): pass
    # not an HTTPServer: that one looks its own name up, which can take long without a network
    socketserver.ThreadingTCPServer.allow_reuse_address = True
    socketserver.ThreadingTCPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""

LMCACHE = (
    COMMON
    + """
behave(os.environ.get("STANDIN_LMCACHE", "well"))
if option("--shm-name"):
    segment = make_segment("lmcache_l1_pool_" + option("--shm-name"))
models = os.environ["STANDIN_MODELS"]
def status():
    workers = open(models).read().split() if os.path.exists(models) else []
    ranks = {str(rank): {"model_name": name, "world_size": len(workers)} for rank, name in enumerate(workers)}
    return {"is_healthy": True, "non_cuda_context_meta": ranks}
config = {"mp": {"chunk_size": int(option("--chunk-size"))}}
serve(option("--http-port"), {"/status": status, "/config": lambda: config})
"""
)

VLLM = (
    COMMON
    + """
mode = os.environ.get("STANDIN_VLLM", "well")
behave(mode)
segment = make_segment(None)
if mode != "unregistered":
    with open(os.environ["STANDIN_MODELS"], "w") as file:
        file.write(" ".join([option("--model")] * int(option("--tensor-parallel-size"))))
def crash():
    os.unlink("/dev/shm/" + segment.name)
    os._exit(7)
serve(option("--port"), {"/health": dict, "/crash": crash})
"""
)


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `python -m` start stand-ins for both servers; the environment says how they behave."""
    modules = tmp_path / "modules"
    for module, source in (("lmcache.cli.main", LMCACHE), ("vllm.entrypoints.openai.api_server", VLLM)):
        path = modules.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True)
        path.write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv("STANDIN_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("STANDIN_SEGMENTS", str(tmp_path / "segments"))
    monkeypatch.setenv("LMCACHE_STREAM_REAL_PYTHON", sys.executable)
    return tmp_path


@pytest.fixture
def left_in_shm(tmp_path: Path) -> Callable[[], set[str]]:
    """The segments that the stand-ins of this test have made and that are still there."""

    def left() -> set[str]:
        made = tmp_path / "segments"
        names = made.read_text().split() if made.exists() else []
        return {name for name in names if Path("/dev/shm", name).exists()}

    return left
