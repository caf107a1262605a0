"""Kernels in Triton, each with a plain twin elsewhere that it is compared with; where they run, and a copy that needs none.

Loads no triton: that is left to the modules below, on first use.
"""

import contextlib

import torch
from torch import Tensor

_switched_off = 0  # how many ask for it


def serve(device: torch.device) -> bool:
    """Whether kernels of ours run on this device, rather than torch's own operations."""
    return device.type == "cuda" and not _switched_off


@contextlib.contextmanager
def written_out():
    """Inside, none runs and every operation is one of torch's: for references. In all threads of the process.

    A step or target made before keeps the attention that it was made with.
    """
    global _switched_off
    _switched_off += 1
    try:
        yield
    finally:
        _switched_off -= 1


def copy_rows_(to: Tensor, source: Tensor) -> None:
    """to = source, of one shape and any dtype. Capture: safe.

    As numbers of eight bytes where those fit: torch copies rows that stand apart number by number.
    """
    whole = max(1, 8 // to.element_size())
    fits = all(
        x.stride(-1) == 1 and all(number % whole == 0 for number in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
        for x in (to, source)
    )
    if fits and to.dtype == source.dtype:
        to, source = to.view(torch.int64), source.view(torch.int64)
    to.copy_(source)
