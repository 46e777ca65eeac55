from __future__ import annotations

import torch

from lmcache_stream.kvcache.equality import equal_bytes


def test_equal_bytes_are_equal_whatever_they_mean_and_however_they_lie() -> None:
    values = torch.tensor([[1.0, float("nan"), 0.0], [2.0, 3.0, 4.0]])
    assert equal_bytes(values, values.clone())
    assert equal_bytes(values, values.t().contiguous().t().requires_grad_())


def test_other_bytes_shapes_and_dtypes_are_not() -> None:
    zeros = torch.zeros(2, 3)
    assert not equal_bytes(zeros, -zeros)
    assert not equal_bytes(zeros, zeros.view(3, 2))
    assert not equal_bytes(zeros, zeros.view(torch.int32))
