"""What the hot paths may cost, in bytecode instructions and allocated bytes: neither depends on how busy a machine is.

A bound on instructions or bytes is about 1.4 times what Python 3.11 counts: other versions compile a little
differently, and a loop that does its work twice is still caught. Calls of functions written in C do not depend on the
version; their bounds leave no room for one more an event.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

import lmcache_stream
from lmcache_stream import observe
from lmcache_stream.completions.sse import CompletionDecoder
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from lmcache_stream.transfer import TransferExecutor

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType
    from typing import Self

PACKAGE = str(Path(lmcache_stream.__file__).parent)
TESTING = str(Path(PACKAGE, "testing"))
EVENTS = 512


class Cost:
    """Counts what this package's code does in this thread and in those that start meanwhile.

    Attributes:
        instructions: Bytecode instructions.
        calls: Calls of functions written in C, which may hide much work behind one instruction.
    """

    def __init__(self) -> None:
        self.instructions = 0
        self.calls = 0

    def __enter__(self) -> Self:
        self._before = sys.gettrace(), sys.getprofile()
        threading.settrace(self._traced)
        threading.setprofile(self._profiled)
        sys.settrace(self._traced)
        sys.setprofile(self._profiled)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sys.settrace(self._before[0])
        sys.setprofile(self._before[1])
        threading.settrace(None)
        threading.setprofile(None)

    def _traced(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not _is_ours(frame):
            return None
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._in_frame

    def _in_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.instructions += event == "opcode"
        return self._in_frame

    def _profiled(self, frame: FrameType, event: str, arg: Any) -> None:
        self.calls += event == "c_call" and _is_ours(frame)


def _is_ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(PACKAGE) and not file.startswith(TESTING)


def cost(fn: Callable[[], object]) -> Cost:
    fn()
    with Cost() as counted:
        fn()
    return counted


def allocated(fn: Callable[[], object]) -> int:
    """Bytes that were allocated at once, at most."""
    fn()
    tracemalloc.start()
    try:
        result = fn()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del result
    return peak


# The parse loop


def event(index: int) -> bytes:
    choice = {"index": 0, "text": f" word{index % 10}", "finish_reason": None, "token_ids": [1000 + index]}
    return b"data: " + json.dumps({"id": "cmpl-1", "model": "m", "choices": [choice]}).encode() + b"\n\n"


BODY = [event(index) for index in range(EVENTS)]


def feed(*reads: bytes) -> list[Any]:
    decoder = CompletionDecoder()
    tokens = [token for read in reads for token in decoder.feed(read, 1.0)]
    assert len(tokens) == EVENTS
    return tokens


def per_event(*reads: bytes) -> tuple[float, float]:
    counted = cost(lambda: feed(*reads))
    return counted.instructions / EVENTS, counted.calls / EVENTS


def test_cost_of_an_event_among_many_in_a_read() -> None:
    instructions, calls = per_event(b"".join(BODY))
    assert instructions < 125
    assert calls < 5.9


def test_cost_of_an_event_with_a_read_of_its_own() -> None:
    instructions, calls = per_event(*BODY)
    assert instructions < 275
    assert calls < 12.9


def test_cost_of_an_event_that_is_cut() -> None:
    whole = b"".join(BODY)
    size = len(whole) // EVENTS // 2
    instructions, calls = per_event(*(whole[start : start + size] for start in range(0, len(whole), size)))
    assert instructions < 400
    assert calls < 19.9


def test_bytes_allocated_for_an_event() -> None:
    whole = b"".join(BODY)
    assert allocated(lambda: feed(whole)) / EVENTS < 600


# The wire codec


KEY = wire.CacheKey("a/model", 1, None, tuple(range(2048)), 0, 2048, "request", "salt")
SLOTS = [{"offset": 64 * index, "length": 64, "shape": [2, 2, 2, 2], "dtype": "float32"} for index in range(8)]
FOUND = msgspec.msgpack.encode({"success": True, "data": b"", "context": {"slots": SLOTS}})
PICKLES = b"chunks" * 2**18
PICKLED = msgspec.msgpack.encode({"success": True, "data": PICKLES, "context": {}})


def answered(frame: bytes) -> wire.PreparedRetrieve:
    uid, operation, result = wire.split_reply([b"\x07", b"\x12", frame])
    assert (uid, operation) == (7, wire.PREPARE_RETRIEVE.id)
    return wire.decode_result(wire.PREPARE_RETRIEVE, result)


def test_cost_of_a_request_and_its_reply() -> None:
    """However many tokens and slots there are in them: no loop of ours goes over those."""
    request, reply = cost(lambda: wire.encode_request(7, wire.LOOKUP, (KEY, 1))), cost(lambda: answered(FOUND))
    assert request.instructions < 55
    assert reply.instructions < 97
    assert request.calls < 8
    assert reply.calls < 8


def test_bytes_allocated_for_a_request() -> None:
    assert allocated(lambda: wire.encode_request(7, wire.LOOKUP, (KEY, 1))) < 10_500
    sent = (7, KEY, PICKLES)
    assert allocated(lambda: wire.encode_request(7, wire.COMMIT_STORE, sent)) < 1.1 * len(PICKLES)


def test_bytes_allocated_for_a_reply() -> None:
    assert allocated(lambda: answered(FOUND)) < 2100
    assert allocated(lambda: answered(PICKLED)) < 10_000


# The retrieve path


CHUNK = 8
GEOMETRY = KVGeometry(
    num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32, chunk_size=CHUNK, block_size=4, num_heads=4
)


def cost_of_a_retrieve(chunks: int) -> tuple[int, int]:
    """Instructions and calls, the fewest of several retrieves, in all threads of the context."""
    tokens = list(range(chunks * CHUNK))
    kv = torch.arange(2 * 3 * len(tokens) * 8, dtype=torch.float32).view(2, 3, len(tokens), 8)

    async def retrieves() -> tuple[int, int]:
        counts = []
        with Cost() as counted, closing(TransferExecutor(1, device="cpu")) as executor:
            context = await open_context(
                server.url,
                http_url=server.http_url,
                model_name="a/model",
                geometry=GEOMETRY,
                timeout=20.0,
                executor=executor,
            )
            try:
                assert await context.store(kv, tokens)
                for _ in range(6):
                    before = counted.instructions, counted.calls
                    got = await context.retrieve(tokens)
                    counts.append((counted.instructions - before[0], counted.calls - before[1]))
                    assert got is not None
                    assert torch.equal(got, kv)
                    del got
            finally:
                await context.close()
        return min(of[0] for of in counts), min(of[1] for of in counts)

    with FakeCacheServer(chunk_size=CHUNK) as server:
        server.serve("a/model", GEOMETRY)
        return asyncio.run(retrieves())


def test_cost_of_a_retrieve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "telemetry", lambda: None)  # other tests import OpenTelemetry
    few, many = cost_of_a_retrieve(4), cost_of_a_retrieve(36)
    instructions, calls = ((many[index] - few[index]) / 32 for index in (0, 1))
    assert few[0] < 11_500
    assert few[1] < 400
    assert instructions < 470
    assert calls < 12.9
