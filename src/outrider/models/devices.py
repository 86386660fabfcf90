"""Where torch computes, and in what precision."""

from __future__ import annotations

import torch

from outrider.errors import UsageError
from outrider.models import Dtype

__all__ = ["choose_device", "choose_dtype", "synchronise"]


def choose_device(device: str) -> torch.device:
    """The device that is named, or for "auto" the fastest one; UsageError if it is not here."""
    if device != "auto":
        try:
            chosen = torch.device(device)
            torch.empty(1, device=chosen)
        except (RuntimeError, AssertionError) as error:
            raise UsageError(f"device {device!r} is not available here") from error
        return chosen
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def choose_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """The precision that is named, or for "auto" bfloat16 where the device computes in it."""
    if dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type == "mps":
        return torch.bfloat16
    # Without instructions for it, bfloat16 on a CPU is emulated and several times slower.
    computes = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if computes else torch.float32


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
