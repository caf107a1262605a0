"""Files of other kinds, by their first bytes or their name: refused, with the command that makes conversations of them.

Called by sources.py; folders.py knows an Arrow stream by its beginning.
"""

import shlex
from pathlib import Path

from graphcap.errors import DataError

ACCEPTED = ".jsonl, .jsonl.gz, .parquet, or hf:OWNER/NAME[:SPLIT]"

_SAVED = (".pt", ".pth", ".bin", ".ckpt", ".pt.gz", ".ckpt.gz")  # by torch
_PICKLES = (".pkl", ".pickle", *_SAVED)
ARROW_STREAM, _ARROW_FILE = b"\xff\xff\xff\xff", b"ARROW1"  # how they begin
_MOST_HEADER_BYTES = 100_000_000  # of safetensors: a file begins with the length of its JSON header

# Programs that a user may run: what one file holds, as lines of JSON.
_SAVED_ROWS = (
    "import gzip, json, sys, torch; name = sys.argv[1]; "
    "rows = torch.load(gzip.open(name) if name.endswith('.gz') else open(name, 'rb'), map_location='cpu', weights_only=True); "
    "rows = [{key: rows[key].flatten().tolist() for key in ('input_ids', 'loss_mask')}] if isinstance(rows, dict) else rows; "
    "[print(json.dumps(row)) for row in rows]"
)
_PICKLED_ROWS = "import json, pickle, sys; [print(json.dumps(row)) for row in pickle.load(open(sys.argv[1], 'rb'))]"


def refuse_others(path: str, head: bytes) -> None:
    """Raises: DataError for a part of a prepared folder, a pickle, by name or first bytes, and for archives."""
    _refuse_parts(path, head)
    torch_file = head.startswith(b"PK\x03\x04")  # torch.save writes a zip around its pickle
    if path.endswith(_PICKLES) or torch_file or head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        saved = torch_file or path.endswith(_SAVED)
        raise DataError(
            "data file",
            path,
            expected=ACCEPTED,
            got="a zip or a pickle of torch" if saved else "a pickle",
            cause="loading a pickle runs whatever code it holds, so graphcap never does",
            fix=f"where you trust it, convert it with {_command(_SAVED_ROWS if saved else _PICKLED_ROWS, path)}",
        )
    archives = {b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"), b"BZh": ("bzip2", "bunzip2"), b"\xfd7zX": ("xz", "unxz")}
    for begin, (name, unpack) in archives.items():
        if head.startswith(begin):
            raise DataError(
                "data file",
                path,
                expected=ACCEPTED,
                got=f"a {name} archive",
                fix=f"unpack it with `{unpack} {shlex.quote(path)}`",
            )


def _refuse_parts(path: str, head: bytes) -> None:
    """Raises: DataError for Arrow and safetensors, of which a folder is read, and not a file."""
    arrow = head.startswith((ARROW_STREAM, _ARROW_FILE))
    if not arrow and not (int.from_bytes(head[:8], "little") <= _MOST_HEADER_BYTES and head[8:9] == b"{"):
        return
    folder = Path(path).parent
    listed = [one for one in (folder, folder.parent) if (one / "state.json").exists()]
    fix = f"name its folder, '{listed[0] if listed else folder}'"
    if arrow and not listed and not path.endswith(".pkl"):
        begin = "open_file" if head.startswith(_ARROW_FILE) else "open_stream"
        program = f"import json, sys, pyarrow.ipc as ipc; table = ipc.{begin}(open(sys.argv[1], 'rb')).read_all(); "
        fix = f"convert it with {_command(program + '[print(json.dumps(row)) for row in table.to_pylist()]', path)}"
    raise DataError("data file", path, expected=ACCEPTED, got="an Arrow file" if arrow else "a safetensors file", fix=fix)


def _command(program: str, path: str) -> str:
    """What to type: the program over the file, its lines into another one of this folder."""
    return f'`python -c "{program}" {shlex.quote(path)} > {shlex.quote(Path(path).name + ".jsonl")}`'
