"""A document as text with the supervised spans marked, for people to look at before they train. Reads no files.

Called by train --dry-run --show.
"""

from itertools import pairwise

import numpy as np

from graphcap.data.conversations import Document

PLAIN_MARKS = ("⟦", "⟧")
TERMINAL_MARKS = ("\x1b[7m", "\x1b[27m")  # reverse video, and back


def supervised_text(document: Document, tokenizer, *, marks: tuple[str, str]) -> str:
    """The document's text, special tokens included, with each supervised span between the two marks.

    marks: PLAIN_MARKS or TERMINAL_MARKS. Control characters of the text are spelled out (`\\x1b`), new lines and tabs
    apart, so data cannot steer the terminal. A character whose tokens are only in part supervised shows as U+FFFD.
    """
    ids, mask = document.token_ids, document.loss_mask
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    pieces = [_decode(tokenizer, ids[start:end]) for start, end in pairwise(borders)]
    prefixes = [_decode(tokenizer, ids[:end]) for end in borders]
    whole = prefixes[-1]
    if "".join(pieces) != whole and all(whole.startswith(prefix) for prefix in prefixes):
        # Tokenizers that put a space before a text take one away again where a piece is decoded alone.
        pieces = [whole[len(before) : len(after)] for before, after in pairwise(prefixes)]
    texts = [_visible(piece) for piece in pieces]
    return "".join(f"{marks[0]}{text}{marks[1]}" if mask[start] else text for start, text in zip(borders, texts, strict=False))


def _decode(tokenizer, ids: np.ndarray) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _visible(text: str) -> str:
    # C0, DEL and C1, and the marks that turn the direction of writing; other unprintables are harmless to a terminal.
    return "".join(
        repr(c)[1:-1]
        if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or c in "\u202a\u202b\u202d\u202e\u2066\u2067"
        else c
        for c in text
    )
