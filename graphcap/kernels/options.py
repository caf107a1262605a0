"""Tile sizes of the kernels, by chip and head size. Without an entry the small ones serve, which fit every chip since 8.0.

Called by kernels/attention.py, tools/kernel_targets.py and tools/account.py. Loads no triton.
"""

import functools
from dataclasses import dataclass

from graphcap.errors import ConfigError


@dataclass(frozen=True)
class Tiles:
    """queries, keys: rows of a tile. warps, stages: of a program, as Triton means them. registers: at most, of a thread."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def launch(self) -> dict[str, int]:
        """What Triton is told at a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages} | ({"maxnreg": self.registers} if self.registers else {})


SMALL = {  # fit 99 KB of shared memory
    ("forward", 64): Tiles(64, 64, 4, 2),
    ("forward", 128): Tiles(64, 32, 4, 2),
    ("forward", 256): Tiles(64, 32, 8, 1),
    ("dq", 64): Tiles(64, 32, 4, 2),
    ("dq", 128): Tiles(64, 32, 4, 1),
    ("dq", 256): Tiles(32, 32, 8, 1),
    ("dkv", 64): Tiles(32, 64, 4, 2),
    ("dkv", 128): Tiles(32, 64, 4, 1),
    ("dkv", 256): Tiles(32, 32, 8, 1),
}
LARGE = {  # 9.0 and 10.0, 227 KB; measured on 9.0
    ("forward", 64): Tiles(64, 64, 4, 3, 128),
    ("forward", 128): Tiles(64, 32, 4, 3),
    ("dq", 64): Tiles(64, 32, 4, 3),
    ("dq", 128): Tiles(64, 64, 4, 2),
    ("dkv", 64): Tiles(32, 64, 4, 3),
    ("dkv", 128): Tiles(32, 64, 4, 3),
}
FLOAT32 = {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)}
LARGEST = 256  # head size
PROGRAMS_PER_PROCESSOR = 8  # fewer, and gradients of keys are made head by head


def options(kernel: str, capability: tuple[int, int], head_dim: int, itemsize: int) -> Tiles:
    """Tiles of a kernel: "forward", "dq" or "dkv". head_dim: a power of two. itemsize: bytes of a number.

    Raises: ConfigError for a head size that no tiles are made for.
    """
    if head_dim > LARGEST:
        raise ConfigError(
            "head size",
            head_dim,
            expected=f"at most {LARGEST} on a GPU",
            got=f"heads that need tiles of {head_dim}",
            cause="their tiles do not fit a GPU's shared memory",
            fix="use a target of smaller heads, or set drafter.head_dim",
        )
    size = max(64, head_dim)
    if itemsize > 2:
        return FLOAT32[size]
    large = LARGE if capability in ((9, 0), (10, 0)) else {}
    return large.get((kernel, size)) or SMALL[kernel, size]


def heads_apart(num_programs: int, device) -> bool:
    """Whether gradients of keys are made for every query head alone and summed: where else few programs would run long."""
    return num_programs < PROGRAMS_PER_PROCESSOR * num_processors(device)


@functools.cache
def num_processors(device) -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@functools.cache
def capability(device) -> tuple[int, int]:
    """The chip's. A device that is no GPU, where triton's interpreter runs, has the smallest tiles."""
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
