"""Text → token ids, faster than the tokenizer's own call and equal to it; and the byte at which each token ends.

Two things make it fast, both only where they are exact, which is read from the tokenizer itself:

* Words are encoded once. A byte-level BPE first cuts its text into pieces that never see each other. Each of PATTERNS
  ends a piece behind an ASCII letter if what follows is ASCII and neither a letter nor an apostrophe: every alternative
  with a letter in it goes on with letters (or an apostrophe) alone. So a text is the ids of such words end to end, and
  the tokenizer's added tokens, which it takes out of a text before anything else.
* Bytes say where a token lies. If the bytes of all tokens, end to end, are those of the text, each token's place is
  known, and no part of the text has to be encoded again to find it.

Any other tokenizer, and any text that a tokenizer changes, takes the tokenizer's own call. Called by templates.py.
"""

import json
import re

import numpy as np

# What Split of these families' tokenizer.json cuts by; GPT-2's own is built into ByteLevel.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
PATTERNS = (
    # Llama 3; Qwen 2, 2.5 and 3; Qwen 3.5
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    # o200k of gpt-oss
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
)
_WORD = re.compile("[^A-Za-z]*+[A-Za-z]*+(?:['\x80-\U0010ffff][^A-Za-z]*+[A-Za-z]*+)*+")
_JOINED = re.compile("[\x00-&(-@\\[-`{-\x7f]")  # a word that begins so may stand behind any word that ends in a letter
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_LONGEST_KEPT = 32  # characters of a word that may come again
_MOST_KEPT = 200_000  # words; about 40 MB
_CHECKED = 32  # texts whose ids are compared with the tokenizer's own


class Encoder:
    """The ids that `tokenizer(text, add_special_tokens=False)` gives, and their places. Keeps the words it has seen."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self._form: dict | None = None  # tokenizer.json; empty where the tokenizer is none of the library tokenizers
        self._pieces: list[bytes] = []  # the bytes of each token
        self._lengths = np.zeros(0, np.int64)  # of these
        self._added: re.Pattern | None = None
        self._words: dict[str, bytes] | None = None  # int32 ids of words seen; None: words are not exact here
        self._unplaced: set[str] = set()  # words whose tokens have other bytes
        self._left_to_check = _CHECKED

    @property
    def known(self) -> bool:
        """Whether a chat's ids are those of its rendered text: true of a tokenizer whose calls are transformers' own."""
        self._look()
        return bool(self._form)

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Token ids (int32 [n]) of a text, nothing put before or behind it, and the byte of the text behind each token.

        ends: int64 [n]; None where the tokens' bytes are not those of the text.
        """
        self._look()
        if self._words is None:
            return self._by_call(text)
        ids, ends = self._by_words(text)
        if self._left_to_check:
            self._left_to_check -= 1
            own = self._by_call(text)
            if ids.tolist() != own[0].tolist():
                self._words = None
                return own
        return ids, ends

    def _by_call(self, text: str) -> tuple[np.ndarray, np.ndarray | None]:
        ids = self._tokenizer([text], add_special_tokens=False, return_attention_mask=False)["input_ids"][0]
        return np.array(ids, np.int32), self._ends(ids, text)

    def _ends(self, ids: list[int], text: str) -> np.ndarray | None:
        if self._pieces and b"".join([self._pieces[token] for token in ids]) == text.encode():
            return np.cumsum(self._lengths[ids])
        return None

    def _by_words(self, text: str) -> tuple[np.ndarray, np.ndarray | None]:
        words = []
        for number, part in enumerate(self._added.split(text) if self._added else (text,)):
            if number % 2:
                words.append(part)
            else:
                words += _WORD.findall(part)
        known = self._words
        parts = list(map(known.get, words))
        if None in parts:
            new = [place for place, part in enumerate(parts) if part is None]
            found = self._encoded({words[place] for place in new})
            for place in new:
                parts[place] = found[words[place]]
            if len(known) > _MOST_KEPT:
                known.clear()
            known.update((word, ids) for word, ids in found.items() if len(word) <= _LONGEST_KEPT)
        ids = np.frombuffer(b"".join(parts), np.int32)
        placed = not self._unplaced or self._unplaced.isdisjoint(words)
        return ids, np.cumsum(self._lengths[ids]) if placed else None

    def _encoded(self, words: set[str]) -> dict[str, bytes]:
        """The int32 ids of new words: of most in one text, since to call the tokenizer for each takes three times as long."""
        joined = [word for word in words if _JOINED.match(word) and word[-1] in _LETTERS]
        text = "".join(joined)
        encode, found = self._tokenizer._tokenizer.encode_batch_fast, {}
        if joined and not (self._added and self._added.search(text)):
            ids = encode([text], add_special_tokens=False)[0].ids
            ends, borders = self._ends(ids, text), np.cumsum([len(word.encode()) for word in joined])
            if ends is not None and np.isin(borders, ends).all():
                behind = np.searchsorted(ends, borders) + 1
                packed, places = np.array(ids, np.int32).tobytes(), [0, *(4 * behind).tolist()]
                found = {word: packed[start:end] for word, start, end in zip(joined, places, places[1:])}
        alone = [word for word in words if word not in found]
        for word, encoding in zip(alone, encode(alone, add_special_tokens=False) if alone else ()):
            found[word] = np.array(encoding.ids, np.int32).tobytes()
            if self._ends(encoding.ids, word) is None:
                self._unplaced.add(word)
        return found

    def _look(self) -> None:
        """Read from the tokenizer, once, what is exact for it."""
        if self._form is not None:
            return
        self._form = tokenizer_form(self._tokenizer)
        if not self._form:
            return
        added = {token["id"]: token["content"] for token in self._form["added_tokens"]}
        self._pieces = _pieces(self._tokenizer._tokenizer, added, byte_level="ByteLevel" in _kinds(self._form))
        self._lengths = np.array([len(piece) for piece in self._pieces], np.int64)
        if words_are_exact(self._form):
            contents = sorted(filter(None, added.values()), key=len, reverse=True)  # the longest at a place is taken
            self._added = re.compile(f"({'|'.join(map(re.escape, contents))})") if contents else None
            self._words = {}


def _pieces(backend, added: dict[int, str], *, byte_level: bool) -> list[bytes]:
    """The bytes of every token by its id; a byte that no text has where they are not known."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces = [b"\xff"] * (max(vocabulary.values(), default=-1) + 1)
    for text, token in vocabulary.items():
        if token in added:
            pieces[token] = added[token].encode()
        elif byte_level:
            pieces[token] = bytes([_BYTE_OF.get(character, 255) for character in text])
        elif re.fullmatch("<0x[0-9A-F]{2}>", text):
            pieces[token] = bytes([int(text[3:5], 16)])
        else:
            pieces[token] = text.replace("\u2581", " ").encode(errors="replace")
    return pieces


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes printable bytes as themselves, the others as the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def tokenizer_form(tokenizer) -> dict:
    """The tokenizer as its tokenizer.json says it; empty for one whose calls are not transformers' own."""
    if getattr(tokenizer, "_tokenizer", None) is None:
        return {}
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind, names = type(tokenizer), ("__call__", "apply_chat_template")
    own = all(getattr(kind, name) is getattr(PreTrainedTokenizerBase, name) for name in names)
    if not own or getattr(kind, "_encode_plus", None) is not PreTrainedTokenizerFast._encode_plus:
        return {}
    if tokenizer.split_special_tokens or tokenizer._tokenizer.encode_special_tokens:
        return {}
    return json.loads(tokenizer._tokenizer.to_str())


def words_are_exact(form: dict) -> bool:
    """Whether a text's ids are those of its words (_WORD) and added tokens, one after the other."""
    model, normalizer = form["model"], form["normalizer"]
    plain_added = all(
        not any(token[flag] for flag in ("lstrip", "rstrip", "single_word", "normalized")) for token in form["added_tokens"]
    )
    composed = normalizer is None or normalizer["type"] == "NFC"  # a letter composes with nothing ASCII behind it
    whole = form["truncation"] is None and form["padding"] is None
    merged = model["type"] == "BPE" and not model.get("dropout") and not model.get("continuing_subword_prefix")
    return whole and plain_added and composed and merged and not model.get("end_of_word_suffix") and _cuts(form)


def _cuts(form: dict) -> bool:
    """Whether the pre-tokenizer is one of those that cut as this file says."""
    first = form["pre_tokenizer"] or {"type": ""}
    steps = first["pretokenizers"] if first["type"] == "Sequence" else [first]
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return False
    cut = steps[-1]["use_regex"]
    for step in steps[:-1]:
        if step["type"] == "Split":
            known = step["pattern"].get("Regex") in PATTERNS and step["behavior"] == "Isolated" and not step["invert"]
            if not known:
                return False
            cut = True
        elif step["type"] != "Digits":  # which cuts more, never less
            return False
    return cut


def _kinds(form: dict) -> set[str]:
    """The types of the pre-tokenizer's and the decoder's steps."""
    steps = [form["pre_tokenizer"] or {}, form["decoder"] or {}]
    steps += [*steps[0].get("pretokenizers", []), *steps[1].get("decoders", [])]
    return {step.get("type", "") for step in steps}
