from __future__ import annotations

import pytest
import torch

from lmcache_stream.kvcache import buffers
from lmcache_stream.kvcache.buffers import BufferPool


@pytest.mark.parametrize("size", [0, 1, buffers.HUGE_BYTES // 4 - 1, buffers.HUGE_BYTES // 4 + 1])
def test_memory_of_any_size(size: int) -> None:
    for tensor in (buffers.empty((size,), torch.float32), BufferPool().empty((size,), torch.float32)):
        assert (tensor.shape, tensor.dtype) == ((size,), torch.float32)
        tensor.copy_(torch.arange(size))
        assert torch.equal(tensor, torch.arange(size, dtype=torch.float32))


class TestBufferPool:
    def test_memory_is_used_again(self) -> None:
        pool = BufferPool()
        first = pool.empty((3, 5), torch.float32)
        assert (first.shape, first.dtype, first.is_contiguous()) == ((3, 5), torch.float32, True)
        address = first.data_ptr()
        del first
        assert pool.empty((2, 5), torch.bfloat16).data_ptr() != address  # less than half would be wasted
        assert pool.empty((5, 3), torch.float32).data_ptr() == address

    def test_not_while_a_view_lives(self) -> None:
        pool = BufferPool()
        view = pool.empty((4, 4), torch.float32)[1:].view(-1)
        others = [pool.empty((4, 4), torch.float32) for _ in range(3)]
        for other in others:
            other.fill_(1)
        view.fill_(2)
        assert all((other == 1).all() for other in others)

    def test_not_while_the_storage_lives(self) -> None:
        pool = BufferPool()
        tensor = pool.empty((4,), torch.float32)
        array = tensor.numpy()
        address = tensor.data_ptr()
        del tensor
        assert pool.empty((4,), torch.float32).data_ptr() != address
        del array

    def test_what_is_kept_is_bounded(self) -> None:
        pool = BufferPool(max_idle_bytes=100)
        tensors = [pool.empty((64,), torch.uint8) for _ in range(4)]
        del tensors
        assert sum(buffer.nbytes for buffer in pool._idle) <= 100
        pool.clear()
        assert not pool._idle
