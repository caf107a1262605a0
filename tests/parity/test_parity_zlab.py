"""graphcap's export and decoding against stored numbers of z-lab's DFlash; tools/parity_zlab.py wrote them."""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from graphcap.errors import CheckpointError
from graphcap.model.drafter import Drafter
from graphcap.model.target import Target
from graphcap.ops.export import config_document, read_drafter, weight_tensors
from tools.parity_zlab import (
    BLOCKS_STORED,
    CASE_PROMPTS,
    CLEARLY_WRONG,
    COMMIT,
    CPU,
    STOP_IDS,
    TOLERANCE,
    TWINS,
    Job,
    Trace,
    case_config,
    case_target,
    compare,
    run_graphcap,
    run_twin,
    write_export,
)

NUMBERS = Path(__file__).parent / "data" / "zlab.safetensors"
PREFIX = "drafter."


@functools.cache
def stored() -> tuple[dict, dict[str, torch.Tensor]]:
    return json.loads(NUMBERS.with_suffix(".json").read_text(encoding="utf-8")), load_file(NUMBERS)


def drafter_tensors() -> dict[str, torch.Tensor]:
    return {name.removeprefix(PREFIX): tensor for name, tensor in stored()[1].items() if name.startswith(PREFIX)}


def zlab_traces() -> list[Trace]:
    """z-lab's replies; hidden states and logits of the first block for those prompts that have them stored."""
    document, tensors = stored()
    replies = document["replies"]
    traces = [Trace(reply["prompt"], list(reply["token_ids"]), list(reply["accepted"])) for reply in replies]
    for number, trace in enumerate(traces):
        if f"reference.{number}.hidden" in tensors:
            trace.hidden.append(tensors[f"reference.{number}.hidden"])
            trace.logits.append(tensors[f"reference.{number}.logits"])
    return traces


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    document, folder = stored()[0], tmp_path_factory.mktemp("drafter")
    write_export(folder, document["drafter_config"], drafter_tensors())
    prompts = [reply["prompt"] for reply in document["replies"]]
    return Job(folder, case_target, prompts, set(document["stop_ids"]), document["max_new_tokens"])


@pytest.fixture(scope="module")
def decoded(job) -> list[Trace]:
    drafter = read_drafter(job.folder, dtype=torch.float32, device=CPU)
    return run_graphcap(Target(job.load_target(), drafter.config.target_layer_ids), drafter, job)


def test_the_stored_replies_hold_what_the_comparison_is_about():
    document = stored()[0]
    replies = document["replies"]
    assert document["commit"] == COMMIT and len(replies) == CASE_PROMPTS
    assert {1, 2, 8} <= {accepted for reply in replies for accepted in reply["accepted"]}
    cut = [reply for reply in replies if sum(reply["accepted"]) + 1 > len(reply["token_ids"])]
    assert any(reply["token_ids"][-1] in STOP_IDS for reply in cut), "no block runs past a stop token"
    assert any(len(reply["token_ids"]) == document["max_new_tokens"] for reply in cut), "no block runs past the limit"
    assert any(reply["extra"] for reply in replies), "no reply meets the limit exactly"


def test_the_export_has_the_tensors_and_the_config_that_zlabs_model_loaded():
    document, drafter = stored()[0], Drafter(case_config())
    assert {name: list(tensor.shape) for name, tensor in weight_tensors(drafter).items()} == document["tensor_shapes"]
    written, read = config_document(drafter.config, torch.bfloat16), document["drafter_config"]
    assert {key: written.get(key) for key in read} == read


@pytest.mark.parametrize("change", ["missing", "unexpected", "misshapen"])
def test_a_drafter_folder_with_one_tensor_changed_is_refused(change, tmp_path):
    tensors = drafter_tensors()
    taken = tensors.pop("fc.weight")
    if change != "missing":
        tensors["fc.weight"] = taken if change == "unexpected" else taken[:, :-1]
    if change == "unexpected":
        tensors["model.fc.weight"] = taken.clone()
    write_export(tmp_path, stored()[0]["drafter_config"], tensors)
    with pytest.raises(CheckpointError, match="fc.weight"):
        read_drafter(tmp_path, dtype=torch.float32, device=CPU)


def test_decoding_commits_zlabs_tokens_with_zlabs_accepted_lengths(decoded):
    found = compare(decoded, zlab_traces())
    assert not found["differences"] and not found["ties"] and found["equal"] == CASE_PROMPTS


def test_hidden_states_and_logits_of_first_blocks_agree_with_zlabs(decoded):
    found = compare(decoded, zlab_traces())["largest"]
    assert 0 <= max(found.values()) <= TOLERANCE and sum(bool(trace.hidden) for trace in zlab_traces()) == BLOCKS_STORED


@pytest.mark.parametrize("name", TWINS)
def test_decoding_with_one_thing_changed_no_longer_agrees_with_zlab(name, job):
    found = compare(run_twin(name, job), zlab_traces())
    assert found["differences"] and found["equal"] < CASE_PROMPTS
    assert found["largest"]["drafter's hidden states"] > CLEARLY_WRONG


@pytest.mark.parametrize("field", ["token_ids", "accepted"])
def test_the_comparison_sees_one_changed_number(field, decoded):
    theirs = zlab_traces()
    getattr(theirs[3], field)[-1] += 1
    found = compare(decoded, theirs)
    assert found["equal"] == CASE_PROMPTS - 1 and [line.split(",")[0] for line in found["differences"]] == ["prompt 3"]


def test_the_tool_finds_the_job_of_a_drafters_folder_beside_its_target(tmp_path):
    """The tool itself cannot run here without a clone; what it takes from graphcap must still fit."""
    from pathlib import Path

    from tools.parity_zlab import run_job

    tiny = Path(__file__).parents[2] / "graphcap" / "assets" / "tiny"
    job = run_job(None, tmp_path, str(tiny), None, 3)
    assert len(job.prompts) == 3 and all(job.prompts) and job.stop_ids
