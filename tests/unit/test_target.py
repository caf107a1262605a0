"""The target's features and cached forwards against transformers' own, document by document, for three families."""

import random

import pytest
import torch

from graphcap.errors import ConfigError
from graphcap.model import identity
from graphcap.model.identity import fingerprint
from graphcap.model.loading import find_mask_token
from graphcap.model.target import KeyValueCache, Target
from tests.toys import HIDDEN, VOCAB, fresh_seed, tiny_model

FAMILIES = ["llama", "qwen3", "gemma3"]
TAPS = (0, 1, 2)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """A target, and transformers' own model with the same weights and its own attention."""
    seed = fresh_seed()
    ours, reference = tiny_model(request.param, seed), tiny_model(request.param, seed)
    reference.set_attn_implementation("eager")
    return Target(ours, TAPS), reference


def reference_features(model, token_ids: list[int]) -> torch.Tensor:
    """Outputs of the tapped layers for one document alone, [S, L·D]; hidden_states[i + 1] is the output of layer i."""
    with torch.no_grad():
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1][0] for i in TAPS], dim=-1)


def packed(documents: list[list[int]], length: int, *, tail: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = [token for document in documents for token in document]
    position = [place for document in documents for place in range(len(document))]
    padding = length - len(ids)
    return (
        torch.tensor(ids + [tail] * padding, dtype=torch.int32),
        torch.tensor(position + [0] * padding, dtype=torch.int32),
    )


def features_of(target: Target, documents: list[list[int]], length: int, *, tail: int = 0) -> torch.Tensor:
    out = torch.full((length, target.num_features), float("nan"))
    target.features(*packed(documents, length, tail=tail), out)
    return out


def random_documents(lengths: list[int]) -> list[list[int]]:
    return [[random.randrange(VOCAB) for _ in range(length)] for length in lengths]


def assert_close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_features_of_a_packed_row_are_those_of_each_document_alone(pair):
    fresh_seed()
    target, reference = pair
    documents = random_documents([21, 1, 40])
    out = features_of(target, documents, 72)
    expected = torch.cat([reference_features(reference, document) for document in documents])
    assert_close(out[:62], expected)
    with pytest.raises(AssertionError):  # must fail: the documents run into one another
        assert_close(out[:62], reference_features(reference, sum(documents, [])))
    documents[2][5] = (documents[2][5] + 1) % VOCAB  # must fail: one token, seen from there on only
    changed = torch.cat([reference_features(reference, document) for document in documents])
    assert_close(out[:27], changed[:27])
    with pytest.raises(AssertionError):
        assert_close(out[:62], changed)


def test_documents_in_another_order_have_the_same_features(pair):
    fresh_seed()
    target, _ = pair
    documents = random_documents([13, 30, 17])
    first, second = features_of(target, documents, 64), features_of(target, documents[::-1], 64)
    assert_close(torch.cat((second[47:60], second[17:47], second[:17])), first[:60])


def test_padding_changes_no_feature_by_a_bit(pair):
    fresh_seed()
    target, _ = pair
    documents = random_documents([13, 30])
    first, second = features_of(target, documents, 64), features_of(target, documents, 64, tail=9)
    assert torch.equal(first[:43], second[:43]) and torch.isfinite(first).all()
    assert not torch.equal(first[43:], second[43:])  # must fail: the tail itself is another


def test_a_window_narrower_than_the_document_is_kept():
    """Gemma 3's sliding layers see 8 tokens: layer 0 of a token depends on the last 8 tokens only."""
    fresh_seed()
    target = Target(tiny_model("gemma3", 1), TAPS)
    (document,) = random_documents([30])
    first = features_of(target, [document], 30)[:, :HIDDEN]
    document[10] = (document[10] + 1) % VOCAB
    differs = (features_of(target, [document], 30)[:, :HIDDEN] != first).any(1)
    assert differs.nonzero()[:, 0].tolist() == list(range(10, 18))


def test_cached_forwards_over_random_pieces_equal_the_whole_forward(pair):
    fresh_seed()
    target, reference = pair
    (document,) = random_documents([40])
    cache, place, logits, features = KeyValueCache(48), 0, [], []
    while place < len(document):
        size = random.randint(1, 6) if place else 11
        target.extend(torch.tensor(random_documents([size])[0]), cache)  # a rejected draft: written, never kept
        piece = document[place : place + size]
        piece_logits, piece_features = target.extend(torch.tensor(piece), cache)
        logits.append(piece_logits)
        features.append(piece_features)
        place += len(piece)
        cache.length = place
    with torch.no_grad():
        expected = reference(torch.tensor([document])).logits[0]
    assert_close(torch.cat(logits), expected)
    assert_close(torch.cat(features), reference_features(reference, document))
    document[20] = (document[20] + 1) % VOCAB  # must fail
    with torch.no_grad(), pytest.raises(AssertionError):
        assert_close(torch.cat(logits), reference(torch.tensor([document])).logits[0])


def test_last_only_gives_the_last_row_of_the_logits(pair):
    fresh_seed()
    target, _ = pair
    ids = torch.tensor(random_documents([9])[0])
    last, _ = target.extend(ids, KeyValueCache(16), last_only=True)
    assert last.shape == (1, VOCAB) and last.dtype == torch.float32
    assert_close(last[0], target.extend(ids, KeyValueCache(16))[0][-1])


def test_a_cache_that_would_overflow_is_refused(pair):
    target, _ = pair
    with pytest.raises(AssertionError, match="cache of 8 tokens got 9"):
        target.extend(torch.zeros(9, dtype=torch.int64), KeyValueCache(8))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layers_above_the_last_tapped_one_do_not_run(family):
    model = tiny_model(family, 1)
    target = Target(model, (0, 2))
    model.get_decoder().layers[3].mlp.down_proj.weight.fill_(float("nan"))
    assert features_of(target, [[1, 2, 3]], 3).isfinite().all()
    assert target.extend(torch.tensor([1, 2, 3]), KeyValueCache(4))[0].isnan().all()


def test_the_embedding_and_head_are_the_models_own(pair):
    target, reference = pair
    ids = torch.tensor([3, 0, VOCAB - 1])
    assert torch.equal(target.embed(ids), reference.get_input_embeddings()(ids))
    assert torch.equal(target.head_VD, reference.get_output_embeddings().weight)
    assert target.num_features == len(TAPS) * HIDDEN


@pytest.mark.parametrize("key", ["final_logit_softcapping", "attn_logit_softcapping"])
def test_a_target_with_softcapping_is_refused_by_name(key):
    with pytest.raises(ConfigError, match=key):
        Target(tiny_model("gemma3", 1, **{key: 30.0}), (0,))


def test_a_wrapped_target_with_softcapping_in_its_text_config_is_refused():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": VOCAB,
        "final_logit_softcapping": 30.0,
    }
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 28,
    }
    config = Gemma3Config(text_config=text, vision_config={**vision, "patch_size": 14}, mm_tokens_per_image=4)
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        Target(Gemma3ForConditionalGeneration(config), (0,))


class Words:
    """A tokenizer as far as `find_mask_token` asks: tokens in angle brackets are added ones, the first has a role."""

    chat_template = "{{ '<chat>' }}"

    def __init__(self, vocabulary: dict[str, int], mask_token: str | None = None) -> None:
        self.vocabulary, self.mask_token = vocabulary, mask_token
        self.added_tokens_decoder = {number: token for token, number in vocabulary.items() if token.startswith("<")}
        self.all_special_tokens = list(self.added_tokens_decoder.values())[:1]

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary


@pytest.mark.parametrize(
    ("tokenizer", "name", "expected"),
    [
        (Words({"a": 0, "b": 1, "<x>": 2}), "<x>", 2),  # the named one
        (Words({"a": 0, "[M]": 1, "<|mask|>": 2}, "[M]"), "", 1),  # the tokenizer's own mask token
        (Words({"a": 0, "<|mask|>": 2}), "", 2),
        (Words({" reserved": 0, "<s>": 1, "<|Reserved_9|>": 3, "<unused_1>": 2}), "", 2),  # the first one kept free; no word
        (Words({"a": 0, "<|mask|>": 7, "b": 1}), "b", 1),
        (Words({" reserved": 0, "b": 4}), "", 5),  # a row behind the vocabulary
        (Words({"<s>": 0, "<file>": 1, "<empty>": 2, "<chat>": 3, " reserved": 7}), "", 2),  # the last added one without a role
    ],
)
def test_the_mask_token_is_the_named_or_an_unused_row(tokenizer, name, expected):
    assert find_mask_token(tokenizer, 8, name=name)[0] == expected


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        (Words({"a": 0, "b": 1}), "<nowhere>"),  # no such token
        (Words({"a": 0, "<x>": 2}), "<x>"),  # a token without a row
        (Words({"a": 0, "b": 1}), ""),  # nothing unused
        (Words({"<s>": 0, " unused": 1}), ""),  # a role, and a word
        (Words({"a": 0, "b": 1, "<|mask|>": 2}), ""),
        (Words({"a": 0, "[MASK]": 1}), ""),  # a word of that name: text may contain it
    ],
)
def test_a_mask_token_without_a_row_of_the_embedding_is_refused(tokenizer, name):
    with pytest.raises(ConfigError, match="mask_token"):
        find_mask_token(tokenizer, 2, name=name)


def test_a_target_whose_logits_are_not_its_head_times_its_hidden_states_is_refused():
    model = tiny_model("llama", 3)
    Target(model, (0,))
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.ones(VOCAB), requires_grad=False)
    with pytest.raises(ConfigError, match="logits that are its last hidden states times its head"):
        Target(model, (0,))


def test_the_fingerprint_is_one_for_every_dtype_and_sees_each_change_of_weights_and_config():
    seed = fresh_seed()
    known = fingerprint(tiny_model("qwen3", seed))
    assert fingerprint(tiny_model("qwen3", seed).bfloat16()) == known
    draw = random.Random(seed)
    for _ in range(20):  # any one element
        model = tiny_model("qwen3", seed)
        parameter = draw.choice(list(model.parameters())).detach().view(-1)
        parameter[draw.randrange(len(parameter))] += 0.5
        assert fingerprint(model) != known
    model = tiny_model("qwen3", seed)
    with torch.no_grad():  # rows that have changed places
        head = model.get_output_embeddings().weight
        head[:2] = head[:2].flip(0).clone()
    assert fingerprint(model) != known
    changes = {"rms_norm_eps": 0.5, "num_attention_heads": 8, "hidden_act": "gelu"}
    changes["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    for name, value in changes.items():  # the same weights, otherwise computed with
        model = tiny_model("qwen3", seed)
        setattr(model.config, name, value)
        assert fingerprint(model) != known, name


def test_the_fingerprints_sums_are_those_of_a_naive_loop(monkeypatch):
    monkeypatch.setattr(identity, "CHUNK", 40)
    torch.manual_seed(fresh_seed())
    tensor = torch.randn(3, 7, 9)
    rows, columns = [0] * 21, [0] * 9
    for row, values in enumerate(tensor.reshape(21, 9).bfloat16().view(torch.int16).tolist()):
        for column, value in enumerate(values):
            rows[row] += value
            columns[column] += value
    assert [sums.tolist() for sums in identity._sums(tensor)] == [rows, columns]
