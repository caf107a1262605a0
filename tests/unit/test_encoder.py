"""Words encoded once give the tokenizer's own ids, for every pre-tokenizer that is taken to allow it; others take its call.

Oracle: the tokenizer's own call on the whole text. Texts are drawn afresh, with everything that pre-tokenizers treat apart:
apostrophes, digits, runs of spaces and new lines, letters that are no ASCII, combining marks, and added tokens.
"""

import json
import random
import secrets

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from graphcap.data import encoder as encoders
from graphcap.data.encoder import PATTERNS, Encoder, words_are_exact

SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "<|im"]
CORPUS = [
    "don't you've we'll it's 'quoted' words, and more words.\n\nA list:\n- one\n- two  three\t12345 x2y naïve é\n" * 3,
    "camelCase HTTPServer snake_case path/to/file.py http://x.y <|im_x|> DON'T IT'S 日本 текст слово\r\n\r\n   end \n" * 3,
]
MERGED = ["path/to/file.py snake_case " * 40]
PIECES = [
    *(
        "don't",
        "'s",
        "'",
        "it'S",
        "’s",
        "word",
        "Words",
        "x",
        "ZZ",
        "12",
        "2026",
        "_",
        "-",
        "...",
        ". ",
        ", ",
        '"',
        "(",
        ")",
        "/",
    ),
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        " \n ",
        "é",
        "e\u0301",
        "ß",
        "日本",
        "🙂",
        "👩‍👩‍👧",
        "слово",
        "\u00a0",
        "\u2028",
        "\x00",
        "ﬁ",
    ),
    *("<|im_start|>", "<|im_end|>", "<|im_", "<|", "|>", "<think>", "<", ">", "im", "start"),
]


def cutting(name: str):
    if name.startswith("pattern"):
        split = pre_tokenizers.Split(Regex(PATTERNS[int(name[-1])]), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if name == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def make(name: str, *, cut=None, normalizer=None, added=tuple(SPECIAL)) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = cut or cutting(name)
    raw.decoder = decoders.ByteLevel()
    raw.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        CORPUS + MERGED, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    raw.add_special_tokens([one if isinstance(one, AddedToken) else AddedToken(one, normalized=False) for one in added])
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def own(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


NAMES = ["gpt-2", "digits", *(f"pattern {number}" for number in range(len(PATTERNS)))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("composed", [False, True])
def test_words_give_the_tokenizers_own_ids_and_the_bytes_of_every_token(name, composed, monkeypatch):
    monkeypatch.setattr(encoders, "_CHECKED", 0)  # nothing but words
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    tokenizer = make(name, normalizer=normalizers.NFC() if composed else None)
    encoder, placed, words = Encoder(tokenizer), 0, 0
    for _ in range(400):
        text = "".join(draw.choices(PIECES, k=draw.randint(0, 40)))
        ids, ends = encoder.encode(text)
        assert ids.tolist() == own(tokenizer, text), f"seed {seed}: {text!r}"
        words += encoder._words is not None
        if ends is None:
            assert composed, "without a normaliser every text is the bytes of its tokens"
            continue
        placed += 1
        lengths = [len(tokenizer.decode([token]).encode()) for token in ids if "\ufffd" not in tokenizer.decode([token])]
        assert sum(lengths) <= len(text.encode()) == (ends[-1] if len(ends) else 0) and np.all(np.diff(ends) > 0)
        for place in draw.choices(range(len(ids)), k=min(len(ids), 3)):
            head = text.encode()[: ends[place]]
            assert tokenizer.decode(ids[: place + 1]).encode().startswith(head.decode(errors="ignore").encode()), f"seed {seed}"
    assert words == 400 and placed > 100, f"seed {seed}: {words} by words, {placed} placed"


def test_must_fail_words_of_a_pattern_that_goes_on_behind_a_letter(monkeypatch):
    """A pre-tokenizer outside PATTERNS is not taken; if it were, its ids would differ, and the first texts would tell."""
    cut = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\S+|\s+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer = make("", cut=cut)
    encoder = Encoder(tokenizer)
    text = "path/to/file.py snake_case end. "
    assert encoder.encode(text)[0].tolist() == own(tokenizer, text) and encoder._words is None
    monkeypatch.setattr(encoders, "words_are_exact", lambda form: True)
    wrong = Encoder(tokenizer)
    assert wrong._words is None and wrong.encode(text)[0].tolist() == own(tokenizer, text), "checked against its own"
    monkeypatch.setattr(encoders, "_CHECKED", 0)
    assert Encoder(tokenizer).encode(text)[0].tolist() != own(tokenizer, text)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": normalizers.Lowercase()},
        {"cut": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"cut": pre_tokenizers.Metaspace()},
        {"added": [AddedToken("<x>", rstrip=True, normalized=False)]},
        {"added": [AddedToken("foo", single_word=True, normalized=False)]},
        {"added": [AddedToken("<x>", normalized=True)]},
    ],
)
def test_a_tokenizer_that_looks_further_than_a_word_takes_its_own_call(change):
    tokenizer = make("gpt-2", **change)
    assert words_are_exact(json.loads(make("gpt-2")._tokenizer.to_str()))
    assert not words_are_exact(json.loads(tokenizer._tokenizer.to_str()))
    text = "Foo foo <x>  bar It's"
    assert Encoder(tokenizer).encode(text)[0].tolist() == own(tokenizer, text)


def test_words_are_forgotten_when_they_are_too_many(monkeypatch):
    monkeypatch.setattr(encoders, "_MOST_KEPT", 50)
    tokenizer = make("gpt-2")
    encoder = Encoder(tokenizer)
    for number in range(200):
        text = f"the word {'x' * (number % 40)} " + " ".join(f"w{'abcdefghij'[number % 10]}{letter}" for letter in "qrstu")
        assert encoder.encode(text)[0].tolist() == own(tokenizer, text)
        assert len(encoder._words) <= 50 + 20
