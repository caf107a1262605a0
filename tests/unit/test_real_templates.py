"""A dozen chat templates as model families publish them (tests/unit/templates): what is supervised is the assistant's words.

Oracle: the test wrote the chat, so it knows the words of every turn and the mark that the family ends a turn with. Words
are drawn afresh, with emoji, CJK, combining marks and joined characters that the byte-level tokenizer splits.
"""

import functools
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from graphcap.data.templates import BadConversation, tokenize_conversation
from tests.toys import fresh_seed

TEMPLATES = Path(__file__).parent / "templates"
TINY = Path(__file__).parents[2] / "graphcap" / "assets" / "tiny"
PIECES = [
    "hello",
    " there",
    "日本語",
    "🦩",
    "👩‍👩‍👧",
    "e\u0301",
    "नमस्ते",
    "ก็",
    " ",
    "\n",
    "?",
    "2+2",
    "'s",
    "\u200b",
    "<think",
    "x" * 7,
]
CORPUS = ["hello there, 2+2 is four. user assistant model\n\n", "héllo 日本 🙂 naïve's\n"] * 40


@dataclass(frozen=True)
class Family:
    """What a family's template and tokenizer do. words: what it prints of the words. before: what the target writes first."""

    template: str
    end: str
    special: tuple[str, ...]
    bos: str = ""
    eos: str = ""
    words: object = staticmethod(lambda text: text)
    before: str = ""
    system: bool = True
    swallows: bool = False  # special tokens take the white space behind them, as Phi's do


CHATML = {"end": "<|im_end|>", "special": ("<|im_start|>", "<|im_end|>"), "eos": "<|im_end|>"}
DEEPSEEK = {
    "end": "<｜end▁of▁sentence｜>",
    "special": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
}
FAMILIES = {
    "chatml": Family("chatml", **CHATML),
    "chatml with a system prompt": Family("chatml_default_system", **CHATML),
    "llama 3": Family(
        "llama3",
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        words=str.strip,
    ),
    "qwen 3": Family("qwen3", **CHATML),
    "qwen 2.5 with tools": Family("qwen25_tools", **CHATML),
    "gemma": Family(
        "gemma",
        "<end_of_turn>",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        words=str.strip,
        system=False,
    ),
    "mistral": Family(
        "mistral",
        "</s>",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        bos="<s>",
        eos="</s>",
        words=str.strip,
        before=" ",
        system=False,
    ),
    "phi 3": Family(
        "phi3",
        "<|end|>",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        eos="<|end|>",
        words=str.lstrip,
        swallows=True,
    ),
    "smollm 3 with markers": Family("smollm3_marked", **CHATML),
    "deepseek v3": Family("deepseek_v3", **DEEPSEEK),
}


@functools.cache
def tokenizer_of(template: str, special: tuple[str, ...], bos: str, eos: str, swallows: bool) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the family's special tokens. With a BOS it also puts one before a text when asked to."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens = [AddedToken(token, rstrip=swallows, normalized=False, special=True) for token in special]
    raw.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False, special_tokens=tokens)
    )
    if bos:
        raw.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, raw.token_to_id(bos))])
    named = {"bos_token": bos} if bos else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos, **named)
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer


def tokenizer_for(family: Family) -> PreTrainedTokenizerFast:
    return tokenizer_of(family.template, family.special, family.bos, family.eos, family.swallows)


def supervised(tokenizer, messages: list[dict]) -> list[str]:
    """The decoded text of each supervised run of tokens; the ids must be the tokenizer's own."""
    token_ids, mask = tokenize_conversation(tokenizer, messages)
    assert token_ids.tolist() == tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    runs = np.split(np.arange(len(mask)), np.flatnonzero(np.diff(mask)) + 1)
    return [tokenizer.decode(token_ids[run], clean_up_tokenization_spaces=False) for run in runs if mask[run[0]]]


def random_words(draw: random.Random) -> str:
    """Not blank, and without a new line first: that one a token may share with the header (see test_templates.py)."""
    words = ""
    while not words.strip():
        words = "".join(draw.choices(PIECES, k=draw.randint(1, 9))).lstrip("\n")
    return words


def random_chat(draw: random.Random, turns: int, *, system: bool) -> list[dict]:
    chat = [{"role": "system", "content": random_words(draw)}] if system and draw.random() < 0.5 else []
    for _ in range(turns):
        chat.append({"role": "user", "content": random_words(draw)})
        chat.append({"role": "assistant", "content": random_words(draw)})
    return chat


def answer(words: str, **more) -> dict:
    return {"role": "assistant", "content": words, **more}


ASK = {"role": "user", "content": "2+2?"}


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_supervised_are_the_assistants_words_and_the_end_of_turn(name, turns):
    draw = random.Random(fresh_seed())
    family = FAMILIES[name]
    tokenizer = tokenizer_for(family)
    for _ in range(15):
        chat = random_chat(draw, turns, system=family.system)
        spoken = [message["content"] for message in chat if message["role"] == "assistant"]
        expected = [family.before + family.words(words) + family.end for words in spoken]
        assert supervised(tokenizer, chat) == expected, chat
        chat[-1] = answer(spoken[-1] + "!")  # must fail: one character more
        assert supervised(tokenizer, chat) != expected
    token_ids, mask = tokenize_conversation(tokenizer, [ASK, answer("🦩")])
    assert mask.sum() > 2, "the emoji must be several tokens for this test to say anything"


def test_the_tiny_targets_own_tokenizer_and_template():
    draw = random.Random(fresh_seed())
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    for turns in (1, 3):
        words = [["hello there", "four 2", "is it so?"][draw.randrange(3)] for _ in range(turns)]
        chat = [message for text in words for message in (ASK, answer(text))]
        assert supervised(tokenizer, chat) == [f"{text}<|im_end|>" for text in words]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.bos])
def test_one_bos_where_the_template_prints_it_and_the_tokenizer_adds_it_too(name):
    family = FAMILIES[name]
    tokenizer = tokenizer_for(family)
    token_ids, _ = tokenize_conversation(tokenizer, [ASK, answer("four")])
    assert token_ids[0] == tokenizer.bos_token_id and token_ids.tolist().count(tokenizer.bos_token_id) == 1
    rendered = tokenizer.apply_chat_template([ASK, answer("four")], tokenize=False)
    assert tokenizer(rendered)["input_ids"].count(tokenizer.bos_token_id) == 2  # must fail: the common mistake


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_a_system_turn_that_the_template_refuses_is_named(name):
    with pytest.raises(BadConversation, match="roles? (not supported|must alternate)|System role"):
        tokenize_conversation(tokenizer_for(FAMILIES[name]), [{"role": "system", "content": "s"}, ASK, answer("four")])


def test_tool_calls_are_the_assistants_words_and_tool_results_are_not():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "日"}}}
    chat = [ASK, answer("", tool_calls=[call]), {"role": "tool", "content": "4"}, answer("It is 4 🦩.")]
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "日"}}\n</tool_call>'
    expected = [written + "<|im_end|>", "It is 4 🦩.<|im_end|>"]
    assert supervised(tokenizer_for(FAMILIES["qwen 2.5 with tools"]), chat) == expected
    # Qwen 3 puts an empty <think></think> before the last answer and, while it is the last, before the call.
    assert supervised(tokenizer_for(FAMILIES["qwen 3"]), chat) == expected
    assert supervised(tokenizer_for(FAMILIES["qwen 3"]), chat[:2]) == expected[:1]


def test_qwen_3_writes_the_empty_block_of_the_last_answer_and_the_assistant_its_own_reasoning():
    tokenizer = tokenizer_for(FAMILIES["qwen 3"])
    chat = [ASK, answer("four"), ASK, answer("五")]
    token_ids, mask = tokenize_conversation(tokenizer, chat)
    whole, learned = tokenizer.decode(token_ids), tokenizer.decode(token_ids[mask])
    assert whole.count("<think>\n\n</think>\n\n") == 1 and "think" not in learned
    # Reasoning after the last question stays in the text, as a field or as part of the words, and is learned.
    reasoned = "<think>\nadd them\n</think>\n\n五<|im_end|>"
    assert supervised(tokenizer, [*chat[:3], answer("五", reasoning_content="add them")]) == ["four<|im_end|>", reasoned]
    assert supervised(tokenizer, [*chat[:3], answer("<think>\nadd them\n</think>\n\n五")]) == ["four<|im_end|>", reasoned]


@pytest.mark.parametrize("first", [answer("four", reasoning_content="add them"), answer("<think>\nadd them\n</think>\n\nfour")])
def test_qwen_3_with_reasoning_in_an_earlier_answer_is_refused_with_what_to_do(first):
    tokenizer = tokenizer_for(FAMILIES["qwen 3"])
    with pytest.raises(BadConversation, match=r"message 2 \(assistant\).*unstable template.*Fix: .*reasoning.*all answers but"):
        tokenize_conversation(tokenizer, [ASK, first, ASK, answer("五")])
    assert supervised(tokenizer, [ASK, first]) == ["<think>\nadd them\n</think>\n\nfour<|im_end|>"]  # what the fix says


@pytest.mark.parametrize(
    ("template", "chat", "words"),
    [
        # The server asks with <think>, and neither answer begins with it: the prompt is not what stands in the chat.
        ("deepseek_r1", [ASK, answer("four")], "the prompt before the answer"),
        ("qwen3_thinking", [ASK, answer("four"), ASK, answer("五")], "the chat up to the answer"),
    ],
)
def test_a_template_that_rewrites_earlier_turns_is_refused(template, chat, words):
    family = Family(template, **(DEEPSEEK if "deepseek" in template else CHATML))
    with pytest.raises(BadConversation, match=f"message 2.*{words}.*Fix: ") as caught:
        tokenize_conversation(tokenizer_for(family), chat)
    assert caught.value.reason == "chat template rewrites earlier turns"


def test_a_server_that_asks_with_an_open_block_supplies_it():
    """Qwen 3's thinking models: <think> is in the prompt, an empty block is the template's, reasoning is learned."""
    tokenizer = tokenizer_for(Family("qwen3_thinking", **CHATML))
    assert supervised(tokenizer, [ASK, answer("four")]) == ["four<|im_end|>"]
    reasoned = answer("four", reasoning_content="add them")
    assert supervised(tokenizer, [ASK, reasoned]) == ["add them\n</think>\n\nfour<|im_end|>"]
