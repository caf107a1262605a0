"""Training from stored features is training from computed ones, bit for bit; a target's two ends are those of the whole."""

import random

import numpy as np
import pytest
import torch

from graphcap.data.planner import Bucket
from graphcap.engine import Engine
from graphcap.engine.offline import FeatureStep, StoredStep
from graphcap.engine.slots import Buffer, Slot, as_numpy
from graphcap.errors import ConfigError, ShapeError
from graphcap.model.ends import TargetEnds, TargetFiles, check_identity, load_skeleton
from graphcap.model.identity import Identity, fingerprint, identity_of
from graphcap.model.loading import load_model
from tests.toys import (
    fresh_seed,
    make_engine,
    make_step,
    random_drafter,
    random_lengths,
    random_row,
    relative,
    run_update,
    tiny_model,
    tiny_target,
)

CPU = torch.device("cpu")
WHERE = {"revision": "main", "trust_remote_code": False}
BUCKETS = (Bucket(128, 8), Bucket(64, 8))


def stored_step(target, drafter) -> StoredStep:
    return make_step(target, drafter, kind=StoredStep)


def extracted(target, bucket: Bucket, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The row's features as `graphcap extract` computes them."""
    step = FeatureStep(target, largest=BUCKETS[0].length)
    engine = Engine(step, BUCKETS)
    step.features_TF.fill_(float("nan"))
    engine.fill(bucket, {name: arrays[name] for name in ("token_ids", "position")})
    engine.micro_step(bucket)
    step.send(0, len(arrays["token_ids"]))
    return step.received(0, len(arrays["token_ids"])).copy()


def random_updates(seed: int, count: int) -> list[tuple[Bucket, dict[str, np.ndarray]]]:
    rng = random.Random(seed)
    buckets = [BUCKETS[number % 2] for number in range(count)]
    return [(bucket, random_row(random_lengths(bucket.length, rng), rng, num_anchors=7)) for bucket in buckets]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_updates_and_evaluation_from_stored_features_are_bit_equal_and_one_changed_element_is_not(family):
    seed = fresh_seed()
    target = tiny_target(seed, family=family)
    updates = random_updates(seed, 4)
    stored = [extracted(target, bucket, arrays) for bucket, arrays in updates]

    def trained(step, features) -> list[torch.Tensor]:
        engine = Engine(step, BUCKETS)
        filled = [arrays if f is None else {**arrays, "features": f} for (_, arrays), f in zip(updates, features)]
        for (bucket, _), arrays in zip(updates, filled):
            run_update(engine, [(bucket, arrays)])
        engine.fill(BUCKETS[0], filled[0])
        return [*step.state.tensors().values(), step.ring, *engine.evaluate(BUCKETS[0])]

    computed = trained(make_step(target, random_drafter(seed)), [None] * 4)
    read = trained(stored_step(target, random_drafter(seed)), stored)
    assert all(torch.equal(one, other) for one, other in zip(computed, read, strict=True))
    changed = [features.copy() for features in stored]
    seen = [(n, p) for n, (_, row) in enumerate(updates) for p in row["anchors"].tolist() if row["position"][p] > 0]
    changed[seen[0][0]][seen[0][1] - 1, 0] += 1.0  # of a token that a block attends to
    other = trained(stored_step(target, random_drafter(seed)), changed)
    assert not torch.equal(computed[0], other[0])  # must fail


def test_a_documents_features_in_another_row_differ_by_rounding_only():
    seed = fresh_seed()
    target, rng = tiny_target(seed), random.Random(seed)
    one, other = (random_row([length], rng) for length in (30, 25))
    alone = extracted(target, BUCKETS[1], one)
    joined = {name: np.concatenate([other[name], one[name]]) for name in ("token_ids", "position")}
    behind = extracted(target, BUCKETS[0], joined)[25:]
    assert relative(torch.from_numpy(behind - alone), torch.from_numpy(alone)) < 1e-5
    unlike = {**joined, "position": np.arange(55, dtype=np.int32)}  # must fail: one document instead of two
    behind = extracted(target, BUCKETS[0], unlike)[25:]
    assert relative(torch.from_numpy(behind - alone), torch.from_numpy(alone)) > 1e-3


def test_a_buffer_of_bfloat16_takes_its_bits_and_refuses_anything_else_by_name():
    buffer = Buffer("features", 9, pad_value=0.5, dtype=torch.bfloat16, trailing=(3,))
    slot, values_TF = Slot("9/0", (buffer,), CPU), torch.randn(5, 3).to(torch.bfloat16)
    slot["features"].fill_(float("nan"))
    slot.fill({"features": as_numpy(values_TF)})
    assert torch.equal(slot["features"], torch.cat((values_TF, torch.full((4, 3), 0.5, dtype=torch.bfloat16))))
    for wrong in (values_TF.float().numpy(), as_numpy(values_TF).astype(np.int16), as_numpy(values_TF)[:, :2]):
        with pytest.raises(ShapeError, match=r"buffer 'features'.*uint16\[0…9, 3\] \(9/0\)"):
            slot.fill({"features": wrong})


def test_a_stored_step_has_an_example_for_its_slot_and_the_computing_one_has_no_buffer_of_features():
    seed = fresh_seed()
    target = tiny_target(seed)
    step = stored_step(target, random_drafter(seed))
    engine, (bucket,) = make_engine(step, (64, 8))
    engine.fill(bucket, step.example(bucket))
    engine.micro_step(bucket)
    assert step.state.gradients.isfinite().all() and step.state.gradients.any()
    assert [buffer.name for buffer in make_step(target, random_drafter(seed)).buffers(bucket)] == [
        "token_ids",
        "position",
        "supervised",
        "anchors",
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("files", ["one", "several"])
def test_embedding_head_and_fingerprint_are_those_of_the_whole_target(tmp_path, family, tied, files):
    model = tiny_model(family, fresh_seed(), tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if files == "several" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (files == "several")
    whole = load_model(str(tmp_path), dtype=torch.bfloat16, device=CPU, **WHERE)
    skeleton, found = load_skeleton(str(tmp_path), **WHERE), TargetFiles(str(tmp_path), revision="main")
    assert found.fingerprint(skeleton) == fingerprint(whole)
    identity = identity_of(whole, str(tmp_path))
    assert check_identity(identity, skeleton, found, tmp_path)
    with pytest.raises(ConfigError, match="fingerprint"):
        check_identity(Identity(identity.name, "", "0" * 16), skeleton, found, tmp_path)
    ends = TargetEnds(skeleton, found, (0, 2), dtype=torch.bfloat16, device=CPU)
    ids = torch.arange(model.config.vocab_size)
    assert torch.equal(ends.embed(ids), whole.get_input_embeddings()(ids))
    assert torch.equal(ends.head_VD, whole.get_output_embeddings().weight)
    assert len(list(ends.model.parameters())) == (1 if tied else 2)
    assert (ends.num_features, ends.hidden_size) == (2 * model.config.hidden_size, model.config.hidden_size)


def test_files_that_lack_the_embedding_or_are_no_safetensors_are_refused_by_path(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny_model("llama", fresh_seed()).save_pretrained(tmp_path)
    skeleton = load_skeleton(str(tmp_path), **WHERE)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    files = TargetFiles(str(tmp_path), revision="main")
    assert files.fingerprint(skeleton) is None
    with pytest.raises(ConfigError, match="model.embed_tokens.weight"):
        TargetEnds(skeleton, files, (0, 2), dtype=torch.float32, device=CPU)
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="target.path"):
        TargetFiles(str(tmp_path), revision="main")
    path.unlink()
    with pytest.raises(ConfigError, match="target.path"):
        TargetFiles(str(tmp_path), revision="main")
