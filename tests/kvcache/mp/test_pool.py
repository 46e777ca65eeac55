from __future__ import annotations

import gc
import mmap
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.errors import CacheConnectionError, CacheProtocolError, UsageError
from lmcache_stream.kvcache.mp.pool import Pool, torch_dtype
from lmcache_stream.kvcache.mp.wire import Slot

SIZE = 1 << 16


def make_segment(name: str, size: int = SIZE) -> mmap.mmap:
    descriptor = os.open(f"/dev/shm/{name}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test_pool_{secrets.token_hex(8)}"
    yield name
    if os.path.exists(f"/dev/shm/{name}"):
        os.unlink(f"/dev/shm/{name}")


@pytest.fixture
def segment(name: str) -> mmap.mmap:
    return make_segment(name)


def test_a_view_is_the_segment_itself(name: str, segment: mmap.mmap) -> None:
    pool = Pool(f"/{name}")
    assert pool.size == SIZE
    with pool.lease() as lease:
        view = lease.view(Slot(4096, 64, (2, 8), "float32"))
        view.copy_(torch.arange(16.0).view(2, 8))
    assert torch.equal(torch.frombuffer(segment, dtype=torch.float32, count=16, offset=4096), torch.arange(16.0))
    with pool.lease() as lease:
        assert lease.view(Slot(4096, 128, (4,), "torch.bfloat16")).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "slot",
    [
        Slot(SIZE, 4, (1,), "float32"),
        Slot(SIZE - 4, 8, (2,), "float32"),
        Slot(-4, 4, (1,), "float32"),
        Slot(0, 4, (2,), "float32"),
        Slot(2, 4, (1,), "float32"),
        Slot(0, 4, (-1,), "float32"),
        Slot(0, 4, (0,), "float32"),
        Slot(0, 4, (1,), "float13"),
        Slot(0, 4, (1,), "nn"),
        Slot(1 << 62, 4, (1,), "float32"),
        Slot(0, 1 << 62, (1 << 31, 1 << 31), "float32"),
        Slot(0, 4, (1,) * 100_000, "uint8"),
        Slot(0, SIZE, (SIZE + 1,), "uint8"),
        Slot(4, SIZE, (1,), "uint8"),
        Slot(0, 4, (1,), "complex64"),
        Slot(0, 4, (1,), "qint8"),
        Slot(0, 4, (1,), "x" * 1_000_000),
    ],
)
def test_a_slot_that_cannot_be_is_refused(name: str, segment: mmap.mmap, slot: Slot) -> None:
    with Pool(name).lease() as lease, pytest.raises(CacheProtocolError) as caught:
        lease.view(slot)
    assert len(str(caught.value)) < 500


@given(
    st.integers(-SIZE, 2 * SIZE),
    st.integers(-SIZE, 2 * SIZE),
    st.lists(st.integers(-2, 1 << 20), max_size=4),
    st.sampled_from(["float32", "bfloat16", "uint8", "int"]),
)
@settings(deadline=None, max_examples=200)
def test_a_view_lies_inside_the_pool_or_is_refused(offset: int, length: int, shape: list[int], dtype: str) -> None:
    name = f"test_pool_{secrets.token_hex(8)}"
    make_segment(name)
    try:
        pool = Pool(name, populate=None)
        with pool.lease() as lease:
            start = lease.view(Slot(0, 1, (1,), "uint8")).data_ptr()
            try:
                view = lease.view(Slot(offset, length, tuple(shape), dtype))
            except CacheProtocolError:
                return
            assert start <= view.data_ptr()
            assert view.data_ptr() + view.numel() * view.itemsize <= start + SIZE
    finally:
        os.unlink(f"/dev/shm/{name}")


def test_no_view_behind_the_end_of_a_lease(name: str, segment: mmap.mmap) -> None:
    pool = Pool(name)
    with pool.lease() as lease:
        pass
    with pytest.raises(UsageError, match="lease"):
        lease.view(Slot(0, 4, (1,), "float32"))


def test_a_closed_pool_gives_no_lease_but_its_views_live(name: str, segment: mmap.mmap) -> None:
    pool = Pool(name)
    with pool.lease() as lease:
        view = lease.view(Slot(0, 4, (1,), "float32"))
        view.fill_(3)
        pool.close()
        assert lease.view(Slot(0, 4, (1,), "float32")).item() == 3
    assert pool.closed
    assert view.item() == 3
    with pytest.raises(UsageError, match="closed"), pool.lease():
        pass


def _mapped(name: str) -> bool:
    with open("/proc/self/maps") as maps:
        return name in maps.read()


def test_the_mapping_goes_with_the_last_view(name: str) -> None:
    make_segment(name).close()
    pool = Pool(name)
    with pool.lease() as lease:
        view = lease.view(Slot(0, 4, (1,), "float32"))
    pool.close()
    del lease
    for thread in threading.enumerate():
        if thread.name == "lmcache-stream pages":
            thread.join()
    gc.collect()
    assert _mapped(name)
    del view
    gc.collect()
    assert not _mapped(name)


def test_no_descriptor_is_kept(name: str, segment: mmap.mmap) -> None:
    gc.collect()  # of others
    before = len(os.listdir("/proc/self/fd"))
    pool = Pool(name, populate=None)
    with pool.lease() as lease:
        lease.view(Slot(0, 4, (1,), "float32"))
    pool.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_segment_of_the_same_name_is_noticed(name: str, segment: mmap.mmap) -> None:
    pool = Pool(name)
    assert pool.is_current()
    os.unlink(f"/dev/shm/{name}")
    assert not pool.is_current()
    make_segment(name)
    assert not pool.is_current()
    assert Pool(name).is_current()


def test_a_process_that_attached_leaves_the_segment_alone(name: str, segment: mmap.mmap) -> None:
    code = f"from lmcache_stream.kvcache.mp.pool import Pool; Pool({name!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "resource_tracker" not in done.stderr
    assert os.path.exists(f"/dev/shm/{name}")


def test_no_segment_here() -> None:
    with pytest.raises(CacheConnectionError, match="same machine"):
        Pool("test_pool_that_is_not_there")


@pytest.mark.parametrize("name", ["", "/", "../etc/passwd", "a/b", ".", "..", "a\0b", "a\nb"])
def test_a_name_that_cannot_be(name: str) -> None:
    with pytest.raises(CacheProtocolError):
        Pool(name)


def test_a_link_is_not_followed(name: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"x" * 4096)
    os.symlink(elsewhere, f"/dev/shm/{name}")
    with pytest.raises(CacheConnectionError, match="cannot be opened"):
        Pool(name)


def test_what_is_no_segment(name: str) -> None:
    os.mkfifo(f"/dev/shm/{name}")
    with pytest.raises(CacheProtocolError, match="or none"):
        Pool(name)


def test_a_name_too_long() -> None:
    with pytest.raises(CacheConnectionError, match="too long"):
        Pool("x" * 1000)


def _populated(pool: Pool) -> None:
    for thread in threading.enumerate():
        if thread.name == "lmcache-stream pages":
            thread.join()
    pool.close()


def _blocks(name: str) -> int:
    return os.stat(f"/dev/shm/{name}").st_blocks * 512


def test_an_unfilled_segment_is_not_filled_by_us(name: str) -> None:
    descriptor = os.open(f"/dev/shm/{name}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.ftruncate(descriptor, 1 << 20)
    _populated(Pool(name))
    assert _blocks(name) == 0
    os.pwrite(descriptor, b"x" * 4096, 1 << 16)
    _populated(Pool(name))
    assert _blocks(name) == 4096
    _populated(Pool(name, populate="all"))
    assert _blocks(name) == 1 << 20
    os.close(descriptor)


def test_dtypes() -> None:
    assert torch_dtype("bfloat16") == torch_dtype("torch.bfloat16") == torch.bfloat16
    for wrong in ("", "Tensor", "load", "float13", "_dynamo", "complex64", "bool", "quint8", "torch.torch.float32"):
        with pytest.raises(CacheProtocolError, match="dtype"):
            torch_dtype(wrong)
