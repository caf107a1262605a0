"""A target's folder for the command line: a tiny random model, a byte-level tokenizer with ChatML, and a few chats."""

import functools
import json
from pathlib import Path

from tests.toys import tiny_model

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NUM_ROWS = 288  # rows of the embedding: 256 bytes, a few merges, three special tokens, and some that no token has
WORDS = ["four", "it is so", "日本 🦩", "why not", "a b c d e"]


@functools.cache
def byte_tokenizer():
    """Byte-level BPE with <|im_start|>, <|im_end|> and <|mask|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|mask|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        ["user assistant"] * 9,
        trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False, special_tokens=special),
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", mask_token="<|mask|>", chat_template=CHATML)


def save_target(folder: Path, *, family: str = "llama", seed: int = 1, **changes) -> Path:
    """Write such a target; `changes` are sizes of its config. Returns the folder."""
    tiny_model(family, seed, vocab_size=NUM_ROWS, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_chats(path: Path, *, num_chats: int = 12, words: list[str] = WORDS) -> Path:
    """Write two-turn chats, one a line. Returns the path."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_chats):
            said = [words[(number + turn) % len(words)] for turn in range(2)]
            messages = [
                {"role": role, "content": text}
                for number, words_said in enumerate(said)
                for role, text in (("user", f"say {number}"), ("assistant", words_said))
            ]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    return path


def save_recipe(path: Path, target: Path | str, chats: Path, held_out: Path, *, out: Path) -> Path:
    """Write a recipe of two updates with everything small. Returns the path."""
    sections = {
        "run": {"out": str(out), "device": "cpu"},
        "target": {"path": str(target)},
        "data": {"train": [str(chats)], "held_out": [str(held_out)], "max_length": 128},
        "drafter": {"num_layers": 1, "block_size": 4, "num_tapped_layers": 2},
        "shapes": {"row_length": 128, "max_buckets": 1},
        "optimizer": {"rows_per_update": 1, "max_updates": 2},
        "eval": {"every": 2, "documents": 2, "prompts": 2, "max_new_tokens": 12, "passes": 1, "dtype": "float32"},
        "checkpoint": {"every": 2},
    }
    lines = [
        line for name, keys in sections.items() for line in (f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in keys.items()))
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
