"""What `graphcap doctor` tries out on the GPU: driver, a product, capability, NCCL, a captured graph, attention.

`answer` makes the checks of the table DEVICE_CHECKS, at the end, in a process of its own, for a GPU in a bad state may hold
or end whoever asks it. The functions stand in the table's order; the check "graph capture" is `check_graph_capture`.

Calls: doctor.py (the table; `answer` in the child process). Loads torch only inside the checks.
"""

import ctypes
import json
import os
import re
from dataclasses import asdict

from graphcap.ops.machine import Found, NotChecked, gpu_in_machine, guarded, release, size
from graphcap.versions import RAN_ON_GPU

CAPABILITY = "8.0"  # the oldest
ATTENTION_BOUND = 2**-7  # largest difference ÷ largest value of the reference, as in tests/cuda/test_kernels.py


def answer() -> None:
    """Make DEVICE_CHECKS and print each as a line of JSON; whatever else this process prints goes to stderr."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for probe in DEVICE_CHECKS:
            print(json.dumps(asdict(guarded(probe))), file=out, flush=True)


def usable_torch():
    """torch, set as for training. Raises: NotChecked without a GPU that it can use."""
    try:
        import torch

        from graphcap.engine.guard import use_deterministic_math
    except ImportError:
        raise NotChecked("torch does not load") from None
    if not torch.cuda.is_available():
        raise NotChecked("no GPU")
    use_deterministic_math()
    return torch


def driver_state(driver: int, built: str) -> str:
    """driver: newest CUDA of the driver, as 12080; built: torch's, as "13.0". An older minor of the same major mostly runs."""
    has, wants = (driver // 1000, driver % 1000 // 10), release(built)
    return "ok" if has >= wants else "warn" if has[0] == wants[0] else "fail"


def check_driver() -> Found:
    import torch

    if not torch.version.cuda:
        if gpu_in_machine() or torch.cuda.is_available():
            return "fail", f"torch {torch.__version__} is built without CUDA", "install a torch with CUDA: see pytorch.org"
        raise NotChecked("no GPU, and a torch without CUDA")
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        if gpu_in_machine():
            return "fail", "libcuda.so.1 does not load", "docker run --gpus all, or install NVIDIA's driver"
        raise NotChecked("no GPU") from None
    has = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return driver_state(version.value, torch.version.cuda), f"driver for CUDA {has}, torch for CUDA {torch.version.cuda}"


def check_gpu() -> Found:
    """A small product on every GPU that torch sees."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        raise NotChecked("CUDA_VISIBLE_DEVICES hides every GPU")
    if gpu_in_machine():
        import torch

        torch.cuda.init()  # says why, where torch cannot use it
    torch = usable_torch()
    told = []
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(64, 64, device=f"cuda:{index}", dtype=torch.bfloat16)
        if not bool(((ones @ ones) == 64).all()):
            return "fail", f"GPU {index} multiplies wrongly"
        free, total = torch.cuda.mem_get_info(index)
        told.append(f"{torch.cuda.get_device_name(index)} with {size(free)} of {size(total)} free")
    return "ok", "; ".join(told)


def runs_on(arch_list: list[str], capability: tuple[int, int]) -> bool:
    """Whether a torch built for arch_list ("sm_90", "compute_120") has code for a GPU: the same major, or PTX of an older."""
    for kind, major, minor, special in re.findall(r"\b(sm|compute)_(\d+)(\d)([af]?)\b", " ".join(arch_list)):
        has = (int(major), int(minor))
        if has == capability or (not special and has <= capability and (kind == "compute" or has[0] == capability[0])):
            return True
    return False


def check_capability() -> Found:
    torch = usable_torch()
    found = sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})
    built = torch.cuda.get_arch_list()
    told = f"{', '.join(f'{major}.{minor}' for major, minor in found)}; torch is built for {' '.join(built)}"
    return "ok" if found[0] >= release(CAPABILITY) and all(runs_on(built, one) for one in found) else "fail", told


def check_nccl() -> Found:
    torch = usable_torch()
    if torch.cuda.device_count() < 2:
        raise NotChecked("one GPU")
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return "fail", "this torch has no NCCL"
    return "ok", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()[:3]))}"


def check_graph_capture() -> Found:
    torch = usable_torch()
    from graphcap.engine.capture import Capturer

    x, weight, result = (torch.randn(64, 64, device="cuda") for _ in range(3))
    capturer = Capturer(torch.device("cuda"))

    def step() -> None:
        result.copy_((x @ weight).relu())

    capturer.warm_up(step)
    graph = capturer.capture("doctor", step)
    x.normal_()
    capturer.warm_up(step, times=1)
    expected = result.clone()
    result.fill_(float("nan"))
    graph.replay()
    same = torch.equal(result, expected)
    capturer.close()
    return ("ok", "a replay gives the eager bits") if same else ("fail", "a replay gives other bits than the eager step")


def attention_errors(attention, device) -> dict[str, float]:
    """Largest difference ÷ largest value of output and gradients, bfloat16 against dense float64, over blocks of one row."""
    import torch

    from graphcap.model.attention import DenseAttention, joined
    from graphcap.model.blocks import Visibility

    group, num_context, num_queries, heads, head_dim = 8, 512, 256, 4, 64
    anchors = torch.randperm(num_context)[: num_queries // group].sort().values.to(device)
    seen = Visibility(torch.where(anchors >= 200, 200, 0), anchors, group=group, num_context=num_context)
    shapes = ((heads, num_queries), *[(2, num_context)] * 2, *[(2, num_queries)] * 2, (heads, num_queries))
    *inputs, upstream = (torch.randn(*shape, head_dim, device=device).bfloat16() for shape in shapes)
    for tensor in inputs:
        tensor.requires_grad_()
    ours = attention(inputs[0], inputs[1:3], inputs[3:], attention.mask(seen, num_queries), head_dim**-0.5)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    q, k, v = exact[0], *(tensor.repeat_interleave(heads // 2, 0) for tensor in joined(exact[1:3], exact[3:]))
    score = (q @ k.mT * head_dim**-0.5).masked_fill(~DenseAttention().mask(seen, num_queries), float("-inf"))
    theirs = score.softmax(-1) @ v
    pairs = [(ours, theirs)]
    pairs += zip(torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, exact, upstream.double()))
    keys = ("keys", "values", "the blocks' keys", "the blocks' values")
    names = ("output", "gradient of queries", *(f"gradient of {name}" for name in keys))
    return {
        name: float((left - right).detach().abs().max() / right.detach().abs().max())
        for name, (left, right) in zip(names, pairs)
    }


def check_attention() -> Found:
    torch = usable_torch()
    from graphcap.model.attention import attention_for

    device = torch.device("cuda")
    errors = attention_errors(attention_for(device), device)
    wrong = [f"{name} is {error:.1e} off" for name, error in errors.items() if not error <= ATTENTION_BOUND]
    return "fail" if wrong else "ok", ", ".join(wrong) or f"forward and backward within {max(errors.values()):.1e}"


TRIED = RAN_ON_GPU[-1]
# Each: the check, what is needed, and what to type where it is not there.
DEVICE_CHECKS = (
    (check_driver, "a driver as new as torch's CUDA", "update NVIDIA's driver, or install torch for its CUDA: see pytorch.org"),
    (check_gpu, "a GPU that computes", "docker run --gpus all; else mend what nvidia-smi says, or start the machine anew"),
    (check_capability, f"{CAPABILITY} or newer, in torch's list", "another GPU, or a torch built for it: see pytorch.org"),
    (check_nccl, "NCCL, for more than one GPU", "pip install --force-reinstall torch"),
    (check_graph_capture, "CUDA graphs that replay the same bits", "graphcap train RECIPE --eager trains without them"),
    (check_attention, f"within {ATTENTION_BOUND:.1e} of dense float64", f"pip install --force-reinstall 'torch=={TRIED}.*'"),
)
