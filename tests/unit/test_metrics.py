"""Rows of the metrics ring come back whole and in order, also across its end, and as they were when fetched."""

import random

import pytest
import torch

from graphcap.engine.metrics import Fetch


def test_rows_come_back_in_order_across_the_end_of_the_ring():
    rng = random.Random()
    for _ in range(50):
        size, written = rng.randint(1, 9), rng.randint(1, 40)
        ring = torch.zeros(size, 2)
        for number in range(written):
            ring[number % size] = torch.tensor([number, -number], dtype=torch.float32)
        count = rng.randint(1, min(size, written))
        fetch = Fetch(ring, written - count, count)
        ring.fill_(99)  # what is written later does not reach a copy already made
        assert fetch.ready()
        assert fetch.rows() == [[float(n), float(-n)] for n in range(written - count, written)]


def test_more_rows_than_the_ring_holds_are_refused():
    with pytest.raises(AssertionError, match="5 rows wanted of a ring of 4"):
        Fetch(torch.zeros(4, 1), 0, 5)
