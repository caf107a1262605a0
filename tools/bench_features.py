"""How fast rows of stored features come from disk: the loader's limit, which is beside the disk's what training can wait for.

    python tools/bench_features.py                                            # a row of 4,096 tokens x 5 x 1,024 in bfloat16
    python tools/bench_features.py --gigabytes 20 --threads 1 2 4 8 --folder /data/bench

Writes a store of random features, checks that rows come back bit for bit, then times the rows of a shuffled epoch through the
reader that training uses: from the page cache, and after the kernel was asked to drop the files from it. `packed` is the same
with each row copied into a slot's layout, as `fill` does on the loop's thread. Prints a table and, last, one JSON document.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from graphcap.data.conversations import Document
from graphcap.data.features import FeatureStore, Kind
from graphcap.data.packing import Row
from graphcap.data.planner import Bucket
from graphcap.data.prefetch import RowReader
from graphcap.engine.slots import Buffer, Slot
from graphcap.ops.features import FeatureFolder
from graphcap.versions import environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--layers", type=int, default=5, help="tapped layers")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the store")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--folder", help="where to write; a temporary folder, removed afterwards")
    options = parser.parse_args()
    place = Path(options.folder or tempfile.mkdtemp(prefix="graphcap-"))
    try:
        bench(options, place / "store")
    finally:
        shutil.rmtree(place if options.folder is None else place / "store")


def bench(options, folder: Path) -> None:
    kind = Kind(
        {"name": "random", "commit": "", "fingerprint": ""}, tuple(range(options.layers)), options.hidden_size, "bfloat16"
    )
    draw, bucket = np.random.default_rng(0), Bucket(options.length)
    documents, values_TF = write(kind, draw, options, folder)
    store = FeatureStore(folder)
    rows = rows_of(documents, bucket, draw)
    check(store, documents, rows[:3], values_TF)
    row_bytes = (
        sum(len(documents[number].token_ids) for row in rows for number in row.document_ids) * kind.token_bytes / len(rows)
    )
    print(f"{len(rows)} rows of {row_bytes / 1e6:.1f} MB on average, {len(store.shards)} shards\n")
    print(f"{'from':<12}{'threads':>8}{'GB/s':>8}{'packed GB/s':>14}{'ms a row, packed':>18}")
    results = []
    for source in ("page cache", "disk"):
        for num_threads in options.threads:
            took_s = [timed(store, documents, rows, num_threads, source=source, packed=packed) for packed in (False, True)]
            whole, packed = (len(rows) * row_bytes / 1e9 / one for one in took_s)
            ms = 1e3 * took_s[1] / len(rows)
            print(f"{source:<12}{num_threads:>8}{whole:>8.2f}{packed:>14.2f}{ms:>18.2f}", flush=True)
            results.append({"from": source, "threads": num_threads, "gb_per_s": whole, "packed_gb_per_s": packed, "row_ms": ms})
    sizes = {"length": options.length, "layers": options.layers, "hidden_size": options.hidden_size, "row_bytes": row_bytes}
    print(json.dumps({**sizes, "rows": len(rows), "results": results, "cpus": os.cpu_count(), "environment": environment({})}))


def write(kind: Kind, draw, options, folder: Path) -> tuple[dict[int, Document], np.ndarray]:
    """Documents of log-normal length, and the values that their features are cut from: document n's begin at token n."""
    values_TF = draw.integers(0, 2**16, (3 * options.length, kind.num_features), dtype=np.uint16)
    documents, num_tokens = {}, 0
    place = FeatureFolder(folder)
    writer = place.writer(kind, shard_bytes=1 << 30)
    begin = time.perf_counter()
    while num_tokens * kind.token_bytes < options.gigabytes * 1e9:
        length, number = int(np.clip(np.exp(draw.normal(np.log(735), 0.7)), 32, options.length)), len(documents)
        token_ids = draw.integers(0, 50_000, length).astype(np.int32)
        documents[number] = Document(number, token_ids, np.ones(length, bool), "random", number)
        at = number % options.length
        writer.add(number, False, token_ids, values_TF[at : at + length])
        num_tokens += length
    writer.close()
    place.close()
    rate = num_tokens * kind.token_bytes / 1e9 / (time.perf_counter() - begin)
    print(f"wrote {len(documents)} documents with checksums and synced: {rate:.2f} GB/s")
    return documents, values_TF


def rows_of(documents: dict[int, Document], bucket: Bucket, draw) -> list[Row]:
    """The documents in a random order, as many a row as fit."""
    rows, current, used = [], [], 0
    for number in draw.permutation(len(documents)).tolist():
        length = len(documents[number].token_ids)
        if used + length > bucket.length:
            rows.append(Row(bucket, tuple(current)))
            current, used = [], 0
        current.append(number)
        used += length
    return [*rows, Row(bucket, tuple(current))]


def check(store: FeatureStore, documents, rows: list[Row], values_TF: np.ndarray) -> None:
    for row, arrays in zip(rows, reader(store, documents, 2).rows((0, row) for row in rows), strict=True):
        cuts = [values_TF[n % row.bucket.length :][: len(documents[n].token_ids)] for n in row.document_ids]
        assert np.array_equal(arrays["features"], np.concatenate(cuts)), "a row came back otherwise than it was written"


def reader(store: FeatureStore, documents, num_threads: int) -> RowReader:
    return RowReader(documents, store, seed=0, density=0.0, num_threads=num_threads)


def timed(store: FeatureStore, documents, rows: list[Row], num_threads: int, *, source: str, packed: bool) -> float:
    """Seconds for all rows. From the page cache they are read once before."""
    length, kind = rows[0].bucket.length, store.kind
    slot = Slot("bench", (Buffer("features", length, 0, torch.bfloat16, trailing=(kind.num_features,)),), torch.device("cpu"))
    row_reader = reader(store, documents, num_threads)

    def read_all() -> float:
        begin = time.perf_counter()
        arrays = row_reader.rows((0, row) for row in rows)
        for row in arrays:
            if packed:
                slot.fill({"features": row["features"]})
        arrays.close()
        return time.perf_counter() - begin

    read_all()  # also touches the buffers
    if source == "disk":
        for shard in store.shards:
            descriptor = os.open(store.folder / shard.name, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    return read_all()


if __name__ == "__main__":
    main()
