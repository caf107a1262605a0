"""The rows of a schedule as arrays, made by threads a few rows ahead of the loop that takes them.

Reading, checking and copying leave Python's lock, so they overlap with each other and with the replays. Memory is bounded:
so many rows as threads, and one. Called by build.py and the tools that measure loading.
"""

import collections
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from graphcap.data.conversations import Document
from graphcap.data.features import FeatureStore
from graphcap.data.loader import arrange
from graphcap.data.packing import Row


class Prefetch:
    """An iterator over make(job, place) for every job, in their order; threads are a few jobs ahead.

    place: 0 … depth - 1; what was made at a place is used no longer when the next result is asked for. What `make` raises
    comes out where its result would. `close` ends the threads; until then their errors wait for whoever asks.
    """

    def __init__(self, jobs: Iterable, make: Callable, *, num_threads: int) -> None:
        self.depth = num_threads + 1
        self._jobs, self._make, self._count = iter(jobs), make, 0
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="loader")
        self._waiting: collections.deque[Future] = collections.deque()

    def __iter__(self):
        return self

    def __next__(self):
        while len(self._waiting) < self.depth:
            try:
                job = next(self._jobs)  # on this thread: a schedule need not be safe to use from several
            except StopIteration:
                break
            self._waiting.append(self._pool.submit(self._make, job, self._count % self.depth))
            self._count += 1
        if not self._waiting:
            raise StopIteration
        return self._waiting.popleft().result()

    def close(self) -> None:
        """End the threads: what they have begun is waited for, what they have not is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class RowReader:
    """Makes a row's arrays: tokens, positions and anchors, and its features where training is from a store."""

    def __init__(
        self, documents: Mapping[int, Document], store: FeatureStore | None, *, seed: int, density: float, num_threads: int
    ) -> None:
        """documents: of training, by id; read from several threads. density: anchors per supervised token."""
        self.documents, self.store, self.seed, self.density = documents, store, seed, density
        self.num_threads = num_threads if store is not None else 1
        self._buffers: dict[int | str, np.ndarray] = {}
        self._held_out_row: Row | None = None

    def rows(self, jobs: Iterable[tuple[int, Row]]) -> Prefetch:
        """The arrays of every (epoch, row), in order; those of one are overwritten once the next are asked for."""
        return Prefetch(jobs, self._made, num_threads=self.num_threads)

    def with_features(self, row: Row, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays of a held-out row, and its features where there is a store; a row is read once for its passes."""
        if self.store is None:
            return arrays
        if row != self._held_out_row:
            self._held_out_row = None
            self._features(row, arrays["position"], True, "held_out")
            self._held_out_row = row
        return {**arrays, "features": self._buffers["held_out"][: len(arrays["token_ids"])]}

    def _made(self, job: tuple[int, Row], place: int) -> dict[str, np.ndarray]:
        epoch, row = job
        arrays = arrange(row, self.documents, seed=self.seed, epoch=epoch, density=self.density).arrays()
        if self.store is not None:
            arrays["features"] = self._features(row, arrays["position"], False, place)
        return arrays

    def _features(self, row: Row, position_T: np.ndarray, held_out: bool, place: int | str) -> np.ndarray:
        """[tokens, F] of the row's documents, in the buffer of that place: fresh pages would cost more than the reading.

        position_T: int32 [tokens], 0 where a document begins, so none is read again for its length.
        """
        kind = self.store.kind
        lengths = np.diff(np.flatnonzero(position_T == 0), append=len(position_T))
        buffer = self._buffers.get(place)
        if buffer is None or len(buffer) < row.bucket.length:
            buffer = self._buffers[place] = np.zeros((row.bucket.length, kind.num_features), kind.host_dtype)
        begin = 0
        for document_id, length in zip(row.document_ids, lengths, strict=True):
            self.store.read(document_id, held_out, buffer[begin : begin + length])
            begin += length
        return buffer[:begin]
