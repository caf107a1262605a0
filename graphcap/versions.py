"""What ran on which versions: the environment of a run, and whether this torch has run on a GPU here before.

Called by train.py, build.py, ops/device.py and ops/machine.py. Loads torch only inside `environment`.
"""

import platform
from importlib import metadata

from graphcap import __version__

RAN_ON_GPU = ("2.11",)  # torch versions on which `pytest -m cuda` has run on a GPU
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "triton", "numpy")


def environment(settings: dict[str, str]) -> dict:
    """What env.json holds: versions, device and the deterministic settings. An allow-list: no variable, path, user or host."""
    import torch

    found = {
        "graphcap": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "threads": torch.get_num_threads(),
        "settings": settings,
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "memory_bytes": gpu.total_memory,
            "cuda": torch.version.cuda,
        }
    return found


def made_by() -> dict[str, str]:
    """What compiled kernels depend on: torch, triton and the GPU. Needs a GPU."""
    import torch

    return {
        "torch": torch.__version__,
        "triton": _version("triton") or "none",
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def untested(torch_version: str) -> str:
    """One line if `torch_version` has not run on a GPU here, else nothing."""
    release = ".".join(torch_version.split(".")[:2])
    if release in RAN_ON_GPU:
        return ""
    ran = ", ".join(RAN_ON_GPU)
    return f"torch {release} has not run on a GPU with graphcap yet (ran: {ran}); the audit at start-up checks it"
