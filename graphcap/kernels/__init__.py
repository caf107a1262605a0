"""Kernels in Triton, each with a plain twin elsewhere that it is compared with; and where they run.

Loads no triton: that is left to the modules below, on first use.
"""

import contextlib

import torch

_switched_off = False


def serve(device: torch.device) -> bool:
    """Whether kernels of ours run on this device, rather than torch's own operations."""
    return device.type == "cuda" and not _switched_off


@contextlib.contextmanager
def written_out():
    """Inside, none runs and every operation is one of torch's: for references."""
    global _switched_off
    _switched_off, before = True, _switched_off
    try:
        yield
    finally:
        _switched_off = before
