"""Chat templates → ids and loss mask: what is supervised, and that nothing is guessed.

Oracle: byte-level tokens are joined back to bytes; a token is supervised if and only if its bytes lie wholly in the
byte range of the words and the end-of-turn mark, which the test knows because it wrote the chat.
"""

import random
import secrets

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from graphcap.data.templates import BadConversation, tokenize_conversation
from graphcap.errors import DataError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_BOS = "{{ bos_token }}" + CHATML
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Markers around the whole turn, header and newline included: both must be trimmed.
MARKED_WIDE = (
    "{% for message in messages %}"
    "{% set turn = '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ turn }}{% endgeneration %}"
    "{% else %}{{ turn }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Keeps only the last answer's words, as templates that strip old reasoning do.
REWRITING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'][:1] }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# No special token anywhere near the answer: its first token may swallow the space of the header.
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
CORPUS = ["hello there, how are you? 2+2 is four.\n\nassistant: user: good\n", "héllo 日本 🙂 naïve\n"] * 50


def make_tokenizer(template: str | None, *, prepend_bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE; emoji and CJK split into bytes. With prepend_bos it adds a BOS of its own when asked to."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
    )
    raw.train_from_iterator(CORPUS, trainer)
    if prepend_bos:
        bos = ("<s>", raw.token_to_id("<s>"))
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


# The byte-level alphabet: printable bytes stand for themselves, the others for the characters from 256 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(OTHERS)}


def num_bytes(tokenizer, token_id: int) -> int:
    token = tokenizer.convert_ids_to_tokens(int(token_id))
    return len(token.encode()) if token in tokenizer.added_tokens_encoder else len(bytes(BYTE_OF[c] for c in token))


def naive_mask(tokenizer, token_ids, ranges: list[tuple[int, int]]) -> list[bool]:
    """A token is supervised if all its bytes are in one byte range."""
    mask, at = [], 0
    for token_id in token_ids:
        end = at + num_bytes(tokenizer, token_id)
        mask.append(any(low <= at and end <= high for low, high in ranges))
        at = end
    return mask


def naive_ranges(messages: list[dict], *, header: str, end: str, behind: str, bos: str = "") -> list[tuple[int, int]]:
    """Byte ranges of words + end mark, by writing the chat out by hand. `header` has {role}."""
    at, ranges = len(bos.encode()), []
    for place, message in enumerate(messages):
        start = at + len(header.format(role=message["role"]).encode())
        stop = start + len((message["content"] + end).encode())
        if message["role"] == "assistant" and place and message["content"].strip():
            ranges.append((start, stop))
        at = stop + len(behind.encode())
    return ranges


def random_chat(draw: random.Random) -> list[dict]:
    pieces = ["hello ", "four", "日本", "🙂", "👩‍👩‍👧", "é", "\n", " ", "?", "user: ", "x" * 5, "\t", "2+2 "]
    chat = [{"role": "system", "content": "be good"}] if draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 4)):
        chat.append({"role": "user", "content": "".join(draw.choices(pieces, k=draw.randint(0, 8)))})
        chat.append({"role": "assistant", "content": "".join(draw.choices(pieces, k=draw.randint(0, 8)))})
    return chat


TEMPLATES = {"chatml": CHATML, "chatml with bos": CHATML_BOS, "marked": MARKED, "marked wide": MARKED_WIDE}


@pytest.mark.parametrize("name", TEMPLATES)
def test_mask_is_words_and_end_of_turn_only(name):
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    tokenizer = make_tokenizer(TEMPLATES[name], prepend_bos=True)
    bos = "<s>" if "bos" in name else ""
    for _ in range(60):
        chat = random_chat(draw)
        token_ids, mask = tokenize_conversation(tokenizer, chat)
        assert token_ids.dtype == np.int32 and mask.dtype == np.bool_ and token_ids.shape == mask.shape
        own = tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"]
        assert token_ids.tolist() == own, f"seed {seed}: {chat}"
        ranges = naive_ranges(chat, header="<|im_start|>{role}\n", end="<|im_end|>", behind="\n", bos=bos)
        expected = naive_mask(tokenizer, token_ids, ranges)
        assert mask.tolist() == expected, f"seed {seed}: {chat}"
        assert not mask.all()
        # The twin that must fail: one element changed.
        place = draw.randrange(len(expected))
        expected[place] = not expected[place]
        assert mask.tolist() != expected, f"seed {seed}"


def test_token_that_straddles_the_header_is_not_supervised():
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    tokenizer = make_tokenizer(PLAIN)
    straddled = 0
    for _ in range(60):
        answers = draw.choices(["four", "日本", "hello", "good", "🙂 x"], k=2)
        chat = [
            {"role": role, "content": content}
            for answer in answers
            for role, content in (("user", "hi"), ("assistant", answer))
        ]
        token_ids, mask = tokenize_conversation(tokenizer, chat)
        # Without an end-of-turn mark the blank line is what ends a turn.
        ranges = naive_ranges(chat, header="{role}: ", end="\n\n", behind="")
        assert mask.tolist() == naive_mask(tokenizer, token_ids, ranges), f"seed {seed}: {chat}"
        widened = [(low - 1, high) for low, high in ranges]
        straddled += naive_mask(tokenizer, token_ids, widened) != mask.tolist()
    assert straddled, f"seed {seed}: no token straddled a border, so nothing was tested"


def test_split_emoji_is_supervised_in_all_its_tokens():
    tokenizer = make_tokenizer(CHATML)
    token_ids, mask = tokenize_conversation(
        tokenizer, [{"role": "user", "content": "🙃"}, {"role": "assistant", "content": "🦩語"}]
    )
    assert tokenizer.decode(token_ids[mask]) == "🦩語<|im_end|>"
    assert mask.sum() > 3, "the emoji must be several tokens for this test to say anything"


def test_template_that_rewrites_earlier_turns_is_refused_by_turn():
    tokenizer = make_tokenizer(REWRITING)
    one_answer = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "four"}]
    assert tokenize_conversation(tokenizer, one_answer)[1].any()
    with pytest.raises(BadConversation, match=r"message 2 \(assistant\).*unstable template.*Fix: ") as caught:
        tokenize_conversation(tokenizer, [*one_answer, *one_answer])
    assert isinstance(caught.value, DataError) and caught.value.reason == "chat template rewrites earlier turns"


def test_prompt_that_is_no_prefix_of_the_answer_is_refused():
    broken = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "four"}]
    with pytest.raises(BadConversation, match="prompt before the answer"):
        tokenize_conversation(make_tokenizer(broken), chat)


def test_generation_markers_serve_a_template_that_rewrites():
    words = "{{ message['content'] }}"
    marked = REWRITING.replace(words, "{% generation %}" + words + "{% endgeneration %}")
    tokenizer = make_tokenizer(marked)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "four"}]
    token_ids, mask = tokenize_conversation(tokenizer, [chat[1], *chat])
    assert "four" in tokenizer.decode(token_ids[mask])


def test_no_template_is_an_error():
    with pytest.raises(DataError, match="chat template.*Fix: "):
        tokenize_conversation(make_tokenizer(None), [{"role": "user", "content": "hi"}])


def test_template_that_cannot_be_compiled_is_the_targets_fault_and_no_conversations():
    for broken in ("{% for message in messages %}", "{{ messages | no_such_filter }}"):
        with pytest.raises(
            DataError, match="can be compiled, got Template.*Error at line 1.*Fix: mend chat_template"
        ) as caught:
            tokenize_conversation(make_tokenizer(broken), [{"role": "user", "content": "hi"}])
        assert not isinstance(caught.value, BadConversation)


def test_template_that_raises_says_why():
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('must begin with user') }}{% endif %}" + CHATML
    tokenizer = make_tokenizer(strict)
    chat = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(BadConversation, match="must begin with user") as caught:
        tokenize_conversation(tokenizer, chat)
    assert caught.value.reason == "refused by the chat template"


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_WIDE])
def test_rule_for_odd_turns(template):
    """Opening and empty assistant turns are context; one after a system turn alone and a tool call are not."""
    tokenizer = make_tokenizer(template)
    answer = {"role": "assistant", "content": "four"}

    def supervised(chat: list[dict]) -> str:
        token_ids, mask = tokenize_conversation(tokenizer, chat)
        return tokenizer.decode(token_ids[mask])

    assert supervised([answer]) == ""
    assert supervised([answer, {"role": "user", "content": "?"}, answer]) == "four<|im_end|>"
    assert supervised([{"role": "system", "content": "s"}, answer]) == "four<|im_end|>"
    assert supervised([{"role": "user", "content": "?"}, answer, answer]) == "four<|im_end|>" * 2
    assert supervised([{"role": "user", "content": "?"}, {"role": "assistant", "content": " \n"}]) == ""
    assert supervised([{"role": "user", "content": "?"}]) == ""
    assert supervised([{"role": "user", "content": "?"}, {"role": "tool", "content": "4"}, answer]) == "four<|im_end|>"
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert supervised([{"role": "user", "content": "?"}, call]) == "<|im_end|>"


def test_tokenizer_whose_pieces_differ_from_the_whole():
    """One that puts a space before every text it is given (as SentencePiece does): cuts are found from prefixes."""
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    raw.decoder = decoders.Metaspace(prepend_scheme="always")
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", chat_template=PLAIN)
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good"}] * 2
    token_ids, mask = tokenize_conversation(tokenizer, chat)
    spans = np.split(token_ids, np.flatnonzero(np.diff(mask)) + 1)[1::2]
    tokens = ["".join(tokenizer.convert_ids_to_tokens(span)) for span in spans]
    # The first token of the answer, "▁go…", begins with the header's space: it is not supervised, all others are.
    spelled = tokenizer.convert_ids_to_tokens(tokenizer("good", add_special_tokens=False)["input_ids"])
    assert spelled[0].startswith("▁go") and tokens == ["".join(spelled[1:]) + "\n\n"] * 2
    # The twin: with the space in the answer instead of the header, nothing straddles.
    tokenizer.chat_template = PLAIN.replace("': '", "':'").replace("assistant: ", "assistant:")
    spaced = [message | {"content": " " + message["content"]} for message in chat]
    token_ids, mask = tokenize_conversation(tokenizer, spaced)
    spans = np.split(token_ids, np.flatnonzero(np.diff(mask)) + 1)[1::2]
    assert ["".join(tokenizer.convert_ids_to_tokens(span)) for span in spans] == ["▁good\n\n"] * 2


def test_token_that_straddles_a_cut_behind_one_that_merges_otherwise():
    """As in Llama 2: the prompt ends in the token ':▁', the whole has ':' and '▁go' with the header's space in it."""
    merges = [("g", "o"), ("▁", "go"), ("o", "d"), (":", "▁")]
    letters = sorted(set("user:▁hello\n\nassistant:▁good"))
    tokens = ["<unk>", *letters, *("".join(pair) for pair in merges)]
    raw = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    raw.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", chat_template=PLAIN)
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good"}]
    token_ids, mask = tokenize_conversation(tokenizer, chat)
    assert tokenizer.convert_ids_to_tokens(token_ids)[-5:] == [":", "▁go", "od", "\n", "\n"]
    assert mask.tolist() == [False] * (len(mask) - 3) + [True] * 3


def test_a_marked_template_with_a_clock_is_refused_and_not_taken_for_our_fault():
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    tokenizer = make_tokenizer(marked + "{{ strftime_now('%f') }}")
    chat = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "four"}]
    with pytest.raises(BadConversation, match="the same text each time it writes a chat.*a time"):
        tokenize_conversation(tokenizer, chat)
