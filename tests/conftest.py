"""What every test process needs before torch or transformers is imported, and the skip of tests that need a GPU."""

import os
import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what it puts in the background; tests use Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

for name, value in {
    "OMP_NUM_THREADS": "1",  # several test processes share few cores
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",  # a test that downloads is a bug
}.items():
    os.environ.setdefault(name, value)
if not any(os.path.exists(driver) for driver in ("/dev/nvidiactl", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU our kernels run in triton's interpreter


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU: torch.cuda.is_available() is False")
