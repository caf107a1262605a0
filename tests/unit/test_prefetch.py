"""Rows come in their order from several threads, errors as themselves at their place, and `close` ends the threads."""

import random
import threading
import time

import numpy as np
import pytest

from graphcap.data.documents import Document
from graphcap.data.features import FeatureStore, Kind
from graphcap.data.packing import Row
from graphcap.data.planner import Bucket
from graphcap.data.prefetch import Prefetch, RowReader
from graphcap.ops.features import FeatureFolder
from tests.toys import fresh_seed


def loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_results_come_in_order_and_stay_until_the_next_is_asked_for(num_threads):
    rng = random.Random(fresh_seed())
    waits_s = [rng.choice([0, 0, 0.002]) for _ in range(60)]
    buffers: dict[int, np.ndarray] = {}

    def make(job: int, place: int) -> np.ndarray:
        buffer = buffers.setdefault(place, np.zeros(50, int))
        time.sleep(waits_s[job])
        buffer[:] = job
        return buffer

    rows = Prefetch(range(60), make, num_threads=num_threads)
    for job, row in enumerate(rows):
        time.sleep(rng.choice([0, 0.001]))
        assert (row == job).all()
    rows.close()
    assert set(buffers) == set(range(num_threads + 1)) and loaders() == []


def test_no_more_jobs_are_taken_than_there_is_room_for():
    taken = []
    rows = Prefetch(iter(lambda: taken.append(1) or len(taken), -1), lambda job, place: job, num_threads=2)
    for count in range(1, 20):
        assert next(rows) == count and len(taken) <= count + 2
    rows.close()


class Counted(dict):
    """Documents that count how often each is read."""

    def __init__(self, documents: dict[int, Document]) -> None:
        super().__init__(documents)
        self.reads: list[int] = []

    def __getitem__(self, number: int) -> Document:
        self.reads.append(number)
        return super().__getitem__(number)


def test_every_document_of_a_row_is_read_once_and_has_its_features(tmp_path):
    draw = np.random.default_rng(fresh_seed())
    documents, values, folder = {}, {}, FeatureFolder(tmp_path / "store")
    writer = folder.writer(Kind({"name": "toy", "commit": "", "fingerprint": ""}, (1,), 3, "float32"), shard_bytes=100)
    for number in range(12):
        token_ids = draw.integers(0, 100, draw.integers(1, 9)).astype(np.int32)
        documents[number] = Document(number, token_ids, np.ones(len(token_ids), bool), "toy", number)
        values[number] = draw.random((len(token_ids), 3), np.float32)
        writer.add(number, False, token_ids, values[number])
    writer.close()
    folder.close()
    counted = Counted(documents)
    reader = RowReader(counted, FeatureStore(tmp_path / "store"), seed=0, density=0.2, num_threads=1)
    order = draw.permutation(12).tolist()
    jobs = [(0, Row(Bucket(128, 128), tuple(order[first : first + 3]))) for first in (0, 3, 6, 9)]
    rows = reader.rows(jobs)
    for (_, row), arrays in zip(jobs, rows, strict=True):
        assert (arrays["features"] == np.concatenate([values[number] for number in row.document_ids])).all()
    rows.close()
    assert sorted(counted.reads) == list(range(12))


class Broken(Exception):
    pass


def test_an_error_is_raised_as_itself_where_its_row_would_come_and_close_ends_the_threads():
    error, started = Broken("row 3"), []

    def make(job: int, place: int) -> int:
        started.append(job)
        if job == 3:
            raise error
        return job

    rows = Prefetch(range(100), make, num_threads=2)
    assert [next(rows) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(Broken) as raised:
        next(rows)
    assert raised.value is error
    rows.close()
    assert loaders() == [] and len(started) <= 7


def test_close_waits_for_what_was_begun_and_drops_the_rest():
    begun, release = threading.Event(), threading.Event()
    done = []

    def make(job: int, place: int) -> int:
        begun.set()
        assert release.wait(30)
        done.append(job)
        return job

    rows = Prefetch(range(100), make, num_threads=1)
    taker = threading.Thread(target=lambda: next(rows))
    taker.start()
    assert begun.wait(30)
    threading.Timer(0.02, release.set).start()
    rows.close()
    taker.join(30)
    assert not taker.is_alive() and loaders() == [] and done in ([0], [0, 1])
