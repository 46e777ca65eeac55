"""Whether two tensors hold the same bytes."""

from __future__ import annotations

import torch

__all__ = ["equal_bytes"]


def equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every byte, so that NaN equals itself; any devices and strides."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b).to(a.device))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)
