"""What a new user gets wrong: each mistake is told in one line that says what to do, and the exit status is 2."""

from __future__ import annotations

import os
import re
import shutil
import socketserver
import threading
from collections import namedtuple
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

from lmcache_stream import cli
from lmcache_stream.testing import FakeEngine, Reply
from lmcache_stream.testing.fake_cache_server import FakeCacheServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Refused: TypeAlias = "Callable[..., str]"

KV = ("--kv-url", "tcp://127.0.0.1:1", "--kv-http-url", "http://127.0.0.1:1")
SERVE = ("bench", "serve", "--num-prompts", "1", "--random-input-len", "8", "--random-output-len", "2")


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must be refused; its one line."""
    for name in list(os.environ):
        if name.startswith(("LMCACHE_STREAM_", "OPENAI_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> str:
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = int(end.code or 0)
        printed = capsys.readouterr()
        assert status == 2, printed.err
        assert printed.out == ""
        *before, line = printed.err.splitlines()
        assert all(said.startswith("Looking for ") for said in before), printed.err
        assert line.startswith("lmcache-stream")
        return line

    return run


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(model="served") as running:
        yield running


class TestTheModel:
    @pytest.mark.parametrize("command", [("demo",), SERVE, ("bench", "quality", "--corpus", "python")], ids=" ".join)
    @pytest.mark.parametrize("there", [True, False])
    def test_is_no_folder_of_a_model(self, command: tuple[str, ...], there: bool, refused: Refused) -> None:
        if there:
            Path("missing").mkdir()
        said = refused(*command, "--model", "missing")
        assert "missing is no" in said
        assert "config.json" in said

    def test_is_no_folder_for_vllm(self, refused: Refused) -> None:
        assert "--model takes one with config.json" in refused("up", "--model", "./missing")

    @pytest.mark.parametrize(
        ("config", "weights"), [("{", None), ("{}", None), (None, None), (None, b"version https://git-lfs.github.com")]
    )
    @pytest.mark.parametrize("command", [("demo",), ("bench", "quality", "--corpus", "python", "--editor", "knorm")])
    def test_is_a_broken_one(
        self,
        command: tuple[str, ...],
        config: str | None,
        weights: bytes | None,
        refused: Refused,
        tiny_model_path: Path,
    ) -> None:
        shutil.copytree(tiny_model_path, "broken")
        if config is not None:
            Path("broken", "config.json").write_text(config)
        for file in Path("broken").glob("*.safetensors"):
            file.unlink() if weights is None else file.write_bytes(weights)
        said = refused(*command, "--model", "broken")
        assert re.search("broken (is no model|has no tokenizer) that transformers can load", said)

    def test_finds_no_room_on_the_disk(self, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LMCACHE_STREAM_MODELS", str(tmp_path))
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage(10**9, 9 * 10**8, 10**8))
        said = refused("demo")
        assert f"takes 0.8 GB while it is made, but {tmp_path} has room for 0.1 GB: make room, or set" in said

    def test_is_not_served(self, refused: Refused, engine: FakeEngine) -> None:
        said = refused(*SERVE, "--base-url", engine.base_url, "--model", "another")
        assert "does not serve --model another: give one of served" in said


class TestAddresses:
    @pytest.mark.parametrize("command", [("demo", *KV), SERVE], ids=["demo", "bench serve"])
    def test_nobody_is_there(self, command: tuple[str, ...], refused: Refused, free_tcp_port: int) -> None:
        said = refused(*command, "--base-url", f"http://127.0.0.1:{free_tcp_port}")
        assert f"--base-url leads to no engine: http://127.0.0.1:{free_tcp_port}" in said
        assert "start one, as `lmcache-stream up` does, or correct the address" in said

    @pytest.mark.parametrize("command", [("demo", *KV), SERVE, ("doctor", *KV)], ids=["demo", "bench serve", "doctor"])
    def test_there_is_no_scheme(self, command: tuple[str, ...], refused: Refused) -> None:
        said = refused(*command, "--base-url", "localhost:8000")
        assert "--base-url is 'localhost:8000'" in said
        assert "give http://localhost:8000" in said

    @pytest.mark.parametrize(
        ("flag", "remedy"), [("--kv-url", "with one of"), ("--kv-http-url", "must start with http:// or https://")]
    )
    def test_the_cache_has_no_scheme(self, flag: str, remedy: str, refused: Refused, engine: FakeEngine) -> None:
        said = refused("demo", "--base-url", engine.base_url, *KV, flag, "localhost:5555")
        assert remedy in said
        assert flag in said

    @pytest.mark.parametrize(
        ("flag", "remedy"), [("--kv-url", "begin it with one of tcp://"), ("--kv-http-url", "must begin with http://")]
    )
    def test_doctor_is_given_no_scheme(self, flag: str, remedy: str, refused: Refused) -> None:
        said = refused("doctor", "--base-url", "http://127.0.0.1:1", *KV, flag, "localhost:5555")
        assert f"{flag} localhost:5555" in said
        assert remedy in said

    def test_the_engine_speaks_no_https(self, refused: Refused) -> None:
        class Plain(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.recv(4096)
                self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        with socketserver.TCPServer(("127.0.0.1", 0), Plain) as server:
            threading.Thread(target=server.serve_forever).start()
            try:
                said = refused(*SERVE, "--base-url", f"https://127.0.0.1:{server.server_address[1]}")
            finally:
                server.shutdown()
        assert "or correct the address, or its scheme, to http://" in said

    def test_the_port_is_the_cache_servers(self, refused: Refused) -> None:
        with FakeCacheServer() as server:
            said = refused(*SERVE, "--base-url", server.http_url)
        assert "--base-url leads to no engine: HTTP 404" in said

    def test_the_port_is_the_engines(self, refused: Refused, engine: FakeEngine) -> None:
        with FakeCacheServer() as server:
            said = refused(
                *("demo", "--base-url", engine.base_url, "--kv-url", server.url, "--kv-http-url", engine.base_url)
            )
        assert "is it the HTTP address of an LMCache MP server" in said

    def test_the_engine_wants_a_key(self, refused: Refused, engine: FakeEngine) -> None:
        refusal = Reply(status=401, body=b'{"error": "Unauthorized"}', content_type="application/json")
        engine.script(refusal, path="/v1/models")
        said = refused(*SERVE, "--base-url", engine.base_url)
        assert "wants its key: HTTP 401: Unauthorized; set OPENAI_API_KEY to it" in said

    def test_some_are_missing(self, refused: Refused) -> None:
        assert "go together: give all three" in refused("demo", "--base-url", "http://127.0.0.1:1")
        assert "needs --kv-url and --kv-http-url" in refused(*SERVE, "--base-url", "http://a", "--editor", "knorm")


class TestWords:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("demo", "--keeep", "0.5"), "there is no --keeep here, is it --keep?"),
            ((*SERVE, "--num-promts", "3"), "there is no --num-promts here, is it --num-prompts?"),
            (("demo", "--editor", "snapvk"), "no editor is called 'snapvk': choose from"),
            ((*SERVE, "--editor", "snapvk"), "no editor is called 'snapvk': choose from"),
            (("bench", "quality", "--editor", "snapvk"), "no editor is called 'snapvk': choose from"),
            (("bench", "quality", "--baseline", "snapvk"), "no editor is called 'snapvk': choose from"),
            (("editors", "snapvk"), "no editor is called 'snapvk': choose from"),
            (("demo", "--editor", "snapkv:windw=8"), "snapkv has no parameter windw: choose from"),
            ((*SERVE, "--editor", "snapkv:windw=8"), "snapkv has no parameter windw: choose from"),
            (("bench", "quality", "--editor", "snapkv:windw=8"), "snapkv has no parameter windw: choose from"),
            (("demo", "--editor", "snapkv:window"), "is not of the form NAME:KEY=VALUE"),
            (("demo", "--keep", "1.5"), "'1.5' is neither a ratio above 0.0 and up to 1.0 nor a count"),
            ((*SERVE, "--editor", "knorm", "--keep", "1.5"), "'1.5' is neither a ratio such as 0.5, up to 1.0, nor a"),
            (("bench", "quality", "--keep", "1.5"), "'1.5' is not a ratio above 0.0 and up to 1.0, or a count"),
            (("demo", "--editor", "knorm:keep=1.5"), "keep=1.5: a ratio lies in (0, 1]; a token count is an int"),
            (("bench", "sevre"), "invalid choice: 'sevre'"),
            (
                ("up", "--model", "m", "--max-num-seqs", "64"),
                "no --max-num-seqs here (further flags for vLLM, after --)",
            ),
            ((*SERVE, "--editor", "streming-llm"), "; is it streaming-llm?"),
            ((*SERVE, "--editor", "expected-attention"), "on a command line, expected-attention:statistics=FILE"),
            ((*SERVE, "--resume", "none.journal"), "there is no journal none.journal to go on with"),
        ],
    )
    def test_are_misspelt_or_out_of_range(self, arguments: tuple[str, ...], said: str, refused: Refused) -> None:
        assert said in refused(*arguments)


class TestFiles:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("demo", "--prompts", "none.jsonl"), "cannot read prompts from none.jsonl: No such file or directory"),
            (
                (*SERVE, "--dataset-name", "custom", "--dataset-path", "none.jsonl"),
                "cannot read --dataset-path none.jsonl: No such file or directory; it takes a file of prompts",
            ),
            ((*SERVE, "--dataset-name", "sharegpt"), "--dataset-name sharegpt needs --dataset-path"),
            (("bench", "quality", "--corpus", "none.txt"), "name a .txt file, a folder of them, speeches or python"),
            (("bench", "compare", "none.json", "none.json"), "cannot read the result none.json: No such file"),
            ((*SERVE, "--config", "none.toml"), "cannot read the options in none.toml: No such file"),
            (("demo", "--json", "none/out.json"), "--json takes a file in a folder that exists"),
        ],
    )
    def test_are_missing(self, arguments: tuple[str, ...], said: str, refused: Refused) -> None:
        assert said in refused(*arguments)

    def test_a_missing_data_set_is_found_before_an_engine_is_asked(self, refused: Refused, engine: FakeEngine) -> None:
        refused(*SERVE, "--base-url", engine.base_url, "--dataset-name", "custom", "--dataset-path", "none.jsonl")
        assert engine.requests == []
