"""Guards around training: deterministic settings, the door, the census of addresses.

While there is a door, flex attention outside a compiled function is an error. After warm-up the door shuts for the whole
process: a compile in any thread is refused with our message, the recompile of a warmed-up function too. What a replay
reads and writes must not move: the census compares addresses.

Calls: engine/buckets.py, build.py, train.py.
"""

import contextlib
import os
import re
import threading
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcap.errors import CaptureError

# Every private or changing name of torch that the engine uses, and the versions in which its source was read. A test
# checks on the installed torch that each exists.
TORCH_NAMES = (
    ("torch._dynamo.callback.callback_handler.register_start_callback", "2.11 2.13"),
    ("torch._dynamo.callback.callback_handler.remove_start_callback", "2.11 2.13"),
    ("torch._dynamo.callback.callback_handler.register_end_callback", "2.11 2.13"),
    ("torch._dynamo.exc.FailOnRecompileLimitHit", "2.11 2.13"),
    ("torch._dynamo.config.recompile_limit", "2.11 2.13"),
    ("torch._dynamo.config.fail_on_recompile_limit_hit", "2.11 2.13"),
    ("torch.use_deterministic_algorithms", "2.11 2.13"),
    ("torch.utils.deterministic.fill_uninitialized_memory", "2.11 2.13"),
    ("torch._inductor.runtime.cache_dir_utils.default_cache_dir", "2.11 2.13"),
    ("torch.nn.attention.flex_attention._WARNINGS_SHOWN", "2.11 2.13"),
    ("torch.autograd.set_multithreading_enabled", "2.11 2.13"),
    ("torch.optim.adamw.adamw", "2.11 2.13"),
    ("torch.cuda.graph", "2.11 2.13"),
    ("torch.cuda.CUDAGraph", "2.11 2.13"),
    ("torch.cuda.graph_pool_handle", "2.11 2.13"),
    ("torch.cuda.memory_snapshot", "2.11 2.13"),
    ("torch._foreach_norm", "2.11 2.13"),
    ("torch._foreach_add_", "2.11 2.13"),
)
CHECKSUM_BYTES = 2**26
UNFUSED = "flex_attention called without torch.compile"


def use_deterministic_math() -> dict[str, str]:
    """Settings under which the same inputs give the same bits, also between processes. Returns them, for env.json.

    Must run before the first CUDA call: cuBLAS reads its workspace setting when it starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if torch.cuda.is_available():
        from torch._dynamo import config as dynamo_config

        # For a step that compiles this also sets Inductor's deterministic mode. Setting that alone does not last: after every
        # compile Dynamo puts back the global flag, and with it Inductor's, so that kernels would be chosen by timing (torch
        # 2.11 and 2.13).
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, 256)
    return {
        "CUBLAS_WORKSPACE_CONFIG": os.environ["CUBLAS_WORKSPACE_CONFIG"],
        "tf32": "off",
        "bf16_reduced_precision_reduction": "off",
        "inductor": "deterministic" if torch.cuda.is_available() else "not used",
    }


def torchs_cache_folder() -> str:
    """The folder for kernels that torch writes into the environment, on the first import of Dynamo, if there is none."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


@dataclass
class Compiles:
    """Compiles of the process, counted by torch's own callback: before the door shut, and refused after it."""

    before: int = 0
    refused: int = 0


class Door:
    """Counts compiles while open; once shut, refuses every compile in every thread of the process.

    torch's own stance "fail_on_recompile" is left alone: it would refuse first, and say neither why nor what to do.
    """

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler
        from torch.nn.attention import flex_attention as flex

        self.shut, self.counts = False, Compiles()
        self._running: list[str] = []  # threads with a compile under way
        self._limit_fails: bool | None = None  # torch's setting before the door shut
        self._lock = threading.Lock()
        callback_handler.register_start_callback(self._compile_starts)
        callback_handler.register_end_callback(self._compiles_end)
        self._filters = warnings.filters[:]
        warnings.filterwarnings("error", message=UNFUSED)
        flex._WARNINGS_SHOWN.discard("flex_attention_performance")

    def close(self) -> None:
        """Shut the door. Raises: CaptureError naming the thread if a compile is still running somewhere."""
        from torch._dynamo import config as dynamo_config

        with self._lock:
            if self._running:
                raise CaptureError(
                    "thread",
                    self._running[0],
                    expected="no compile under way when training begins",
                    got="a compile still running",
                    fix="let that thread finish, or start it after training; a step compiles only before update 1",
                )
            self.shut = True
        self._limit_fails = dynamo_config.fail_on_recompile_limit_hit
        dynamo_config.fail_on_recompile_limit_hit = True

    def open(self) -> None:
        """Let compiles through again: at the end of a run, and in tests."""
        from torch._dynamo import config as dynamo_config

        self.shut = False
        if self._limit_fails is not None:
            dynamo_config.fail_on_recompile_limit_hit, self._limit_fails = self._limit_fails, None

    def remove(self) -> None:
        """Open the door and take it out of the process."""
        from torch._dynamo.callback import callback_handler

        self.open()
        callback_handler.remove_start_callback(self._compile_starts)
        callback_handler.remove_end_callback(self._compiles_end)
        warnings.filters[:] = self._filters

    def _compile_starts(self, arguments) -> None:
        """Called by torch for the first of any compiles that overlap."""
        thread = threading.current_thread().name
        with self._lock:
            if not self.shut:
                self.counts.before += 1
                self._running.append(thread)
                return
            self.counts.refused += 1
        raise CaptureError(
            "compile",
            f"{arguments.compile_id} in thread {thread}",
            expected="no compile once training has begun",
            got="a new compile",
            cause="a step compiles what it needs before update 1",
            fix="compile it before training starts, or in another process",
        )

    def _compiles_end(self, arguments) -> None:
        """Called by torch when no compile is left."""
        with self._lock:
            self._running.clear()


@contextlib.contextmanager
def explained(bucket_name: str, smaller: str = ""):
    """Around a bucket's warm-up and capture: what ends it is told with the bucket's name and what to do.

    Attention that would run outside a fused kernel ends it before it has allocated any scores. smaller: name of the next
    smaller bucket, if there is one. Raises: CaptureError for an uncompiled call of flex attention, for a recompile limit that
    is reached, and for GPU memory that does not suffice.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit

    try:
        yield
    except UserWarning as error:
        if UNFUSED not in str(error):
            raise
        raise CaptureError(
            "bucket",
            bucket_name,
            expected="attention in the fused kernel of a compiled function",
            got="flex attention called without torch.compile",
            cause="it would hold every score of the row in memory",
            fix="compile it: torch.compile(flex_attention, fullgraph=True)",
        ) from error
    except FailOnRecompileLimitHit as error:
        raise CaptureError(
            "bucket",
            bucket_name,
            expected="compiled functions for every bucket",
            got="torch's recompile limit",
            cause="beyond it torch would run the function uncompiled, attention with all its scores in memory",
            fix="compile with dynamic=True, raise torch._dynamo.config.recompile_limit, or plan fewer buckets",
        ) from error
    except torch.OutOfMemoryError as error:
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        held, whole = (torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else (0, 0)
        drop = (
            f"drop it by a plan whose largest bucket is {smaller} (shapes.row_length)" if smaller else "lower shapes.row_length"
        )
        raise CaptureError(
            "bucket",
            bucket_name,
            expected="a step that fits into the GPU's memory",
            got=f"{asked[1] if asked else 'more memory'} asked for with {held / 2**30:.1f} GiB already held",
            cause=f"a plan needs what its largest bucket needs, which is more than this GPU's {whole / 2**30:.1f} GiB or what "
            "others leave of them",
            fix=f"(1) {drop}, (2) drafter.checkpointing=true, (3) loss.chunk_tokens lower than it is "
            "(0: as many as about 768 MiB of logits hold), (4) free the GPU: graphcap doctor names other processes",
        ) from error


class Census:
    """The addresses of every tensor that a graph reads or writes and that outlives a step."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}

    def check(self, tensors: dict[str, Tensor]) -> None:
        """Raises: CaptureError naming the first tensor that is missing or has moved since the census was taken."""
        for name, address in self._addresses.items():
            tensor = tensors.get(name)
            if tensor is None or tensor.data_ptr() != address:
                raise CaptureError(
                    "tensor",
                    name,
                    expected="the address it had when the graphs were captured",
                    got="nothing" if tensor is None else "another address",
                    cause="a captured graph keeps reading and writing the old one",
                    fix="copy into the tensor in place instead of replacing it",
                )


def bits_of(tensor: Tensor) -> int:
    """A 64-bit checksum of a tensor's bits and of where they stand, made on its device; reads on the host.

    Every eight bytes are mixed with their place before they are summed, so that changes at two places cancel each other no
    more often than by chance. Needs memory for a few copies of CHECKSUM_BYTES, however large the tensor is.
    """
    total = 0
    for part in tensor.detach().contiguous().reshape(-1).view(torch.uint8).split(CHECKSUM_BYTES):
        words = torch.nn.functional.pad(part, (0, -part.numel() % 8)).view(torch.int64)
        mixed = torch.arange(1, len(words) + 1, device=part.device) * 0x1E3779B97F4A7C15
        mixed.bitwise_xor_(words).mul_(0x3F58476D1CE4E5B9)
        mixed.bitwise_xor_(mixed >> 31).mul_(0x14D049BB133111EB)
        mixed.bitwise_xor_(mixed >> 29)
        total = (total * 6364136223846793005 + int(mixed.sum())) % 2**64
    return total


def check_same_bits(bucket_name: str, eager: dict[str, int], replayed: dict[str, int]) -> None:
    """The audit of a capture: a replay must leave the bits that the eager step left. Both: checksums by name.

    Raises: CaptureError naming bucket and tensor.
    """
    for name, bits in eager.items():
        if bits != replayed[name]:
            raise CaptureError(
                "bucket",
                bucket_name,
                expected=f"the same bits in '{name}' from replay and eager step",
                got="other bits",
                cause="the captured step computes something else",
                fix="run the same command with --eager, and report this with the versions it printed",
            )
