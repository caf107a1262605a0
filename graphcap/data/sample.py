"""A document as text with the supervised spans marked, for people to look at before they train. Reads no files.

Called by preview.py (train --dry-run --show); `harmless` also by ops/report.py.
"""

import unicodedata
from itertools import pairwise

import numpy as np

from graphcap.data.conversations import Document

PLAIN_MARKS = ("⟦", "⟧")
TERMINAL_MARKS = ("\x1b[7m", "\x1b[27m")  # reverse video, and back


def supervised_text(document: Document, tokenizer, *, marks: tuple[str, str]) -> str:
    """The document's text, special tokens included, with each supervised span between the two marks.

    marks: PLAIN_MARKS or TERMINAL_MARKS. Data cannot steer the terminal: see `harmless`.
    A character whose tokens are only in part supervised shows as U+FFFD.
    """
    ids, mask = document.token_ids, document.loss_mask
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    pieces = [_decode(tokenizer, ids[start:end]) for start, end in pairwise(borders)]
    prefixes = [_decode(tokenizer, ids[:end]) for end in borders]
    whole = prefixes[-1]
    if "".join(pieces) != whole and all(whole.startswith(prefix) for prefix in prefixes):
        # Tokenizers that put a space before a text take one away again where a piece is decoded alone.
        pieces = [whole[len(before) : len(after)] for before, after in pairwise(prefixes)]
    texts = [harmless(piece) for piece in pieces]
    return "".join(f"{marks[0]}{text}{marks[1]}" if mask[start] else text for start, text in zip(borders, texts, strict=False))


def _decode(tokenizer, ids: np.ndarray) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def harmless(text: str) -> str:
    """The text with all that could steer a terminal or turn the direction of writing written out (`\\x1b`, `\\u202e`).

    New lines, tabs, and the two joiners, which make one picture or letter of several, stay.
    """
    return "".join(
        c.encode("unicode_escape").decode()
        if c not in "\n\t\u200c\u200d" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else c
        for c in text
    )
