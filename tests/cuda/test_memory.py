"""Predicted memory against the most that is allocated while a bucket is made ready, CUDA's context apart."""

import gc

import pytest
import torch

from graphcap.data.planner import Bucket
from graphcap.engine import Engine
from graphcap.engine.memory import Sizes
from graphcap.model.drafter import Drafter
from graphcap.model.target import Target
from tests.toys import drafter_config, make_step, tiny_model

pytestmark = pytest.mark.cuda
SMALL = {"hidden_size": 576, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152}
MIDDLE = {"hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 3072}
LARGE = {"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 12288}
QWEN = {"vocab_size": 151936}


def measured_and_predicted(
    bucket: Bucket, *, widths: dict[str, int] = SMALL, checkpointing: bool = False, chunk_tokens: int = 2048
) -> tuple[int, int]:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    names = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
    with torch.device("cuda"):
        model = tiny_model("llama", 0, **{names.get(name, name): width for name, width in widths.items()})
    target = Target(model.to(torch.bfloat16), (0, 1, 2))
    torch.cuda.reset_peak_memory_stats()  # the target was made in float32
    config = drafter_config(**widths, num_layers=3, block_size=16, target_layer_ids=(0, 1, 2), mask_token_id=0)
    drafter = Drafter(config)
    drafter.initialize(0)
    drafter.checkpointing = checkpointing
    engine = Engine(make_step(target, drafter, chunk_tokens=chunk_tokens), (bucket,))
    engine.prepare(eager=False)
    measured = torch.cuda.max_memory_allocated() - before
    engine.close()
    sizes = Sizes(
        drafter=config,
        num_parameters=sum(parameter.numel() for parameter in drafter.parameters()),
        target_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        target_intermediate=widths["intermediate_size"],
        itemsize=2,
        chunk_tokens=chunk_tokens,
        checkpointing=checkpointing,
    )
    print(f"{bucket.name}: measured {measured / 2**20:,.0f} MiB, predicted {sizes.needed_bytes(bucket) / 2**20:,.0f}")
    return measured, sizes.needed_bytes(bucket)


@pytest.mark.parametrize(
    ("bucket", "changes"),
    [
        (Bucket(8192, 1024), {}),
        (Bucket(8192, 256), {"chunk_tokens": 4096}),
        (Bucket(4096, 1024), {"checkpointing": True}),
        (Bucket(512, 32), {"chunk_tokens": 256}),
        (Bucket(1024, 128), {"chunk_tokens": 8192}),
        (Bucket(16384, 64), {"checkpointing": True}),
        (Bucket(8192, 1024), {"chunk_tokens": 8192}),  # logits of 768 MiB, as training makes them
        (Bucket(8192, 1024), {"widths": MIDDLE | QWEN}),
        (Bucket(4096, 512), {"widths": LARGE | QWEN}),
        (Bucket(8192, 64), {"widths": LARGE, "checkpointing": True}),  # gradients of keys, of each query head alone
    ],
)
def test_predicted_within_a_tenth_and_never_far_under(bucket, changes):
    measured, predicted = measured_and_predicted(bucket, **changes)
    assert 0.98 * measured <= predicted <= 1.1 * measured
