"""A store gives back what was written, bit for bit, or says which shard and document is damaged; a kill loses no shard."""

import hashlib
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from graphcap.data import features
from graphcap.data.features import INDEX, FeatureStore, Kind, needed_bytes
from graphcap.errors import ConfigError, DataError, closing
from graphcap.ops.features import FeatureFolder
from tests.toys import fresh_seed

TARGET = {"name": "toy", "commit": "", "fingerprint": "0123456789abcdef"}


def kind_of(dtype: str, *, taps=(1, 3), hidden_size: int = 5) -> Kind:
    return Kind(TARGET, taps, hidden_size, dtype)


def random_documents(
    kind: Kind, rng: random.Random, count: int, *, shortest: int = 1
) -> list[tuple[int, bool, np.ndarray, np.ndarray]]:
    """(id, held out, token ids, features) of documents, the same ids in both sets, in any order. shortest: in tokens."""
    draw = np.random.default_rng(rng.getrandbits(32))
    made = []
    for number in rng.sample(range(10 * count), count):
        token_ids = draw.integers(0, 100, draw.integers(shortest, 20)).astype(np.int32)
        bits = draw.integers(0, 256, (len(token_ids), kind.token_bytes), dtype=np.uint8)
        made.append((number // 2, bool(number % 2), token_ids, bits.view(kind.host_dtype)))
    return made


def write(folder: Path, kind: Kind, documents, *, shard_bytes: int = 400, close: bool = True) -> None:
    """Add the documents that the folder lacks, as `graphcap extract` does."""
    place = FeatureFolder(folder)
    try:
        place.reopen()
        store = FeatureStore(folder) if (folder / INDEX).is_file() else None
        writer = place.writer(kind, shard_bytes=shard_bytes)
        for number, held_out, token_ids, values in documents:
            if store is None or not store.has(number, held_out, token_ids):
                writer.add(number, held_out, token_ids, values)
        if close:
            writer.close()
    finally:
        place._lock.close()


def read(store: FeatureStore, number: int, held_out: bool, token_ids) -> np.ndarray:
    out_TF = np.zeros((len(token_ids), store.kind.num_features), store.kind.host_dtype)
    store.read(number, held_out, out_TF)
    return out_TF


def damaged(store: FeatureStore, documents) -> dict[tuple[int, bool], str]:
    """What reading each document says where it fails."""
    found = {}
    for number, held_out, token_ids, values in documents:
        try:
            assert read(store, number, held_out, token_ids).tobytes() == values.tobytes()
        except DataError as error:
            found[number, held_out] = str(error)
    return found


def extent(shard: features.Shard) -> str:
    return f"{shard.num_documents} documents, {shard.first} written first and {shard.last} last"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.fixture
def stored(tmp_path):
    """A store of 30 documents in several shards, and the documents."""
    rng, kind = random.Random(fresh_seed()), kind_of("bfloat16")
    documents = random_documents(kind, rng, 30)
    write(tmp_path / "store", kind, documents)
    return tmp_path / "store", documents, rng


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_document_comes_back_bit_for_bit_and_safetensors_reads_the_shards(tmp_path, dtype):
    kind = kind_of(dtype)
    documents = random_documents(kind, random.Random(fresh_seed()), 30)
    write(tmp_path, kind, documents)
    store = FeatureStore(tmp_path)
    assert damaged(store, documents) == {} and len(store.shards) > 3
    assert (store.num_documents, store.num_tokens) == (30, sum(len(one[2]) for one in documents))
    assert all(store.has(*one[:3]) for one in documents) and not store.has(999, False, documents[0][2])
    features.check_store(tmp_path)
    if dtype == "float32":  # safetensors' numpy has no bfloat16
        shards = [load_file(tmp_path / shard.name) for shard in store.shards]
        assert [int(number) for shard in shards for number in shard["document_id"]] == [one[0] for one in documents]
        whole = np.concatenate([shard["features"] for shard in shards])
        assert whole.tobytes() == b"".join(one[3].tobytes() for one in documents)


def test_safetensors_reads_a_shard_of_bfloat16(stored):
    import torch
    from safetensors.torch import load_file as load_torch

    folder, documents, _ = stored
    tensors = [load_torch(folder / shard.name)["features"] for shard in FeatureStore(folder).shards]
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors)
    whole = torch.cat(tensors).view(torch.int16).numpy().tobytes()
    assert whole == b"".join(one[3].tobytes() for one in documents)


def test_a_flipped_bit_is_found_wherever_it_is_and_the_document_and_shard_are_named(stored):
    folder, documents, rng = stored
    shards = FeatureStore(folder).shards
    for _ in range(20):
        shard = rng.choice(shards)
        path, place = folder / shard.name, rng.randrange(features.HEADER_BYTES, shard.bytes)
        before = path.read_bytes()
        path.write_bytes(before[:place] + bytes([before[place] ^ (1 << rng.randrange(8))]) + before[place + 1 :])
        try:
            store = FeatureStore(folder)
        except DataError as error:  # in the columns
            assert place >= shard.bytes - features.COLUMN_BYTES * shard.num_documents
            assert shard.name in str(error) and shard.first in str(error) and "columns" in str(error)
        else:
            ((number, held_out), message) = next(iter(damaged(store, documents).items()))
            name = features.document_name(number, held_out)
            assert len(damaged(store, documents)) == 1 and shard.name in message and f"document {name}:" in message
            with pytest.raises(DataError, match=rf"{shard.name} \({name}\)"):
                features.check_store(folder)
        path.write_bytes(before)
        features.check_store(folder)  # and takes the mark away
        assert [path.name for path in folder.iterdir() if path.name.endswith(".damaged")] == []


def test_any_damage_that_was_found_is_computed_again_by_the_next_writer_and_refused_until_then(stored):
    folder, documents, rng = stored
    kind, shards = features.read_index(folder)
    header, read_, checked, columns, stray = rng.sample(shards, 5)
    places = ((header, 20), (read_, features.HEADER_BYTES), (checked, features.HEADER_BYTES), (columns, columns.bytes - 1))
    store = FeatureStore(folder)
    flip(folder / read_.name, features.HEADER_BYTES)
    assert len(damaged(store, documents)) == 1
    with pytest.raises(DataError, match=f"{read_.name}.*damage found before: other bytes for document {read_.first}"):
        FeatureStore(folder)
    for shard, place in places:
        if shard is not read_:
            flip(folder / shard.name, place)
    with pytest.raises(DataError, match=f"graphcap extract RECIPE --out {folder} computes what is damaged anew"):
        features.check_store(folder)
    (folder / features.mark_name(stray.name)).write_text("0123 of another shard of this name\n")
    write(folder, kind, documents)
    features.check_store(folder)
    after = FeatureStore(folder)
    assert damaged(after, documents) == {} and after.num_documents == 30
    assert set(shards) - set(after.shards) == {header, read_, checked, columns}
    assert not list(folder.glob(".*.damaged"))


def test_a_folder_that_cannot_be_marked_has_the_damaged_shard_removed_by_hand(stored, monkeypatch):
    folder, documents, _ = stored
    store = FeatureStore(folder)
    flip(folder / store.shards[0].name, features.HEADER_BYTES)
    monkeypatch.setattr(Path, "write_text", lambda *arguments, **keywords: (_ for _ in ()).throw(PermissionError()))
    (message,) = damaged(store, documents).values()
    assert f"Fix: remove {folder / store.shards[0].name}, then graphcap extract RECIPE --out {folder} computes" in message


def test_a_shard_that_the_file_system_refuses_to_read_is_not_removed(stored, monkeypatch):
    folder, documents, _ = stored
    kind, shards = features.read_index(folder)

    def refused(*arguments):
        raise OSError(5, "Input/output error")

    whole = {path.name for path in folder.iterdir()}
    stat = Path.stat
    stale = lambda path, **how: refused() if path.name == shards[0].name else stat(path, **how)  # noqa: E731
    for place, name, fault in ((os, "preadv", refused), (hashlib, "file_digest", refused), (Path, "stat", stale)):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fault)
            if place is not os:  # whose bytes are all as they were is not looked into
                with pytest.raises(DataError, match="not read: .*Input/output error.*check again"):
                    features.check_store(folder)
            if place is not hashlib:
                with pytest.raises(DataError, match="Input/output error"):
                    write(folder, kind, documents)
        assert {path.name for path in folder.iterdir()} == whole | {".lock"}
    features.check_store(folder)


def index_damages(text: str):
    """Ways to lose index.json: None is none at all."""
    place = text.index(TARGET["fingerprint"])
    return (None, "", "[]", text[: len(text) // 2], text[:place] + "1" + text[place + 1 :], text.replace(": 1,", ": 3,", 1))


def test_an_index_that_is_lost_is_written_anew_from_the_shards_as_it_was(stored):
    folder, documents, _ = stored
    before = (folder / INDEX).read_text()
    kind, shards = features.read_index(folder)
    for text in index_damages(before):
        if text is None:
            (folder / INDEX).unlink()
        else:
            (folder / INDEX).write_text(text)
        for reader in (FeatureStore, features.check_store):
            with pytest.raises(features.IndexLost, match=f"graphcap extract RECIPE --out {folder} writes it anew"):
                reader(folder)
        place = FeatureFolder(folder)
        (line,) = place.reopen()
        place.close()
        assert f"{INDEX} is written anew from {len(shards)} shards" in line and (folder / INDEX).read_text() == before
    features.check_store(folder)
    assert damaged(FeatureStore(folder), documents) == {}


def test_with_an_index_that_is_lost_a_flipped_bit_anywhere_costs_its_shard_only(stored):
    folder, documents, rng = stored
    kind, shards = features.read_index(folder)
    for turn in range(40):
        shard = rng.choice(shards)
        place = rng.randrange(8, 600) if turn % 2 else rng.randrange(shard.bytes)
        whole = (folder / shard.name).read_bytes()
        (folder / shard.name).write_bytes(whole[:place] + bytes([whole[place] ^ (1 << rng.randrange(8))]) + whole[place + 1 :])
        (folder / INDEX).unlink()
        try:
            write(folder, kind, documents)
        except DataError as error:  # in the few bytes that say whose file it is, or that there is more to read
            assert f"got {shard.name}, w" in str(error) and {path.name for path in folder.glob("shard-*")} == {
                one.name for one in shards
            }
            (folder / shard.name).unlink()
            write(folder, kind, documents)
        store = FeatureStore(folder)
        features.check_store(folder)
        assert damaged(store, documents) == {} and store.num_documents == 30
        assert len(set(shards) - set(store.shards)) <= 1  # 0: the last one, whose number is given again
        shards = store.shards


def test_an_index_that_the_shards_cannot_give_is_refused_and_nothing_is_removed(stored, tmp_path):
    folder, documents, _ = stored
    kind = Kind(TARGET | {"name": "n" * 500}, (1, 3), 5, "bfloat16")  # too long for a header
    write(tmp_path / "long", kind, documents)
    (tmp_path / "long" / INDEX).unlink()
    shutil.copytree(folder, tmp_path / "foreign")
    (tmp_path / "foreign" / INDEX).unlink()
    (tmp_path / "foreign" / "shard-00001.safetensors").write_bytes(b"mine" * 1000)
    shutil.copytree(folder, tmp_path / "later")
    text = index_text_of_version_2(tmp_path / "later")
    (tmp_path / "later" / INDEX).write_text(text)
    for name, words in (
        ("long", "shard-00000.safetensors, whose header does not say"),
        ("foreign", "shard-00001.safetensors, which is no shard"),
        ("later", "version 2"),
    ):
        before = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        with pytest.raises(DataError, match=words):
            write(tmp_path / name, kind, documents)
        assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} == before


def index_text_of_version_2(folder: Path) -> str:
    kind, shards = features.read_index(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "VERSION", 2)
        return features.index_text(kind, shards)


def test_a_truncated_and_a_missing_shard_are_named_and_only_their_documents_are_written_again(stored):
    folder, documents, rng = stored
    kind, shards = features.read_index(folder)
    cut, gone = rng.sample(shards, 2)
    (folder / gone.name).rename(folder.parent / "away")
    with pytest.raises(DataError, match=f"{gone.name}.*{gone.first} written first and {gone.last} last.*no such file"):
        FeatureStore(folder)
    (folder.parent / "away").rename(folder / gone.name)
    with open(folder / cut.name, "r+b") as file:
        file.truncate(cut.bytes - 1)
    with pytest.raises(DataError, match=f"{cut.name}.*{cut.bytes - 1:,} of {cut.bytes:,} bytes"):
        FeatureStore(folder)
    (folder / gone.name).unlink()
    write(folder, kind, documents)
    store = FeatureStore(folder)
    assert damaged(store, documents) == {} and store.num_documents == 30
    assert {shard.name for shard in store.shards} >= {shard.name for shard in shards} - {cut.name, gone.name}


def test_a_check_names_every_shard_that_is_missing_cut_off_or_changed(stored):
    folder, documents, rng = stored
    kind, shards = features.read_index(folder)
    gone, cut, flipped, columns = rng.sample(shards, 4)
    (folder / gone.name).unlink()
    os.truncate(folder / cut.name, cut.bytes - 1)
    for shard, place in ((flipped, features.HEADER_BYTES), (columns, columns.bytes - 1)):
        data = bytearray((folder / shard.name).read_bytes())
        data[place] ^= 1
        (folder / shard.name).write_bytes(data)
    with pytest.raises(DataError) as raised:
        features.check_store(folder)
    message = str(raised.value)
    assert f"{gone.name} (no such file, of {extent(gone)})" in message
    assert f"{cut.name} ({cut.bytes - 1:,} of {cut.bytes:,} bytes, of {extent(cut)})" in message
    assert f"{flipped.name} ({flipped.first})" in message and f"{columns.name} (its columns, of {extent(columns)})" in message
    assert message.count("shard-") == 4, message


def test_a_shard_that_is_cut_off_or_goes_while_it_is_read_is_named(stored):
    folder, documents, _ = stored
    store = FeatureStore(folder)
    with open(folder / store.shards[0].name, "r+b") as file:
        file.truncate(features.HEADER_BYTES + 3)
    (folder / store.shards[1].name).unlink()
    found = damaged(store, documents)
    assert len(found) == store.shards[0].num_documents + store.shards[1].num_documents
    assert any("ends too early" in line and store.shards[0].name in line for line in found.values())
    assert any("No such file" in line and store.shards[1].name in line for line in found.values())


def test_a_changed_index_and_features_of_other_tokens_are_refused(stored):
    folder, documents, _ = stored
    number, held_out, token_ids, _ = documents[0]
    with pytest.raises(DataError, match="other tokens"):
        FeatureStore(folder).has(number, held_out, token_ids + 1)
    text = (folder / INDEX).read_text()
    for wrong in (text.replace("bfloat16", "float32"), text[: len(text) // 2], "[]", ""):
        (folder / INDEX).write_text(wrong)
        with pytest.raises(DataError, match=INDEX):
            FeatureStore(folder)


def test_another_target_other_taps_and_another_folder_are_refused(stored, tmp_path):
    folder, documents, _ = stored
    for kind in (
        kind_of("float32"),
        kind_of("bfloat16", taps=(1, 2)),
        Kind(TARGET | {"fingerprint": "f" * 16}, (1, 3), 5, "bfloat16"),
    ):
        with pytest.raises(ConfigError, match="features.*expected .*, got "):
            write(folder, kind, documents)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="notes.txt"):
        write(tmp_path / "other", kind, documents)
    held = FeatureFolder(folder)
    with pytest.raises(ConfigError, match="another process writes"):
        FeatureFolder(folder)
    held.close()
    (folder / "shard-77777.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="shard-77777"):
        write(folder, kind_of("bfloat16"), documents)


@pytest.mark.parametrize("shard_bytes", [1, 10_000, 1 << 30])
def test_the_predicted_bytes_are_those_on_disk_within_two_percent(tmp_path, shard_bytes):
    kind = kind_of("bfloat16", taps=(1, 3, 5), hidden_size=512)
    documents = random_documents(kind, random.Random(fresh_seed()), 40)
    write(tmp_path, kind, documents, shard_bytes=shard_bytes)
    num_tokens = sum(len(one[2]) for one in documents)
    predicted = needed_bytes(kind, num_documents=40, num_tokens=num_tokens, shard_bytes=shard_bytes)
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert abs(predicted - on_disk) <= 0.02 * on_disk
    assert abs(num_tokens * kind.num_features - on_disk) > 0.02 * on_disk  # must fail: one byte an element


class Killed(BaseException):
    """The process is gone: nothing it would still have done is done."""


class Kills:
    """Kills at the n-th call that changes the disk, and every call after it: whoever cleans up is dead too."""

    def __init__(self, monkeypatch) -> None:
        self.left, self.count = -1, 0
        for name in ("pwrite", "fsync", "rename", "replace", "unlink", "mkdir"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call):
        def counted(*arguments, **keywords):
            self.count += 1
            if 0 <= self.left < self.count:
                raise Killed
            return call(*arguments, **keywords)

        return counted

    def run(self, action, *, at: int) -> bool:
        """Run; kill at call number `at`, or never if -1. Whether it was killed."""
        self.left, self.count = at, 0
        try:
            action()
        except Killed:
            return True
        finally:
            self.left = -1
        return False


def test_killed_at_every_call_that_changes_the_disk_whole_shards_stay_and_the_next_writer_goes_on(tmp_path, monkeypatch):
    kind, kills = kind_of("bfloat16"), Kills(monkeypatch)
    documents = random_documents(kind, random.Random(fresh_seed()), 9, shortest=9)  # four shards at least
    kills.run(lambda: write(tmp_path / "whole", kind, documents), at=-1)
    num_calls, seen = kills.count, []
    assert num_calls > 20
    for at in range(num_calls):
        folder = tmp_path / str(at)
        assert kills.run(lambda folder=folder: write(folder, kind, documents), at=at)
        if (folder / INDEX).is_file():
            store = FeatureStore(folder)
            seen.append(store.num_documents)
            assert len(damaged(store, documents)) == 9 - store.num_documents
            assert damaged(store, documents[: store.num_documents]) == {}
        write(folder, kind, documents)
        store = FeatureStore(folder)
        features.check_store(folder)
        assert damaged(store, documents) == {}
        assert {path.name for path in folder.iterdir()} == {".lock", INDEX, *(shard.name for shard in store.shards)}
    assert seen == sorted(seen) and len(set(seen)) >= 4, seen


def test_killed_while_damaged_shards_are_given_up_the_next_writer_goes_on(tmp_path, monkeypatch):
    kind, kills = kind_of("bfloat16"), Kills(monkeypatch)
    documents = random_documents(kind, random.Random(fresh_seed()), 9)
    for at in range(100):
        folder = tmp_path / str(at)
        write(folder, kind, documents)
        shards = FeatureStore(folder).shards
        for shard in shards[:2]:
            flip(folder / shard.name, features.HEADER_BYTES)
        with pytest.raises(DataError):
            features.check_store(folder)
        killed = kills.run(lambda folder=folder: write(folder, kind, documents), at=at)
        write(folder, kind, documents)
        features.check_store(folder)
        store = FeatureStore(folder)
        assert damaged(store, documents) == {} and store.num_documents == 9
        assert {path.name for path in folder.iterdir()} == {".lock", INDEX, *(shard.name for shard in store.shards)}
        if not killed:
            break
    assert 10 < at < 99


def test_killed_while_the_index_is_written_anew_the_next_writer_goes_on(tmp_path, monkeypatch):
    kind, kills = kind_of("bfloat16"), Kills(monkeypatch)
    documents = random_documents(kind, random.Random(fresh_seed()), 9)
    for at in range(100):
        folder = tmp_path / str(at)
        write(folder, kind, documents)
        shard = FeatureStore(folder).shards[0]
        flip(folder / shard.name, features.HEADER_BYTES)
        (folder / INDEX).write_text("lost")
        killed = kills.run(lambda folder=folder: write(folder, kind, documents), at=at)
        write(folder, kind, documents)
        features.check_store(folder)
        assert damaged(FeatureStore(folder), documents) == {}
        if not killed:
            break
    assert 6 < at < 99


def test_interrupted_after_every_call_that_changes_the_disk_close_keeps_what_was_added(tmp_path, monkeypatch):
    kind, left, added = kind_of("bfloat16"), 0, 0
    documents = random_documents(kind, random.Random(fresh_seed()), 9, shortest=9)

    def interrupted(call):
        def then(*arguments, **keywords):
            nonlocal left
            result, left = call(*arguments, **keywords), left - 1
            if left == 0:
                raise KeyboardInterrupt
            return result

        return then

    for name in ("pwrite", "fsync", "rename", "replace"):
        monkeypatch.setattr(os, name, interrupted(getattr(os, name)))
    for at in range(1, 200):
        folder = FeatureFolder(tmp_path / str(at))
        writer, added, whole = folder.writer(kind, shard_bytes=400), 0, False
        left = at
        try:
            with closing(folder), closing(writer):
                for added, one in enumerate(documents):  # noqa: B007 - as many as were added whole
                    writer.add(*one)
                added, whole, left = len(documents), left > 0, 0  # what interrupts `close` itself is not caught
        except KeyboardInterrupt as error:
            assert not hasattr(error, "__notes__"), error.__notes__
        features.check_store(folder.folder)
        store = FeatureStore(folder.folder)
        assert damaged(store, documents[:added]) == {} and store.num_documents in (added, added + 1)
        if whole:
            break
    assert 20 < at < 199 and added == 9


def test_what_was_added_before_an_error_is_kept_by_close(tmp_path):
    kind = kind_of("bfloat16")
    documents = random_documents(kind, random.Random(fresh_seed()), 6)
    folder = FeatureFolder(tmp_path / "store")
    writer = folder.writer(kind, shard_bytes=1 << 30)
    for one in documents[:4]:
        writer.add(*one)
    writer._write(bytes(1000), writer._end)  # half of a document, as if the disk had been full
    writer.close()
    folder.close()
    store = FeatureStore(tmp_path / "store")
    features.check_store(tmp_path / "store")
    assert store.num_documents == 4 and damaged(store, documents[:4]) == {}
