"""The checks on the device judge versions and architectures, and their comparison of attention notices what is wrong."""

import pytest
import torch

from graphcap.model.attention import DenseAttention
from graphcap.ops import device
from tests.toys import fresh_seed


@pytest.mark.parametrize(
    "driver, built, state",
    [
        (13000, "13.0", "ok"),
        (13010, "12.8", "ok"),
        (12080, "12.8", "ok"),
        (12040, "12.8", "warn"),
        (12090, "13.0", "fail"),
        (0, "12.8", "fail"),
    ],
)
def test_a_driver_of_an_older_major_than_torchs_cuda_fails(driver, built, state):
    assert device.driver_state(driver, built) == state


@pytest.mark.parametrize(
    "arch_list, capability, right",
    [
        (["sm_80", "sm_90", "sm_120"], (12, 0), True),
        (["sm_80", "sm_90", "sm_120"], (12, 1), True),
        (["sm_80", "sm_86"], (8, 9), True),
        (["sm_86", "sm_90"], (8, 0), False),
        (["sm_80", "sm_90"], (12, 0), False),
        (["sm_80", "compute_90"], (12, 0), True),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["gfx942"], (9, 4), False),
        ([], (9, 0), False),
    ],
)
def test_code_runs_on_its_major_and_ptx_on_newer_ones(arch_list, capability, right):
    assert device.runs_on(arch_list, capability) == right


def test_the_comparison_of_attention_passes_what_is_right_and_notices_a_key_too_many():
    class Leaky(DenseAttention):
        def mask(self, visibility, num_queries):
            visible = super().mask(visibility, num_queries)
            visible[:, 511] = True  # the last context token, which no block sees
            return visible

    torch.manual_seed(fresh_seed())
    cpu = torch.device("cpu")
    assert max(device.attention_errors(DenseAttention(), cpu).values()) < 2 * device.ATTENTION_BOUND
    assert min(device.attention_errors(Leaky(), cpu).values()) > 2 * device.ATTENTION_BOUND
