"""What a run tells while it runs: `metrics.jsonl` for programs, one bar or a few plain lines for people.

It also keeps the bars and warnings of libraries off that terminal. Not its job: computing the numbers, moving them off
the device, the flight record, trackers. Called by train, eval and status. Loads no torch; tqdm only to draw a bar.
"""

import json
import logging
import os
import sys
import time
from dataclasses import dataclass
from logging.handlers import MemoryHandler
from pathlib import Path

from graphcap.errors import CheckpointError, DataError
from graphcap.ops import ending
from graphcap.ops.checkpoint import finite, write_text

PLAIN_EVERY_S = 10.0  # without a terminal: seconds between two lines


@dataclass(frozen=True)
class Field:
    """One field of metrics.jsonl. clock: depends on the wall clock, so it may differ between two identical runs."""

    name: str
    kinds: tuple[str, ...]
    unit: str
    since: str
    clock: bool
    line: str


BOTH, TRAIN, EVAL = ("train", "eval"), ("train",), ("eval",)

# The one table of what stands in metrics.jsonl. Additions only: a name keeps its meaning and unit for ever.
FIELDS = (
    Field("kind", BOTH, "", "0.1.0", False, "what the line is of: train (an update) or eval (an evaluation after it)"),
    Field("update", BOTH, "updates", "0.1.0", False, "optimizer updates made, this one included"),
    Field("epoch", TRAIN, "epochs", "0.1.0", False, "pass over the training documents, from 0"),
    Field("loss", BOTH, "nats", "0.1.0", False, "weighted cross-entropy per unit of weight; null: not finite"),
    Field("block_match", BOTH, "tokens", "0.1.0", False, "mean of leading matches + 1; train: drawn anchors, eval: all"),
    Field("match_share", TRAIN, "share", "0.1.0", False, "share of blocks whose slot k matches its label, k = 1..K-1"),
    Field("learning_rate", TRAIN, "", "0.1.0", False, "learning rate of this update"),
    Field("grad_norm", TRAIN, "", "0.1.0", False, "global gradient norm before clipping"),
    Field("anchors", TRAIN, "anchors", "0.1.0", False, "blocks trained in this update, over all ranks"),
    Field("tokens", TRAIN, "tokens", "0.1.0", False, "real tokens in this update's rows, padding not counted"),
    Field("supervised_tokens", TRAIN, "tokens", "0.1.0", False, "tokens of these whose loss mask is set"),
    Field("rows", TRAIN, "rows", "0.1.0", False, "rows of this update, over all ranks"),
    Field("bucket", TRAIN, "", "0.1.0", False, "bucket of this update's last row: tokens/anchors"),
    Field("skipped", TRAIN, "0 or 1", "0.1.0", False, "1: gradients were not finite, weights left alone"),
    Field("empty", TRAIN, "0 or 1", "0.1.0", False, "1: these rows had nothing to learn from, weights left alone"),
    Field("time_s", TRAIN, "s", "0.1.0", True, "seconds since this process began training"),
    Field("tokens_per_s", TRAIN, "tokens/s", "0.1.0", True, "real tokens a second over the updates fetched with this"),
    Field("walked_estimate", EVAL, "tokens", "0.1.0", False, "tokens committed per visit, walking held-out replies"),
    Field("documents", EVAL, "documents", "0.1.0", False, "held-out documents evaluated"),
    Field("eval_s", EVAL, "s", "0.1.0", True, "seconds this evaluation took"),
)
FIELDS_OF = {kind: {field.name for field in FIELDS if kind in field.kinds} for kind in BOTH}
CLOCK_FIELDS = {field.name for field in FIELDS if field.clock}


def without_clock(record: dict) -> dict:
    """The fields of a record that two identical runs share."""
    return {name: value for name, value in record.items() if name not in CLOCK_FIELDS}


def read_metrics(path: Path) -> list[dict]:
    """All records of a metrics.jsonl, also of one that is being written: a last line without its end is left out.

    Raises: DataError naming the first finished line that is no record.
    """
    records = []
    for number, line in enumerate(_whole_lines(Path(path).read_bytes()), start=1):
        record = _record(line)
        if record is None:
            raise DataError(
                "line",
                f"{path}:{number}",
                expected="a record with its update",
                got=repr(line[:60])[1:],
                fix="delete the line, or continue the run, which does that",
            )
        records.append(record)
    return records


class MetricsLog:
    """The metrics.jsonl of a run, written by one process. A context manager.

    Opening ends a file that a kill left in the middle of a line at the end of the line before. What a full disk does not
    take waits in memory and goes first, from the byte on where it broke off, when there is room again.
    refusal: why what was appended last is not all in the file; empty where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab", buffering=0)  # unbuffered: a line is with the kernel when append returns
        self._waiting, self.refusal = bytearray(), ""
        data = self.path.read_bytes()
        if data and not data.endswith(b"\n"):
            self._truncate(data.rfind(b"\n") + 1)

    def cut(self, update: int) -> None:
        """Remove every record of an update after `update`, and whatever is not a record. A kill leaves old or new."""
        lines = _whole_lines(self.path.read_bytes())
        kept = [line for line in lines if (record := _record(line)) is not None and record["update"] <= update]
        if kept == lines[: len(kept)]:
            self._truncate(sum(len(line) for line in kept))
        else:  # something to keep stands after something to remove
            self._file.close()
            write_text(self.path, b"".join(kept).decode())
            self._file = open(self.path, "ab", buffering=0)

    def append(self, record: dict) -> None:
        """Write one record: `kind`, `update` and any other FIELDS of that kind; nan and inf become null.

        A file system that refuses raises nothing here: see `refusal` and `sync`.
        """
        known = FIELDS_OF.get(record.get("kind"))
        assert known, f"a record is of kind {' or '.join(FIELDS_OF)}, not {record.get('kind')!r}"
        assert record.keys() <= known, f"not in FIELDS for {record['kind']}: {sorted(record.keys() - known)}"
        assert type(record.get("update")) is int, f"a record needs its update, a whole number: {record}"
        self._waiting += (json.dumps(finite(record), allow_nan=False) + "\n").encode()
        self._write()

    def _write(self) -> None:
        self.refusal = ""
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            self.refusal = str(error)

    def sync(self) -> None:
        """Return once the disk has what was appended. Raises: CheckpointError where the file system refuses."""
        self._write()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self.refusal = self.refusal or str(error)
        if self.refusal:
            raise CheckpointError(
                "metrics",
                self.path,
                expected="every line up to here written and synced",
                got=self.refusal,
                cause="a checkpoint without its lines would go on without them",
                fix="free space or mend the file's rights",
            )

    def close(self) -> None:
        """Sync and close; a second time does nothing. Raises: as sync."""
        if not self._file.closed:
            try:
                self.sync()
            finally:
                self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._file.fileno(), size_bytes)
        self.sync()


def _whole_lines(data: bytes) -> list[bytes]:
    return [line + b"\n" for line in data.split(b"\n")[:-1]]  # not splitlines: garbage may hold other line ends


def _record(line: bytes) -> dict | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("update")) is int else None


class Progress:
    """The way of a run from update `start` to `total_updates`, for people. A context manager.

    On a terminal one tqdm bar, elsewhere a plain line at most every PLAIN_EVERY_S seconds and one at the end. Leaving
    the `with` block ends the bar's line, so that a traceback starts on a line of its own. A terminal that has gone
    away (closed window, ended multiplexer) ends the drawing, never the run.
    """

    def __init__(self, total_updates: int, *, start: int, stream=None) -> None:
        """stream: where bar and plain lines go; None: standard error."""
        self._stream = sys.stderr if stream is None else stream
        self._total, self._last, self._printed_s, self._pending = total_updates, start, -PLAIN_EVERY_S, ""
        self._bar = _make_bar(total_updates, start, self._stream) if self._stream.isatty() else None

    def update(self, record: dict) -> None:
        """Show a train record of metrics.jsonl; records of other kinds are left to `say`."""
        if record["kind"] != "train":
            return
        steps, self._last = record["update"] - self._last, record["update"]
        text = _in_words(record)
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            while_there(lambda: self._bar.update(steps))
            return
        self._pending = ", ".join(filter(None, (f"update {record['update']}/{self._total}", text)))
        if time.monotonic() - self._printed_s >= PLAIN_EVERY_S:
            self._print_pending()

    def say(self, text: str) -> None:
        """Print `text` as whole lines on standard output, above the bar."""
        if self._bar is not None:
            while_there(lambda: (self._bar.clear(), self._stream.flush()))
        while_there(lambda: print(text, file=sys.stdout, flush=True))
        if self._bar is not None:
            while_there(self._bar.refresh)

    def close(self) -> None:
        """Show the last state and end the bar's line; a second time does nothing."""
        if self._bar is not None:
            while_there(self._bar.close)
            self._bar = None
        self._print_pending()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _print_pending(self) -> None:
        if self._pending:
            text, self._pending, self._printed_s = self._pending, "", time.monotonic()
            while_there(lambda: print(text, file=self._stream, flush=True))


def _make_bar(total_updates: int, start: int, stream):
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no thread of tqdm's in a process that captures graphs
        drawn_columns = 0

        def display(self, msg=None, pos=None) -> bool:
            """After a resize tqdm would blank the old bar's length, which a narrower terminal wraps into a second line."""
            columns = _columns(stream)
            if self.drawn_columns and columns != self.drawn_columns:
                stream.write("\r\x1b[J")
                self.sp = self.status_printer(self.fp)
            self.drawn_columns = columns
            return super().display(msg, pos)

    # A container's terminal may say that it has no columns or rows, and tqdm then draws nothing.
    size = {"dynamic_ncols": True} if _columns(stream) else {"ncols": 100, "nrows": 20}
    return Bar(total=total_updates, initial=start, file=stream, unit=" updates", **size)


def _columns(stream) -> int:
    """Columns of the stream's terminal; 0 if it does not say, or has no rows."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):  # the terminal is gone, or the stream is none
        return 0
    return size.columns if size.lines else 0


def _in_words(record: dict) -> str:
    shown = (("loss", "loss {:.3f}"), ("block_match", "block_match {:.2f}"))
    words = [form.format(record[name]) for name, form in shown if record.get(name) is not None]
    if record.get("tokens_per_s") is not None:
        words.append(f"{record['tokens_per_s']:,.0f} tokens/s")
    if record.get("bucket"):
        words.append(f"bucket {record['bucket']}")
    if shares := [share for share in record.get("match_share") or [] if share is not None]:  # last: a narrow terminal cuts them
        words.append("slots " + " ".join(f"{share:.0%}".rstrip("%") for share in shares[:8]) + " %")
    return ", ".join(words)


def while_there(draw) -> None:
    """Draw or print for people; a terminal that has gone away ends nothing."""
    try:
        draw()
    except (OSError, ValueError):  # the terminal is gone; ValueError: the stream was closed
        pass


LIBRARY_LOGGERS = ("py.warnings", "transformers", "torch", "huggingface_hub")
LIBRARY_ENVIRONMENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_library_log: logging.Handler | None = None


def quiet_libraries(log_path: Path | None) -> None:
    """Send Python warnings and the logs of transformers, torch and huggingface_hub to log_path, not the terminal.

    None: hold them in memory until a later call names the file, so that nothing is written before a run may begin.
    Call it before these are imported (their variables are set where the user set none) and once more after: torch and
    transformers give their loggers a terminal of their own while they are imported. Calling it again is harmless.
    """
    global _library_log
    for name, value in LIBRARY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    held = _library_log
    if log_path is not None and not (isinstance(held, logging.FileHandler) and held.baseFilename == os.path.abspath(log_path)):
        _library_log = logging.FileHandler(log_path, encoding="utf-8", delay=True)  # delay: no file while there is no word
        _library_log.setFormatter(_Hiding("%(asctime)s %(name)s %(levelname)s %(message)s"))
    elif held is None:
        _library_log = MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    if held is not None and held is not _library_log:
        if isinstance(held, MemoryHandler):
            held.setTarget(_library_log)
            held.flush()
        for name in LIBRARY_LOGGERS:
            logging.getLogger(name).removeHandler(held)
        held.close()
    logging.captureWarnings(True)
    _attach(_library_log)


class _Hiding(logging.Formatter):
    """A format without the values of variables that look like secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return ending.hidden(super().format(record))


def _attach(handler: logging.Handler) -> None:
    for name in LIBRARY_LOGGERS:
        for child in [child for child in logging.root.manager.loggerDict if child.startswith(name + ".")]:
            _take_off_the_terminal(logging.getLogger(child))  # torch gives one to each of its parts
        logger = logging.getLogger(name)
        _take_off_the_terminal(logger)
        logger.addHandler(handler)
        logger.propagate = False


def _take_off_the_terminal(logger: logging.Logger) -> None:
    for handler in [handler for handler in logger.handlers if handler is not _library_log and not _writes_a_file(handler)]:
        logger.removeHandler(handler)
        logger.propagate = True


def _writes_a_file(handler: logging.Handler) -> bool:
    return isinstance(handler, (logging.FileHandler, MemoryHandler))


def silence_transformers() -> None:
    """Call after importing transformers: it draws no bars, and only errors speak where nothing takes its warnings."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if _library_log is None:
        transformers_logging.set_verbosity_error()
    else:  # "some weights were not initialised" is a warning that belongs in the run's log
        _attach(_library_log)
        transformers_logging.set_verbosity_warning()
