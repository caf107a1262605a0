"""Cases 1 and 2: rows with nothing to learn from, and one BOS. Inputs that failed elsewhere, with the right outcome."""

import json
from collections import Counter

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from graphcap.data import load_documents, read_conversations, tokenize_conversation
from graphcap.errors import DataError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROWS = [
    '{"messages":[]}',
    '{"messages":[{"role":"assistant","content":"orphan"}]}',
    '{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":""}]}',
    json.dumps({"messages": [{"role": "user", "content": "x " * 300}, {"role": "assistant", "content": "ok"}]}),
    '{"messages":[{"role":"user","content":"2+2?"},{"role":"assistant","content":"four"}]}',
    '{"messages":[{"role":"user","content":"broken"',
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that prepends a BOS when special tokens are asked for."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
    )
    raw.train_from_iterator(["user assistant four x x x"] * 20, trainer)
    bos = ("<s>", raw.token_to_id("<s>"))
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="<|im_end|>", chat_template=CHATML)


def load(path, tokenizer, on_bad_line: str):
    return load_documents([path], tokenizer, max_length=64, on_long="truncate", on_bad_line=on_bad_line)


def test_case_1_only_the_row_with_an_answer_is_kept_and_every_other_is_counted(tmp_path, tokenizer):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(ROWS) + "\n")
    documents = load(path, tokenizer, "skip")
    assert [one.line for one in documents.documents] == [5]
    kept = documents.documents[0]
    assert tokenizer.decode(kept.token_ids[kept.loss_mask]) == "four<|im_end|>"
    # The one rule for rows 2 and 3: no server could have been asked for row 2, and nothing was said in row 3.
    assert documents.summary() == (
        "6 conversations: 1 kept, 5 dropped (2 no supervised token, first bad.jsonl line 2; "
        "1 broken JSON, first bad.jsonl line 6; 1 messages empty or no list, first bad.jsonl line 1; "
        "1 no supervised token after truncation, first bad.jsonl line 4); messages in bad.jsonl"
    )
    assert documents.num_read == len(ROWS)


def test_case_1_rows_1_and_6_are_rejected_by_line(tmp_path, tokenizer):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(ROWS))
    with pytest.raises(DataError, match=r"bad\.jsonl line 1'.*an empty list"):
        load(path, tokenizer, "error")
    path.write_text("\n".join(["", *ROWS[1:]]))
    with pytest.raises(DataError, match=r"bad\.jsonl line 6'.*JSON"):
        list(read_conversations([path], on_bad_line="error", dropped=Counter()))


def test_case_1_nothing_to_learn_from_ends_before_training(tmp_path, tokenizer):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(ROWS[:4]))
    with pytest.raises(DataError, match="0 supervised tokens.*max_length") as caught:
        load(path, tokenizer, "skip")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("prints_bos", [True, False])
def test_case_2_the_ids_are_the_tokenizers_own_with_no_second_bos(tokenizer, prints_bos):
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]
    tokenizer.chat_template = "{{ bos_token }}" * prints_bos + CHATML
    token_ids, mask = tokenize_conversation(tokenizer, chat)
    own = tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"]
    assert token_ids.tolist() == own
    # What a server feeds: the BOS is the template's affair, so one that prints none has none.
    assert token_ids.tolist().count(tokenizer.bos_token_id) == prints_bos
    assert (token_ids[0] == tokenizer.bos_token_id) == prints_bos and token_ids[1] != tokenizer.bos_token_id
    assert token_ids.tolist().count(tokenizer.eos_token_id) == 2, "one end of turn for each message"
    assert tokenizer.decode(token_ids[mask]) == "four<|im_end|>"
    # The way it fails: rendering first and letting the tokenizer add its own.
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert tokenizer(rendered)["input_ids"] != own
