"""Core dumps of the GPU: which kernel a fault was in, where the recipe asks for it (`run.gpu_core_dump`).

A fault inside a replay shows up at some later call of the host, and a graph is one launch: only a dump names the kernel. The
driver writes it, without the contents of memory; cuda-gdb, part of the CUDA toolkit, reads it.

Calls: ops/launch.py. Loads no torch.
"""

import re
import shutil
import subprocess
from pathlib import Path

NAME = "gpu.core"
# skip_abort: the program itself says what CUDA said, instead of dying in the driver.
LEAN = "skip_abort,skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,skip_local_memory,skip_constbank_memory"
READ_S = 15  # for cuda-gdb
FUNCTION = r"(?:void )?([A-Za-z_][\w:]*)"  # its name, without template and arguments


def variables(folder: Path) -> dict[str, str]:
    """Environment of a rank whose driver writes a dump into `folder` at a fault."""
    return {
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_COREDUMP_FILE": str(folder.resolve() / NAME),
        "CUDA_COREDUMP_GENERATION_FLAGS": LEAN,
    }


def kernel_of(folder: Path) -> str:
    """The kernel of the dump in `folder` in words, or how to read it; nothing where there is no dump."""
    dump = folder / NAME
    if not dump.is_file():
        return ""
    command = ["cuda-gdb", "-batch", "-ex", f"target cudacore {dump}", "-ex", "info cuda kernels"]
    if shutil.which(command[0]) is None:
        return f"cuda-gdb -ex 'target cudacore {folder.name}/{NAME}' names its kernel"
    try:
        shown = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=READ_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"cuda-gdb did not read {folder.name}/{NAME} within {READ_S} s"
    return kernel_in(shown.stdout) or f"cuda-gdb names no kernel of {folder.name}/{NAME}"


def kernel_in(text: str) -> str:
    """The faulting kernel in what cuda-gdb prints, with the exception; nothing if there is none."""
    fault = re.search(r"^CUDA Exception: (.+)|^(Assertion failed)", text, re.MULTILINE)
    kernel = re.search(rf"^#0\s+0x[0-9a-f]+ in {FUNCTION}", text, re.MULTILINE)
    kernel = kernel or re.search(rf"^\*.*\)\s+{FUNCTION}", text, re.MULTILINE)  # the focused line of `info cuda kernels`
    if kernel is None:
        return ""
    return f"kernel {kernel[1]}" + (f": {(fault[1] or fault[2]).strip()}" if fault else "")
