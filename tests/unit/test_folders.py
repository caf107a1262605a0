"""Folders as SpecForge and speculators prepare them give the documents of the conversations they were made from.

The folders are made here as the peers' scripts lay them out: Arrow streams with the files that `datasets` writes beside them,
JSONL, safetensors, and torch's pickles. Oracle: the conversations' own file, tokenised by us.
"""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from graphcap.data import tokencache
from graphcap.data.conversations import load_documents
from graphcap.data.reading import Means
from graphcap.errors import DataError
from graphcap.model.loading import load_tokenizer

TINY = Path(__file__).resolve().parents[2] / "graphcap" / "assets" / "tiny"
CHATS = [json.loads(line)["messages"] for line in (TINY / "conversations" / "held_out.jsonl").read_text().splitlines()[:150]]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TINY), revision="main", trust_remote_code=False)


@pytest.fixture(scope="module")
def expected(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    return list(load(path, tokenizer).documents)


def load(path, tokenizer, means=None):
    return load_documents([path], tokenizer, max_length=512, on_long="error", on_bad_line="error", means=means)


def same(got, expected) -> bool:
    pairs = zip(got, expected, strict=True)
    return all(
        a.token_ids.tobytes() == b.token_ids.tobytes() and a.loss_mask.tobytes() == b.loss_mask.tobytes() for a, b in pairs
    )


def arrow_stream(path: Path, columns: dict, batch_rows: int = 40) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = pyarrow.table(columns)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=batch_rows)


def speculators(folder: Path, documents, *, num_files: int = 3) -> Path:
    """As save_to_disk leaves it behind scripts/prepare_data.py: shards, state.json, dataset_info.json, token_freq.pt."""
    folder.mkdir()
    names = [f"data-{number:05d}-of-{num_files:05d}.arrow" for number in range(num_files)]
    for name, part in zip(names, np.array_split(np.arange(len(documents)), num_files)):
        ids = [documents[number].token_ids.astype(np.int64) for number in part]
        masks = [documents[number].loss_mask.astype(np.int64) for number in part]
        arrow_stream(folder / name, {"input_ids": ids, "loss_mask": masks, "seq_len": [len(one) for one in ids]})
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "x",
        "_format_type": "torch",
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    (folder / "token_freq.pt").write_bytes(b"PK\3\4")
    return folder


def specforge_cache(folder: Path, documents, *, key: str = "0f3a") -> Path:
    """As `datasets` keeps a map of SpecForge's build_eagle3_dataset: Arrow under the name .pkl, one sample [1, n]."""
    folder.mkdir()
    for number, part in enumerate(np.array_split(np.arange(len(documents)), 2)):
        ids = [[documents[place].token_ids.tolist()] for place in part]
        masks = [[documents[place].loss_mask.astype(int).tolist()] for place in part]
        ones = [[[1] * len(one[0])] for one in ids]
        columns = {"input_ids": ids, "loss_mask": masks, "attention_mask": ones}
        arrow_stream(folder / f"{key}_{number:05d}_of_00002.pkl", columns)
    return folder


def samples(folder: Path, documents, *, batched: bool) -> Path:
    """One safetensors file a sample, with features."""
    from safetensors.numpy import save_file

    folder.mkdir()
    for number, one in enumerate(documents):
        ids, mask = one.token_ids.astype(np.int64), one.loss_mask.astype(np.int64)
        tensors = {"input_ids": ids[None] if batched else ids, "loss_mask": mask[None] if batched else mask}
        save_file(tensors | {"hidden_states": np.zeros((len(ids), 4), np.float32)}, folder / f"data_{number}.safetensors")
    return folder


def specforge_text(folder: Path) -> Path:
    """As scripts/prepare_data.py leaves it: a stable id and the conversations, and a part for testing."""
    folder.mkdir()
    rows = [{"id": str(number), "conversations": chat} for number, chat in enumerate(CHATS)]
    (folder / "sharegpt_train.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    (folder / "sharegpt_test.jsonl").write_text(json.dumps(rows[0]) + "\n")
    return folder


def features(folder: Path, documents, *, compressed: bool, group: int = 60) -> Path:
    """As SpecForge's prepare_hidden_states leaves it: rows_A-B/data_N.ckpt, pickles of torch."""
    import torch

    for number, one in enumerate(documents):
        place = folder / f"rows_{number // group * group}-{number // group * group + group}"
        place.mkdir(parents=True, exist_ok=True)
        ids, mask = torch.from_numpy(one.token_ids).long(), torch.from_numpy(one.loss_mask).long()
        record = {"input_ids": ids, "loss_mask": mask, "hidden_states": torch.zeros(1, len(ids), 4, dtype=torch.bfloat16)}
        if compressed:
            with gzip.open(place / f"data_{number}.ckpt.gz", "wb", compresslevel=1) as file:
                torch.save(record, file)
        else:
            torch.save(record, place / f"data_{number}.ckpt")
    return folder


FOLDERS = {
    "speculators": (speculators, "an Arrow folder as speculators prepares it, with its own token ids and loss masks"),
    "specforge cache": (specforge_cache, "Arrow files as SpecForge caches them, with its own token ids and loss masks"),
    "samples": (lambda folder, docs: samples(folder, docs, batched=False), "safetensors, one a sample, with its own"),
    "batched": (lambda folder, docs: samples(folder, docs, batched=True), "features are not read"),
    "specforge text": (lambda folder, docs: specforge_text(folder), "sharegpt_train.jsonl, as SpecForge prepares it"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_prepared_folder_gives_the_documents_of_its_source(tmp_path, tokenizer, expected, monkeypatch, name):
    make, said = FOLDERS[name]
    folder = make(tmp_path / "prepared", expected)
    loaded = load(folder, tokenizer)
    assert len(expected) == 150 and same(loaded.documents, expected) and said in loaded.summary()
    first = f"{folder}/sharegpt_train.jsonl line 1" if name == "specforge text" else f"{folder}/ row 1"
    assert loaded.documents[0].place == first and [one.line for one in loaded.documents] == list(range(1, 151))
    # Kept and used again, as any text; made anew where one of its files is another.
    monkeypatch.setattr(tokencache, "KEPT_FROM_BYTES", 1)
    lines = []
    means = Means(tmp_path / "cache", 1, lines.append)
    assert all(same(load(folder, tokenizer, means).documents, expected) for _ in range(2))
    assert "are kept" in lines[0] and "used again" in lines[1]
    # The twin that must fail: one bit of one mask.
    hurt = [*expected[:-1], expected[-1].__class__(**(vars(expected[-1]) | {"loss_mask": ~expected[-1].loss_mask}))]
    assert not same(loaded.documents, hurt)


@pytest.mark.parametrize("name", ["speculators", "samples"])
def test_a_peers_mask_is_taken_as_it_stands(tmp_path, tokenizer, expected, name):
    other = []
    for one in expected[:9]:
        mask = one.loss_mask.copy()
        mask[np.flatnonzero(mask)[-1]] = False  # this peer would not learn the end of the turn
        other.append(one.__class__(one.id, one.token_ids, mask, one.source, one.line))
    loaded = load(FOLDERS[name][0](tmp_path / "prepared", other), tokenizer)
    assert same(loaded.documents, other) and not same(loaded.documents, expected[:9])
    assert "its own token ids and loss masks" in loaded.summary()


def test_hidden_states_beside_the_tokens_are_said_not_to_be_read(tmp_path, tokenizer, expected):
    folder = speculators(tmp_path / "prepared", expected[:5])
    (folder / "hidden_states").mkdir()
    assert "features in hidden_states/ are not read" in load(folder, tokenizer).summary()
    from safetensors.numpy import save_file

    ids = np.arange(9)
    save_file(
        {"token_ids": ids, "hidden_states": np.zeros((9, 2, 4), np.float32)}, folder / "hidden_states" / "hs_0.safetensors"
    )
    with pytest.raises(DataError, match="input_ids and loss_mask, got hidden_states, token_ids.*the one with state.json"):
        load(folder / "hidden_states", tokenizer)


@pytest.mark.parametrize("compressed", [False, True])
def test_pickles_are_refused_with_a_command_that_writes_the_same_documents(tmp_path, tokenizer, expected, compressed):
    folder = features(tmp_path / "it's here", expected[:130], compressed=compressed)
    with pytest.raises(DataError, match="pickles of torch.*graphcap never does. Fix: ") as caught:
        load(folder, tokenizer)
    assert "weights_only=True" in typed(str(caught.value), tmp_path)
    assert same(load(tmp_path / "tokens.jsonl", tokenizer).documents, expected[:130])


@pytest.mark.parametrize("ending", [".ckpt", ".ckpt.gz"])
def test_one_pickle_of_features_is_refused_with_a_command_that_writes_its_document(tmp_path, tokenizer, expected, ending):
    folder = features(tmp_path / "it's here", expected[:1], compressed=ending == ".ckpt.gz")
    path = folder / "rows_0-60" / f"data_0{ending}"
    with pytest.raises(DataError, match="a pickle of torch.*graphcap never does. Fix: ") as caught:
        load(path, tokenizer)
    typed(str(caught.value), tmp_path)
    assert same(load(tmp_path / f"data_0{ending}.jsonl", tokenizer).documents, expected[:1])


def test_rows_that_torch_or_pickle_saved_are_written_out_by_the_printed_command(tmp_path, tokenizer):
    import pickle

    import torch

    rows = [{"conversations": chat} for chat in CHATS]
    torch.save(rows, tmp_path / "a.pt")
    (tmp_path / "b.pkl").write_bytes(pickle.dumps(rows))
    for name in ("a.pt", "b.pkl"):
        with pytest.raises(DataError, match="never does. Fix: ") as caught:
            load(tmp_path / name, tokenizer)
        typed(str(caught.value), tmp_path)
        assert [json.loads(line) for line in open(tmp_path / f"{name}.jsonl", encoding="utf-8")] == rows


def test_a_file_of_a_prepared_folder_is_refused_with_the_folder_to_name(tmp_path, tokenizer, expected):
    folders = speculators(tmp_path / "a", expected), specforge_cache(tmp_path / "b", expected)
    files = [min(folders[0].glob("*.arrow")), min(folders[1].glob("*.pkl"))]
    samples(tmp_path / "c", expected, batched=False)
    files.append(min((tmp_path / "c").glob("*.safetensors")))
    hidden = folders[0] / "hidden_states"
    hidden.mkdir(exist_ok=True)
    files.append(hidden / "hs_0.safetensors")
    files[-1].write_bytes(files[2].read_bytes())
    for file, kind in zip(files, ("an Arrow file", "an Arrow file", "a safetensors file", "a safetensors file"), strict=True):
        with pytest.raises(DataError, match=f"{file.name}'.*got {kind}.*name its folder") as caught:
            load(file, tokenizer)
        folder = str(caught.value).split("name its folder, '")[1].removesuffix("'.")
        assert same(load(folder, tokenizer).documents, expected)


def test_an_arrow_file_alone_is_refused_with_a_command_that_writes_its_rows(tmp_path, tokenizer):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    rows = [{"conversations": chat} for chat in CHATS]
    table = pyarrow.Table.from_pylist(rows)
    (tmp_path / "alone").mkdir()
    for name, new in (("x.arrow", pyarrow.ipc.new_stream), ("y.arrow", pyarrow.ipc.new_file)):
        with new(tmp_path / "alone" / name, table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(DataError, match="got an Arrow file") as caught:
            load(tmp_path / "alone" / name, tokenizer)
        typed(str(caught.value), tmp_path)
        assert [json.loads(line) for line in open(tmp_path / f"{name}.jsonl", encoding="utf-8")] == rows


def typed(message: str, folder: Path) -> str:
    """The command that a message has between backticks, after it ran in a folder as one types it."""
    command = message.split("`")[1].replace("python", sys.executable, 1)
    ran = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=100)
    late = "terminate called without an active exception" in ran.stderr  # pyarrow's threads, after the last line is written
    assert ran.returncode == 0 or late, ran.stderr
    return command


def test_old_features_of_speculators_are_pickles_too(tmp_path, tokenizer):
    (tmp_path / "data_0.pt").write_bytes(b"PK\3\4")
    with pytest.raises(DataError, match=r"pickles of torch, data_0\.pt the first.*'\*\*/data_\*\.pt'"):
        load(tmp_path, tokenizer)


def test_folders_that_are_none_of_these_or_are_damaged_are_named(tmp_path, tokenizer, expected):
    def refused(folder, said):
        with pytest.raises(DataError, match=said) as caught:
            load(folder, tokenizer)
        assert str(tmp_path) in str(caught.value) and ". Fix: " in str(caught.value)

    (tmp_path / "none").mkdir()
    refused(tmp_path / "none", "got an empty folder")
    (tmp_path / "none" / "read me").write_text("")
    refused(tmp_path / "none", "a folder of other things; in it: read me")
    two = specforge_text(tmp_path / "two")
    (two / "ultrachat_train.jsonl").write_text("{}\n")
    refused(two, "2 files of conversations.*sharegpt_train.jsonl, ultrachat_train.jsonl.*name the files")
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    refused(tmp_path / "splits", "several splits.*FOLDER/train")
    short = speculators(tmp_path / "short", expected)
    shard = short / "data-00001-of-00003.arrow"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    refused(short, "data-00001-of-00003.arrow.*whole file")
    shard.unlink()
    refused(short, "no data-00001-of-00003.arrow")
    (short / "state.json").write_text("{")
    refused(short, "state.json.*whole file")
    mixed = specforge_cache(tmp_path / "mixed", expected)
    specforge_cache(tmp_path / "more", expected, key="77aa")
    for file in (tmp_path / "more").iterdir():
        file.rename(mixed / file.name)
    refused(mixed, "several prepared sets")
    bad = samples(tmp_path / "bad", expected[:3], batched=False)
    (bad / "data_1.safetensors").write_bytes(b"x" * 40)
    refused(bad, "data_1.safetensors.*behind row 1")
