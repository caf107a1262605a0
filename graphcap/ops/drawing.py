"""A histogram of document lengths with the buckets drawn in: in a terminal with block characters, and as a picture.

Knows numbers only. Called by shapes.py.
"""

import importlib.util
import io
from pathlib import Path

import numpy as np

from graphcap.errors import ConfigError
from graphcap.ops.checkpoint import write_bytes

EIGHTHS = " ▏▎▍▌▋▊▉█"
PICTURES = (".png", ".svg", ".pdf")


def edges(longest: int) -> np.ndarray:
    """int64 [bins + 1], borders of the bins: 0, then half an octave apart from 64 on, until `longest` is in one."""
    steps = [64]
    while steps[-1] < longest:
        steps.append(round(64 * 2 ** (len(steps) / 2)))
    return np.array([0, *steps], dtype=np.int64)


def histogram(lengths: np.ndarray, marks: dict[int, list[str]], *, width: int) -> list[str]:
    """Lines for a terminal: documents by length, and at each bucket's length a line with its text.

    lengths: int [n], tokens. marks: text lines by bucket length. width: columns.
    """
    borders = edges(max(int(lengths.max()), max(marks, default=1)))
    counts = _closed_above(lengths, borders)
    label = max(len(f"{border:,}") for border in borders) * 2 + 1
    room = max(8, width - label - 2 - max(len(f"{count:,}") for count in counts) - 1)
    lines, waiting = [], sorted(marks)
    for low, high, count in zip(borders[:-1].tolist(), borders[1:].tolist(), counts.tolist(), strict=True):
        lines.append(f"{f'{low:,}-{high:,}':>{label}}  {bar(count / max(1, counts.max()), room)} {count:,}")
        while waiting and waiting[0] <= high:
            lines += [f"{'':>{label}} ┄{text}" for text in marks[waiting.pop(0)]]
    return lines


def bar(share: float, width: int) -> str:
    """A bar of so many columns at a share of 1, in eighths of a column; a share above 0 is never empty."""
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def check_picture(path: str | Path) -> None:
    """Raises: ConfigError if `picture` could not draw such a file: matplotlib is missing, or the name ends otherwise."""
    if importlib.util.find_spec("matplotlib") is None:
        fix = "pip install matplotlib (graphcap's extra `plot`), or leave --picture out"
        raise ConfigError("picture", path, expected="matplotlib", got="no such module", fix=fix)
    if Path(path).suffix not in PICTURES:
        got = f"'{Path(path).suffix}'" if Path(path).suffix else "no ending"
        raise ConfigError("picture", path, expected=f"a name ending in {', '.join(PICTURES)}", got=got, fix="give another name")


def picture(path: str | Path, lengths: np.ndarray, marks: dict[int, list[str]]) -> None:
    """The same as an image file, whole or not at all, if `check_picture` takes its path. Raises: OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    borders = edges(max(int(lengths.max()), max(marks, default=1)))
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.bar(
        np.maximum(borders[:-1], 45), _closed_above(lengths, borders), np.diff(np.maximum(borders, 45)), align="edge", ec="w"
    )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of a document")
    axes.set_ylabel("documents")
    top = axes.get_ylim()[1]
    for place, (length, texts) in enumerate(sorted(marks.items())):
        axes.axvline(length, color="C3", lw=1)
        axes.text(length, top * (0.98 - 0.07 * (place % 6)), "\n".join(texts), ha="right", va="top", fontsize=7, color="C3")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=Path(path).suffix[1:])
    write_bytes(Path(path), drawn.getvalue())


def _closed_above(lengths: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """Documents of each bin (low, high]: int64 [bins]."""
    return np.bincount(np.searchsorted(borders, lengths, side="left") - 1, minlength=len(borders) - 1)
