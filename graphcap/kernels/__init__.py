"""Kernels in Triton, each with a plain twin elsewhere that it is compared with; and where they run.

Loads no triton: that is left to the modules below, on first use.
"""

import contextlib

import torch

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
