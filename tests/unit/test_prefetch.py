"""Rows come in their order from several threads, errors as themselves at their place, and `close` ends the threads."""

import random
import threading
import time

import numpy as np
import pytest

from graphcap.data.prefetch import Prefetch
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
