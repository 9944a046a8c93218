"""Numbers from the host to the device without waiting for what the device still has to do."""

from __future__ import annotations

from typing import Any

import torch


def upload(numbers: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of `numbers`, lists or a tensor on the host, on `device`.

    A plain copy from pageable memory makes the host wait for the stream. Pinned memory is kept by torch until the copy
    is done.
    """
    host = numbers if isinstance(numbers, torch.Tensor) else torch.tensor(numbers, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
