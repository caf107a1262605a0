"""What index.json says of a shard, from the shard alone: its header has the kind of its features, its columns the rest.

Calls: ops/features.py. Loads no torch.
"""

import hashlib
import json
import os
import zlib
from pathlib import Path

from graphcap.data.features import (
    COLUMN_BYTES,
    FORMAT,
    HEADER_BYTES,
    INDEX,
    Kind,
    Shard,
    damaged_documents,
    document_name,
    kind_from,
    shard_header,
    split_columns,
)
from graphcap.errors import DataError


def read_back(folder: Path, name: str) -> tuple[Kind, Shard] | str:
    """A shard as index.json listed it, after reading every byte; where it is damaged, in words how.

    Raises: DataError for a file that is no shard, or one that does not say what its features are of; OSError.
    """
    with open(folder / name, "rb") as file:
        head = file.read(HEADER_BYTES)
        if FORMAT.encode() not in head:
            raise _unsaid(folder, f"{name}, which is no shard of features", f"remove {name}")
        try:
            tensors = json.loads(head[8:])
            (num_tokens, _), (num_documents,) = tensors["features"]["shape"], tensors["crc32"]["shape"]
            if "kind" not in tensors["__metadata__"]:
                got = f"{name}, whose header does not say what its features are of, as with an earlier graphcap or a long name"
                raise _unsaid(folder, got, "extract into another folder")
            kind = kind_from(json.loads(tensors["__metadata__"]["kind"]))
            end = HEADER_BYTES + num_tokens * kind.token_bytes
            size, found = end + num_documents * COLUMN_BYTES, file.seek(0, os.SEEK_END)
            if found != size:
                return f"{found:,} of {size:,} bytes"
            file.seek(end)
            packed = file.read()
            if shard_header(kind, num_tokens=num_tokens, columns=packed) != head:
                return "other bytes in its header or columns"
        except DataError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError):
            return "other bytes in its header"
        file.seek(0)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    columns = split_columns(packed, num_documents=num_documents)
    first, last = (document_name(int(columns["document_id"][at]), bool(columns["held_out"][at])) for at in (0, -1))
    shard = Shard(name, size, sha256, num_documents, num_tokens, zlib.crc32(packed), first, last)
    damaged = damaged_documents(folder, kind, shard)
    return f"other bytes for {len(damaged)} documents, first {damaged[0]}" if damaged else (kind, shard)


def _unsaid(folder: Path, got: str, other_way: str) -> DataError:
    return DataError(
        "features",
        folder,
        expected=f"an {INDEX} as it was written, or shards to write it anew from",
        got=got,
        fix=f"put back a copy of {INDEX}, or {other_way}",
    )
