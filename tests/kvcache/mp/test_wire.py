from __future__ import annotations

import contextlib
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.errors import CacheProtocolError
from lmcache_stream.kvcache.mp import wire

encode = msgspec.msgpack.encode
SLOT = {"offset": 4096, "length": 64, "shape": [2, 2, 2, 2], "dtype": "float32"}
RESULTS: list[tuple[wire.Operation[Any], Any, Any]] = [
    (wire.WAIT_PREFETCH_STATUS, 3, 3),
    (wire.REGISTER, {"shm_name": "pool", "pool_size": 9}, wire.Registered("pool", 9)),
    (wire.COMMIT_STORE, True, True),
    (wire.GET_CHUNK_SIZE, 256, 256),
    (wire.NOOP, "OK", "OK"),
    (
        wire.PREPARE_STORE,
        {"context": {"slots": [SLOT], "chunk_indices": [1]}},
        wire.PreparedStore(wire.StoreSlots((wire.Slot(4096, 64, (2, 2, 2, 2), "float32"),), (1,))),
    ),
    (wire.PREPARE_STORE, {"context": {}}, wire.PreparedStore(wire.StoreSlots(None, None))),
    (
        wire.PREPARE_RETRIEVE,
        {"success": True, "data": b"", "context": {"slots": [SLOT]}},
        wire.PreparedRetrieve(True, b"", wire.RetrieveSlots((wire.Slot(4096, 64, (2, 2, 2, 2), "float32"),))),
    ),
    (wire.PREPARE_RETRIEVE, {"success": False, "data": b"", "context": {}}, wire.PreparedRetrieve(False)),
]


def test_a_request_has_one_frame_an_argument() -> None:
    key = wire.CacheKey("model", 2, None, (1, 2, 3), 0, 2, "request", "salt")
    frames = wire.encode_request(7, wire.LOOKUP, (key, 2))
    assert [msgspec.msgpack.decode(frame) for frame in frames] == [
        7,
        8,
        {
            "model_name": "model",
            "world_size": 2,
            "worker_id": None,
            "token_ids": [1, 2, 3],
            "start": 0,
            "end": 2,
            "request_id": "request",
            "cache_salt": "salt",
            "request_configs": None,
            "num_kv_readers": 1,
        },
        2,
    ]
    assert len(wire.encode_request(1, wire.NOOP, ())) == 2


def test_a_registration_is_a_map_with_the_names_that_the_server_knows() -> None:
    frame = wire.encode_request(1, wire.REGISTER, (wire.Registration(5, "m", 1, 16, 3, 8, "bfloat16", False),))[2]
    assert msgspec.msgpack.decode(frame) == {
        "instance_id": 5,
        "model_name": "m",
        "world_size": 1,
        "block_size": 16,
        "num_layers": 3,
        "hidden_dim_size": 8,
        "dtype_str": "bfloat16",
        "use_mla": False,
        "num_physical_slots": None,
    }


@pytest.mark.parametrize("size", [0, 1, wire.LARGE - 1, wire.LARGE, wire.LARGE + 1])
def test_data_of_any_size_is_written_alike(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    frame = wire.encode_request(1, wire.COMMIT_STORE, ("key", 1, data))[4]
    assert bytes(frame) == encode(data)
    assert wire.is_large(("key", 1, data)) == (size >= wire.LARGE)


def test_ids_are_those_of_the_protocol() -> None:
    assert {operation.name: operation.id for operation in wire.OPERATIONS} == {
        "lookup": 8,
        "query_prefetch_status": 9,
        "wait_prefetch_status": 10,
        "free_lookup_locks": 12,
        "end_session": 13,
        "register_kv_cache_engine_driven_context": 14,
        "unregister_kv_cache_engine_driven_context": 15,
        "prepare_store": 16,
        "commit_store": 17,
        "prepare_retrieve": 18,
        "commit_retrieve": 19,
        "get_chunk_size": 21,
        "ping": 22,
        "noop": 24,
    }


@pytest.mark.parametrize(("operation", "sent", "result"), RESULTS)
def test_results(operation: wire.Operation[Any], sent: Any, result: Any) -> None:
    uid, name, frame = wire.split_reply([encode(7), encode(operation.id), encode(sent)])
    assert (uid, name) == (7, operation.id)
    assert wire.decode_result(operation, frame) == result


def test_two_frames_mean_nothing() -> None:
    uid, name, frame = wire.split_reply([encode(1 << 40), encode("a_newer_operation")])
    assert (uid, name, frame) == (1 << 40, "a_newer_operation", None)
    assert wire.decode_result(wire.WAIT_PREFETCH_STATUS, None) is None
    wire.decode_result(wire.LOOKUP, None)
    with pytest.raises(CacheProtocolError, match="with nothing"):
        wire.decode_result(wire.GET_CHUNK_SIZE, None)


def test_unknown_fields_are_left_aside() -> None:
    assert wire.decode_result(wire.REGISTER, encode({"shm_name": "", "newer": [1]})) == wire.Registered("")


def test_a_registration_that_names_no_segment_is_not_taken_for_one_without_shared_memory() -> None:
    """What is stored on would be published unwritten."""
    with pytest.raises(CacheProtocolError, match="register"):
        wire.decode_result(wire.REGISTER, encode({"surprise": ["a", "b"]}))


def test_pickled_chunks_are_not_copied() -> None:
    frame = bytearray(encode({"success": True, "data": b"chunks", "context": {}}))
    data = wire.decode_result(wire.PREPARE_RETRIEVE, memoryview(frame)).data
    frame[frame.index(b"chunks")] = ord("C")
    assert bytes(data) == b"Chunks"


@pytest.mark.parametrize(("operation", "sent", "result"), RESULTS)
def test_cut_at_every_byte(operation: wire.Operation[Any], sent: Any, result: Any) -> None:
    whole = encode(sent)
    for end in range(len(whole)):
        with pytest.raises(CacheProtocolError, match=operation.name):
            wire.decode_result(operation, whole[:end])


@pytest.mark.parametrize("frames", [[], [b"\x01"], [b"\x01"] * 4, [b"", b""], [b"\x01", b""], [encode("1"), b"\x08"]])
def test_what_is_no_reply(frames: list[bytes]) -> None:
    with pytest.raises(CacheProtocolError):
        wire.split_reply(frames)


@given(st.lists(st.binary(max_size=40), max_size=4))
@settings(deadline=None, max_examples=200)
def test_any_frames_are_read_or_refused(frames: list[bytes]) -> None:
    try:
        uid, operation, _ = wire.split_reply(frames)
    except CacheProtocolError:
        return
    assert isinstance(uid, int)
    assert isinstance(operation, int | str)


@given(st.sampled_from(wire.OPERATIONS), st.binary(max_size=80))
@settings(deadline=None, max_examples=300)
def test_any_result_is_read_or_refused(operation: wire.Operation[Any], frame: bytes) -> None:
    with contextlib.suppress(CacheProtocolError):
        wire.decode_result(operation, frame)


@given(st.sampled_from(RESULTS), st.data())
@settings(deadline=None, max_examples=200)
def test_a_flipped_byte_is_read_or_refused(case: tuple[wire.Operation[Any], Any, Any], data: st.DataObject) -> None:
    operation, sent, _ = case
    frame = bytearray(encode(sent))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CacheProtocolError):
        wire.decode_result(operation, frame)


SLOTS = st.builds(
    wire.Slot,
    st.integers(0, 2**63),
    st.integers(0, 2**40),
    st.lists(st.integers(0, 2**31), max_size=5).map(tuple),
    st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]) | st.text(max_size=8),
)
ANSWERS: dict[str, st.SearchStrategy[Any]] = {
    operation.name: {
        None: st.none(),
        int | None: st.none() | st.integers(0, 2**40),
        int: st.integers(0, 2**40),
        bool: st.booleans(),
        str: st.text(max_size=20),
        wire.Registered: st.builds(wire.Registered, st.text(max_size=40), st.integers(0, 2**50)),
        wire.PreparedStore: st.builds(
            wire.PreparedStore,
            st.builds(
                wire.StoreSlots,
                st.none() | st.lists(SLOTS, max_size=4).map(tuple),
                st.none() | st.lists(st.integers(0, 2**20), max_size=4).map(tuple),
            ),
        ),
        wire.PreparedRetrieve: st.builds(
            wire.PreparedRetrieve,
            st.booleans(),
            st.binary(max_size=300),
            st.builds(wire.RetrieveSlots, st.lists(SLOTS, max_size=4).map(tuple)),
        ),
    }[operation.result]
    for operation in wire.OPERATIONS
}
KEYS = st.builds(
    wire.CacheKey,
    st.text(max_size=20),
    st.integers(1, 16),
    st.none() | st.integers(0, 15),
    st.lists(st.integers(0, 2**32), max_size=20).map(tuple),
    st.integers(0, 20),
    st.integers(0, 20),
    st.text(max_size=20),
    st.text(max_size=20),
    st.none(),
    st.integers(1, 16),
)


@st.composite
def replies(draw: st.DrawFn) -> tuple[wire.Operation[Any], Any, list[bytes]]:
    """An operation, its result, and the frames of that reply."""
    operation = draw(st.sampled_from(wire.OPERATIONS))
    result = draw(ANSWERS[operation.name])
    head = [encode(draw(st.integers(0, 2**62))), encode(draw(st.sampled_from([operation.id, operation.name])))]
    return operation, result, head if result is None else [*head, encode(result)]


@given(replies())
def test_every_reply_is_read_as_it_was_written(reply: tuple[wire.Operation[Any], Any, list[bytes]]) -> None:
    operation, result, frames = reply
    uid, answered, frame = wire.split_reply(frames)
    assert encode(uid) == frames[0]
    assert answered in (operation.id, operation.name)
    assert (frame is None) is (len(frames) == 2)
    if result is None and operation.result not in (None, int | None):
        return
    read = wire.decode_result(operation, frame)
    if isinstance(read, wire.PreparedRetrieve):
        read = wire.PreparedRetrieve(read.success, bytes(read.data), read.context)
    assert read == result


@given(st.integers(0, 2**62), st.sampled_from([wire.LOOKUP, wire.PREPARE_STORE]), KEYS, st.integers(0, 2**62))
def test_every_request_is_read_by_a_server_as_it_was_written(
    uid: int, operation: wire.Operation[Any], key: wire.CacheKey, number: int
) -> None:
    frames = [bytes(frame) for frame in wire.encode_request(uid, operation, (key, number))]
    decode = msgspec.msgpack.decode
    assert decode(frames[0]) == uid
    assert decode(frames[1]) == operation.id
    assert decode(frames[2], type=wire.CacheKey) == key
    assert decode(frames[3]) == number


def mutated(rng: Random, frames: list[bytes]) -> list[bytes]:
    """The frames with a few bytes or whole frames changed, lost, doubled or put in between."""
    made = [bytearray(frame) for frame in frames]
    for _ in range(rng.randint(1, 4)):
        if made and rng.random() < 0.8:
            frame = rng.choice(made)
            at, lost = rng.randint(0, len(frame)), rng.choice([0, 0, 1, 1, 4, 1000])
            frame[at : at + lost] = rng.choice([b"", rng.randbytes(1), rng.randbytes(3), b"\xff" * 4, b"\xdf" * 5])
        else:
            made.insert(rng.randint(0, len(made)), bytearray(rng.randbytes(3)))
            made = rng.sample(made, rng.randint(0, len(made)))
    return [bytes(frame) for frame in made]


@given(replies(), st.integers(0, 2**32).map(Random))
@settings(max_examples=300)
def test_mutated_frames_give_a_value_or_our_error(
    reply: tuple[wire.Operation[Any], Any, list[bytes]], rng: Random
) -> None:
    operation, _, frames = reply
    try:
        uid, answered, frame = wire.split_reply(mutated(rng, frames))
        assert isinstance(uid, int)
        assert isinstance(answered, int | str)
        read = wire.decode_result(operation, frame)
    except CacheProtocolError as error:
        assert str(error)  # noqa: PT017
        return
    if operation.result is None:
        assert read is None
    else:
        assert isinstance(read, operation.result)
