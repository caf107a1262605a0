"""Make graphcap/assets/tiny: a tiny, really trained language model and conversations that it wrote itself.

The first-run demo needs a target to draft for: small enough to sit in the repository, deep and narrow so that one
verification costs many times one draft, and confident, so that its greedy text can be foreseen. This script

1. reads the documentation of the running Python (docstrings of the standard library, the help topics of pydoc) and
   turns it into short chat documents; none of that text is copied into the repository,
2. trains a byte-level BPE tokenizer and a Qwen3 model of 12 layers on them, until it knows them almost by heart,
3. lets the saved bfloat16 weights, computing in float32, write the user turns and the replies of train.jsonl and
   held_out.jsonl, and
4. measures what it made and writes it down in README.md beside the model.

One GPU needs a few minutes:  python tools/make_tiny_target.py
A CPU rehearsal of each step: python tools/make_tiny_target.py --quick --device cpu --out tiny-quick
Check what lies there:        python tools/make_tiny_target.py --check --device cpu
"""

import argparse
import ast
import builtins
import collections
import dataclasses
import importlib
import inspect
import json
import math
import pathlib
import platform
import random
import re
import sysconfig
import time

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIALS = (PAD, START, END, MASK)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ROW_TOKENS = 256  # longest training document; also the length of a packed row
REPLY_LIMIT_TOKENS = 128
PASSAGE_CHARS = (110, 330)  # about 35 to 110 tokens of this tokenizer

# Packages that are tests, tools, vendored code or on their way out: their docstrings are not what a reader asks for.
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "turtle", "ensurepip"}
SKIPPED |= {"encodings", "pydoc_data", "msilib", "distutils", "tkinter", "__phello__"}
SKIPPED |= {"nntplib", "cgi", "telnetlib", "imaplib"}
JUNK = re.compile(r"https?:|copyright|licen[sc]e|\.\.\.|--|::|[{}|<>\\]|[^\x20-\x7e]", re.IGNORECASE)
BUILTIN_MODULES = ("builtins", "math", "itertools", "time", "sys")


# ---------------------------------------------------------------------------------------------------------- corpus


@dataclasses.dataclass(frozen=True)
class Entry:
    """One thing the documentation explains: `sentences` are its cleaned prose, `params` None where unknown."""

    kind: str  # function, method, class, module or topic
    name: str
    module: str
    params: tuple[str, ...] | None
    sentences: tuple[str, ...]
    neighbours: tuple[str, ...] = ()


def clean_paragraphs(text: str) -> list[str]:
    """Return the prose paragraphs of `text`, one line each; code, tables, lists, licences and doctests are dropped."""
    for old, new in (("’", "'"), ("‘", "'"), ("“", '"'), ("”", '"'), ("–", "-"), ("—", "-"), ("…", "..."), ("``", "`")):
        text = text.replace(old, new)
    text = re.sub(r":[a-z:]+:`~?([^`<]+?)`", r"`\1`", text)
    text = re.sub(r"(?<!\*)\*(\w+)\*(?!\*)", r"`\1`", text)
    kept = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        if not block.strip() or any(re.match(r"\s*([-*+o•|=~^>#@]|\d+[.)]|\(\d+\)|\.\.)\s*", line) for line in lines):
            continue
        if any(len(line) - len(line.lstrip()) != len(lines[0]) - len(lines[0].lstrip()) for line in lines):
            continue
        line = " ".join(block.split())
        prose_share = sum(c.isalpha() or c == " " for c in line) / len(line)
        if prose_share < 0.85 or JUNK.search(line) or not re.match(r"[A-Z`\"]", line):
            continue
        kept.append(line if line[-1] in ".!?" else line.rstrip(":;,") + ".")
    return kept


def split_sentences(paragraphs: list[str]) -> tuple[str, ...]:
    """Split at full stops before a capital; a sentence that was already seen, or is very long, is left out."""
    sentences: list[str] = []
    for paragraph in paragraphs:
        for sentence in re.split(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.) (?=[A-Z`\"])", paragraph):
            if sentence not in sentences and len(sentence) <= PASSAGE_CHARS[1]:
                sentences.append(sentence)
    return tuple(sentences)


def entries_of_source(path: pathlib.Path, module: str) -> list[Entry]:
    """Read the docstrings of one source file: the module, its public functions, classes and methods."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    found = [Entry("module", module, module, None, split_sentences(clean_paragraphs(ast.get_docstring(tree) or "")))]

    def visit(body: list[ast.stmt], prefix: str, inside_class: bool) -> None:
        nodes = [n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        nodes = [n for n in nodes if not n.name.startswith("_")]
        for index, node in enumerate(nodes):
            is_class = isinstance(node, ast.ClassDef)
            params = None
            if not is_class:
                given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                params = tuple(a.arg for a in given if a.arg not in ("self", "cls"))
            near = [n.name for n in nodes[index + 1 : index + 4] + nodes[max(0, index - 3) : index]]
            sentences = split_sentences(clean_paragraphs(ast.get_docstring(node) or ""))
            kind = "class" if is_class else "method" if inside_class else "function"
            found.append(Entry(kind, prefix + node.name, module, params, sentences, tuple(dict.fromkeys(near))[:3]))
            if is_class:
                visit(node.body, prefix + node.name + ".", True)

    visit(tree.body, "", False)
    return found


def entries_of_builtins() -> list[Entry]:
    """Read the docstrings of what is compiled in: the functions, types and their methods of BUILTIN_MODULES."""
    found = []
    for module_name in BUILTIN_MODULES:
        module = builtins if module_name == "builtins" else importlib.import_module(module_name)
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or not callable(value):
                continue
            members = [(name, value)]
            if inspect.isclass(value) and not issubclass(value, BaseException):
                members += [(f"{name}.{n}", v) for n, v in sorted(vars(value).items()) if n[0] != "_" and callable(v)]
            for member_name, member in members:
                kind = "class" if inspect.isclass(member) else "method" if "." in member_name else "function"
                sentences = split_sentences(clean_paragraphs(inspect.getdoc(member) or ""))
                found.append(Entry(kind, member_name, module_name, None, sentences))
    return found


def entries_of_topics() -> list[Entry]:
    """Cut each help topic of pydoc into passages, one entry each; the name says the heading and the part."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        print("note: this Python has no pydoc_data.topics; the corpus is made of docstrings alone")
        return []
    found = []
    for _, text in sorted(topics.items()):
        heading, part, passage = "", 0, []
        for block in re.split(r"\n\s*\n", text):
            title = re.match(r"\s*([^\n]+)\n([*=~^-])\2{2,}\s*$", block.strip())
            if title:
                heading, part, passage = re.sub(r"[\"`]", "", title[1]).strip(), 0, []
                continue
            passage += [s for s in split_sentences(clean_paragraphs(block)) if s not in passage]
            if heading and sum(map(len, passage)) >= 160:
                part += 1
                name = heading if part == 1 else f"{heading}, part {part}"
                found.append(Entry("topic", name, "", None, tuple(passage)))
                passage = []
    return found


def read_documentation() -> list[Entry]:
    """Return every entry of this Python's documentation that has at least one sentence of prose, in a fixed order."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    entries = entries_of_builtins() + entries_of_topics()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts and not SKIPPED & set(parts) and not any(p.startswith(("_", "config-")) for p in parts):
            entries += entries_of_source(path, ".".join(parts))
    unique: dict[tuple[str, ...], Entry] = {}
    for entry in entries:
        if sum(map(len, entry.sentences)) >= 25:
            unique.setdefault(entry.sentences, entry)
    return list(unique.values())


def join_names(names: tuple[str, ...]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " and " + quoted[-1]


def take_sentences(sentences: tuple[str, ...], room_chars: int) -> tuple[str, tuple[str, ...]]:
    """Return as many of the first sentences as fit (one at least), and those left over."""
    num_taken, used_chars = 0, 0
    for sentence in sentences:
        used_chars += len(sentence) + 1
        if num_taken and used_chars > room_chars:
            break
        num_taken += 1
    return " ".join(sentences[:num_taken]), sentences[num_taken:]


def introduce(entry: Entry) -> str:
    """Say in one or two sentences what kind of thing the entry is and what it takes."""
    if entry.kind == "module":
        return f"`{entry.name}` is a module of the standard library."
    owner, _, short = entry.name.rpartition(".")
    where = f"method of the class `{owner}`" if entry.kind == "method" else entry.kind
    place = "is built in" if entry.module == "builtins" else f"comes from the module `{entry.module}`"
    text = f"`{short}` is a {where} and {place}."
    if entry.params:
        text += f" It takes {join_names(entry.params[:4])}."
    elif entry.params is not None:
        text += " It takes no arguments."
    return text


def write_documents(entry: Entry, rng: random.Random) -> list[tuple[str, str]]:
    """Turn an entry into (user message, reply) pairs: its first sentences, an introduction, and what comes after."""
    low_chars, high_chars = PASSAGE_CHARS
    full = entry.name if entry.module in ("", "builtins", entry.name) else f"{entry.module}.{entry.name}"
    first, left_over = take_sentences(entry.sentences, high_chars)
    rest, _ = take_sentences(left_over, high_chars)
    documents = []
    if entry.kind == "topic":
        title = entry.name[0].lower() + entry.name[1:] if entry.name.startswith("The ") else entry.name
        asked = (f"Explain {title}.", f"What does the language reference say about {title}?", f"Tell me about {title}.")
        return [(rng.choice(asked), first)]
    if len(first) >= low_chars:
        verb = "do" if entry.kind in ("function", "method") else "offer"
        documents.append((rng.choice((f"What does {full} {verb}?", f"Explain {full}.", f"What is {full} for?")), first))
    intro = introduce(entry)
    reply = f"{intro} {take_sentences(entry.sentences, high_chars - len(intro))[0]}"
    if len(reply) < 230 and entry.neighbours:
        reply += f" See also {join_names(entry.neighbours)}."
    documents.append((rng.choice((f"How do I use {full}?", f"Describe {full}.", f"Introduce me to {full}.")), reply))
    if len(rest) >= low_chars:
        documents.append((rng.choice((f"Tell me more about {full}.", f"What else should I know about {full}?")), rest))
    return documents


def build_corpus(num_entries: int, seed: int) -> tuple[list[list[dict]], list[list[dict]], str]:
    """Return training conversations, held-out conversations (of other entries) and all text for the tokenizer."""
    rng = random.Random(seed)
    entries = read_documentation()
    by_module: dict[str, list[list[dict]]] = collections.defaultdict(list)
    every_text, train, held_out, asked, replied = [], [], [], set(), set()
    rng.shuffle(entries)
    for index, entry in enumerate(entries):
        for user, reply in write_documents(entry, rng):
            if user in asked or reply in replied:
                continue
            asked.add(user)
            replied.add(reply)
            every_text.append(f"{user}\n{reply}")
            messages = [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
            if index < num_entries:
                train.append(messages)
                by_module[entry.module].append(messages)
            elif index < num_entries + 60:
                held_out.append(messages)
    if len(train) < num_entries:
        raise SystemExit(f"only {len(entries)} entries found; install Python's whole library or lower --entries")
    for documents in by_module.values():  # a seventh more conversations have two turns, both about one module
        for _ in range(len(documents) // 7):
            one, two = rng.sample(documents, 2)
            train.append(one + two)
    return train, held_out, "\n".join(every_text)


# ------------------------------------------------------------------------------------------- tokenizer, model, training


def train_tokenizer(text: str, vocab_tokens: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_tokens, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(text.splitlines() + ["user\n", "assistant\n", "system\n"], trainer)
    if bpe.get_vocab_size() != vocab_tokens:
        raise SystemExit(f"the corpus fills only {bpe.get_vocab_size()} tokens; lower --vocab-tokens")
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def make_model(vocab_tokens: int, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_tokens,
        hidden_size=160,
        intermediate_size=416,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=SPECIALS.index(PAD),
        eos_token_id=SPECIALS.index(END),
    )
    return Qwen3ForCausalLM(config)


def pack_rows(documents: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pack whole documents into rows of ROW_TOKENS; return token ids, document numbers (-1 = padding), positions."""
    rows: list[list[list[int]]] = []
    room_tokens: list[int] = []
    for document in sorted(documents, key=len, reverse=True):
        row = next((r for r in range(max(0, len(rows) - 400), len(rows)) if room_tokens[r] >= len(document)), None)
        if row is None:
            rows.append([])
            room_tokens.append(ROW_TOKENS)
            row = len(rows) - 1
        rows[row].append(document)
        room_tokens[row] -= len(document)
    ids = torch.full((len(rows), ROW_TOKENS), SPECIALS.index(PAD))
    owner = torch.full_like(ids, -1)
    positions = torch.zeros_like(ids)
    for r, row in enumerate(rows):
        begin = 0
        for number, document in enumerate(row):
            span = slice(begin, begin + len(document))
            ids[r, span], owner[r, span] = torch.tensor(document), number
            positions[r, span] = torch.arange(len(document))
            begin += len(document)
    return ids, owner, positions


def run_layers(model, layers, ids, owner, positions) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last hidden states and those of the third layer from the end; a document sees only itself."""
    length = ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    mask = ((owner[:, :, None] == owner[:, None, :]) & causal)[:, None]
    hidden = model.model.embed_tokens(ids)
    rope = model.model.rotary_emb(hidden, positions)
    for index, layer in enumerate(layers):
        hidden = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rope)
        if index == len(layers) - 3:
            middle = hidden
    return model.model.norm(hidden), middle


def shifted_loss(hidden, weight, ids, owner, shift) -> torch.Tensor:
    """Mean cross entropy of the token `shift` places on, where it belongs to the same document."""
    labels = ids[:, shift:].masked_fill((owner[:, shift:] != owner[:, :-shift]) | (owner[:, shift:] < 0), -100)
    logits = F.linear(hidden[:, :-shift], weight).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class LookaheadLoss(torch.nn.Module):
    """Next-token loss, plus a little for reading the tokens after that off the middle layers; thrown away afterwards.

    Multi-token prediction, as in DeepSeek-V3's training, so that the hidden states a drafter taps know what follows.
    """

    def __init__(self, num_lookahead_tokens: int, hidden_size: int, loss_of_shift) -> None:
        super().__init__()
        heads = (torch.nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(num_lookahead_tokens))
        self.heads = torch.nn.ModuleList(heads)
        self.loss_of_shift = loss_of_shift

    def forward(self, hidden, middle, weight, ids, owner) -> tuple[torch.Tensor, torch.Tensor]:
        loss = total = self.loss_of_shift(hidden, weight, ids, owner, 1)
        middle = F.rms_norm(middle, (middle.shape[-1],))
        for index, head in enumerate(self.heads):
            total = total + 0.15 * self.loss_of_shift(head(middle), weight.detach(), ids, owner, index + 2)
        return loss, total


def restore_mask_row(table: torch.Tensor, first_row: torch.Tensor) -> None:
    """<|mask|> never occurs in a text: give it the row it began with, at the mean norm of the trained rows."""
    mask_id = SPECIALS.index(MASK)
    others = torch.arange(len(table), device=table.device) != mask_id
    table[mask_id] = first_row * (table[others].norm(dim=1).mean() / first_row.norm())


def train(model, rows, held_out_rows, args) -> dict:
    """Train `model` in place and return the figures; stops at --updates or --minutes, whichever comes first."""
    start_seconds = time.monotonic()
    model.to(args.device).train()
    table = model.get_input_embeddings().weight
    mask_row = table[SPECIALS.index(MASK)].detach().clone()
    layers, loss_of_shift = list(model.model.layers), shifted_loss
    if args.compile:
        layers, loss_of_shift = [torch.compile(layer) for layer in layers], torch.compile(shifted_loss)
    criterion = LookaheadLoss(args.lookahead_tokens, model.config.hidden_size, loss_of_shift).to(args.device)
    parameters = [*model.parameters(), *criterion.parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.02},
         {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0}],
        lr=args.learning_rate, betas=(0.9, 0.98), fused=args.device != "cpu",
    )  # fmt: skip
    rows = [t.to(args.device) for t in rows]
    order, update, progress = torch.empty(0, dtype=torch.long, device=args.device), 0, 0.0
    while progress < 1:
        if len(order) < args.batch_rows:
            order = torch.cat([order, torch.randperm(len(rows[0]), device=args.device)])
        picked, order = order[: args.batch_rows], order[args.batch_rows :]
        ids, owner, positions = (t[picked] for t in rows)
        cosine = 0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * cosine * min(1.0, (update + 1) / args.warmup_updates)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device != "cpu"):
            hidden, middle = run_layers(model, layers, ids, owner, positions)
            loss, total = criterion(hidden, middle, table, ids, owner)
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update += 1
        elapsed_seconds = time.monotonic() - start_seconds
        progress = max(update / args.updates, elapsed_seconds / (60 * args.minutes))
        if update % args.print_updates == 0 or update == 1 or progress >= 1:
            losses = f"loss {loss.item():.4f}, with lookahead {total.item():.4f}"
            print(f"update {update:6d}  {losses}  {elapsed_seconds:4.0f} s", flush=True)
    with torch.no_grad():
        restore_mask_row(table, mask_row)
    figures = {"updates": update, "passes": round(update * args.batch_rows / len(rows[0]), 1)}
    figures["train_loss"] = mean_loss(model.eval(), [t[:256] for t in rows])
    figures["held_out_loss"] = mean_loss(model, [t.to(args.device) for t in held_out_rows])
    return figures


@torch.no_grad()
def mean_loss(model, rows) -> float:
    hidden, _ = run_layers(model, list(model.model.layers), *rows)
    return round(shifted_loss(hidden, model.lm_head.weight, rows[0], rows[1], 1).item(), 4)


# ------------------------------------------------------------------------------------------------------- generation


@torch.no_grad()
def write_on(model, prefixes: list[list[int]], limit_tokens: int, temperature: float, batch: int) -> list[list[int]]:
    """Continue each prefix up to and without <|im_end|>; [] where the limit cut it off. Temperature 0 is greedy."""
    pad_id, end_id = SPECIALS.index(PAD), SPECIALS.index(END)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    settings = GenerationConfig(
        max_new_tokens=limit_tokens + 1, eos_token_id=end_id, pad_token_id=pad_id, **(sampling or {"do_sample": False})
    )
    written: list[list[int]] = [[] for _ in prefixes]
    order = sorted(range(len(prefixes)), key=lambda i: len(prefixes[i]))
    for begin in range(0, len(order), batch):
        chosen = order[begin : begin + batch]
        width = max(len(prefixes[i]) for i in chosen)
        ids = torch.tensor([[pad_id] * (width - len(prefixes[i])) + prefixes[i] for i in chosen], device=model.device)
        mask = torch.tensor([[0] * (width - len(prefixes[i])) + [1] * len(prefixes[i]) for i in chosen])
        output = model.generate(ids, attention_mask=mask.to(model.device), generation_config=settings)
        for i, row in zip(chosen, output[:, width:].tolist(), strict=True):
            written[i] = row[: row.index(end_id)] if end_id in row else []
    return written


def distinct_4grams(replies: list[list[int]]) -> float:
    """Distinct 4-grams of token ids within each reply over all 4-grams, pooled."""
    grams = [[tuple(reply[i : i + 4]) for i in range(len(reply) - 3)] for reply in replies]
    return sum(len(set(g)) for g in grams) / max(1, sum(len(g) for g in grams))


def text_of(tokenizer, ids: list[int], min_tokens: int) -> str | None:
    """Return the text of `ids`, or None where it is too short, odd, repeats itself or does not round-trip."""
    text = tokenizer.decode(ids)
    bad = len(ids) < min_tokens or text != text.strip() or "\ufffd" in text or any(s in text for s in SPECIALS)
    if bad or tokenizer(text)["input_ids"] != ids or (len(ids) > 4 and distinct_4grams([ids]) < 0.8):
        return None
    return text


def add_turns(model, tokenizer, stories: list[list[dict]], temperature: float, batch: int) -> list[list[dict]]:
    """Let the model reply to each conversation that ends in a user turn; return those with a usable reply."""
    prefixes = [tokenizer.apply_chat_template(s, add_generation_prompt=True, return_dict=False) for s in stories]
    replies = write_on(model, prefixes, REPLY_LIMIT_TOKENS, temperature, batch)
    texts = [text_of(tokenizer, reply, 12) for reply in replies]
    return [s + [{"role": "assistant", "content": t}] for s, t in zip(stories, texts, strict=True) if t]


def ask(model, tokenizer, stories: list[list[dict]], temperature: float, batch: int) -> list[list[dict]]:
    """Let the model write the next user turn of each conversation."""
    begun = tokenizer(f"{START}user\n")["input_ids"]
    prefixes = [(tokenizer.apply_chat_template(s, return_dict=False) if s else []) + begun for s in stories]
    texts = [text_of(tokenizer, ids, 2) for ids in write_on(model, prefixes, 48, temperature, batch)]
    return [s + [{"role": "user", "content": t}] for s, t in zip(stories, texts, strict=True) if t]


def write_conversations(model, tokenizer, args) -> tuple[list[list[dict]], list[list[dict]]]:
    """Return (train, held-out) conversations by the model: no prompt occurs twice, no held-out reply is in train."""
    batch, num_held_out = args.generation_batch, args.held_out_conversations
    asked = ask(model, tokenizer, [[]] * args.prompts, 0.9, batch)
    asked = list({story[0]["content"]: story for story in asked}.values())
    held_out = add_turns(model, tokenizer, asked[: 3 * num_held_out], 0.0, batch)
    seen = collections.Counter(story[1]["content"] for story in held_out)
    held_out = [s for s in held_out if seen[s[1]["content"]] == 1][:num_held_out]
    forbidden = {story[1]["content"] for story in held_out}
    questions = asked[3 * num_held_out :]
    num_sampled = len(questions) // 4
    stories = add_turns(model, tokenizer, questions[:num_sampled], 0.7, batch)
    stories += add_turns(model, tokenizer, questions[num_sampled:], 0.0, batch)
    print(f"{args.prompts} prompts sampled, {len(asked)} different, {len(stories)} usable replies", flush=True)
    stories = [s for s in stories if s[1]["content"] not in forbidden]
    random.Random(args.seed).shuffle(stories)
    stories = stories[: args.conversations]
    num_longer = len(stories) // 10
    longer = add_turns(model, tokenizer, ask(model, tokenizer, stories[:num_longer], 0.9, batch), 0.0, batch)
    prompts = {m["content"] for s in held_out for m in s if m["role"] == "user"}
    longer = [s for s in longer if s[2]["content"] not in prompts and s[3]["content"] not in forbidden]
    going_on = {s[0]["content"]: s for s in longer}
    return [going_on.get(s[0]["content"], s) for s in stories], held_out


# ---------------------------------------------------------------------------------------------- measuring and writing


def lookup_tokens_per_step(prompt: list[int], reply: list[int], num_draft_tokens: int = 7) -> tuple[int, int]:
    """Return (tokens, verifications) of prompt lookup on a greedy reply: the longest suffix of up to 3 tokens."""
    text, position, steps = prompt + reply, len(prompt), 0
    while position < len(text):
        draft: list[int] = []
        for size in (3, 2, 1):
            suffix = text[position - size : position]
            starts = [i for i in range(position - size - 1, -1, -1) if text[i : i + size] == suffix]
            if starts:
                draft = text[starts[0] + size : min(position, starts[0] + size + num_draft_tokens)]
                break
        pairs = zip(draft, text[position:], strict=False)
        accepted = next((n for n, (guess, token) in enumerate(pairs) if guess != token), len(draft))
        position = min(len(text), position + accepted + 1)
        steps += 1
    return len(reply), steps


@torch.no_grad()
def measure(model, tokenizer, train_stories: list[list[dict]], held_out: list[list[dict]]) -> dict:
    """Figures of the held-out replies: how sure the model is of them, how varied they are, how new."""
    lengths, tokens, steps, top1, entropy, mask_most, replies = [], 0, 0, [], [], 0.0, []
    for story in held_out:
        prompt = tokenizer.apply_chat_template(story[:1], add_generation_prompt=True, return_dict=False)
        reply = tokenizer(story[1]["content"] + END)["input_ids"]
        logits = model(torch.tensor([prompt + reply], device=model.device)).logits[0, len(prompt) - 1 : -1]
        chances = logits.float().softmax(-1)
        top1.append(chances.max(-1).values)
        entropy.append(torch.special.entr(chances).sum(-1))
        mask_most = max(mask_most, chances[:, SPECIALS.index(MASK)].max().item())
        num_tokens, num_steps = lookup_tokens_per_step(prompt, reply)
        tokens, steps = tokens + num_tokens, steps + num_steps
        replies.append(reply[:-1])
        lengths.append(len(reply) - 1)
    train_replies = [tokenizer(m["content"])["input_ids"] for s in train_stories for m in s if m["role"] == "assistant"]
    known = {tuple(r[i : i + 8]) for r in train_replies for i in range(len(r) - 7)}
    eights = [tuple(r[i : i + 8]) in known for r in replies for i in range(len(r) - 7)]
    return {
        "train_conversations": len(train_stories),
        "two_turn_conversations": sum(len(s) > 2 for s in train_stories),
        "train_reply_tokens": sum(map(len, train_replies)),
        "held_out_conversations": len(held_out),
        "mean_held_out_reply_tokens": round(sum(lengths) / len(lengths), 1),
        "mean_top1_probability": round(torch.cat(top1).mean().item(), 4),
        "mean_entropy_nats": round(torch.cat(entropy).mean().item(), 4),
        "most_mask_probability": float(f"{mask_most:.1e}"),
        "distinct_4gram_share": round(distinct_4grams(replies), 4),
        "prompt_lookup_acceptance": round(tokens / steps, 3),
        "held_out_8grams_in_train": round(sum(eights) / max(1, len(eights)), 4),
    }


def check(folder: pathlib.Path, device: str, num_stories: int = 20) -> int:
    """Decode held-out prompts again, greedily in float32 and one by one; return how many replies came out the same."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    lines = (folder / "conversations" / "held_out.jsonl").read_text(encoding="utf-8").splitlines()[:num_stories]
    num_same = 0
    for line in lines:
        story = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(story[:1], add_generation_prompt=True, return_dict=False)
        reply = write_on(model, [prompt], REPLY_LIMIT_TOKENS, 0.0, 1)[0]
        num_same += reply == tokenizer(story[1]["content"])["input_ids"]
    print(f"check: {num_same} of {len(lines)} held-out replies decode to the same tokens again")
    return num_same


README = """# tiny: a target for the first run

A Qwen3 model of {num_layers} layers and {num_parameters:,} parameters ({model_bytes:,} bytes in bfloat16), its
byte-level BPE tokenizer of {vocab_tokens:,} tokens, and conversations that the model wrote itself. It knows one subject
and that almost by heart, which is what a demonstration of speculative decoding on a CPU needs. It is of no use as an
assistant: much of what it says about Python is made up.

- Learned from the documentation in Python {python_version}'s standard library: docstrings and the help topics of
  pydoc, turned into {documents:,} short chat documents ({corpus_tokens:,} tokens). That text is copyright of the
  Python Software Foundation, under PSF-2.0; since the model learned it by heart, its replies repeat sentences of it.
  The weights, and what else is in the conversations, come under this repository's terms.
- `{mask}` is a spare token for a drafter's mask; it occurs in no text. Its row is the one it was initialised with,
  scaled to the mean norm of the others.
- Its documents are at most {row_tokens} tokens long: past that position it is untrained.
{lookahead}
`conversations/train.jsonl`: most replies greedy, a fourth sampled at temperature 0.7, a few with two turns.
`conversations/held_out.jsonl`: greedy. The prompts were sampled from the model too, at temperature 0.9. No held-out
prompt and no held-out reply is in train, but both come from one model about one subject: see the share of 8-grams.

| figure | value |
| --- | --- |
{table}

Made by

    {command}

in {minutes} minutes on {device} with torch {torch_version}. Made again it comes out alike, not bit for bit: training
stops by the clock. `python tools/make_tiny_target.py --check --device cpu` decodes held-out prompts again and compares.
"""

LOOKAHEAD = """- While it trained, {} linear heads on the output of its third layer from the end also learned the
  tokens after the next one (multi-token prediction, as in DeepSeek-V3); they are thrown away. This makes it far easier
  to draft for than a model trained without: what a drafter reaches here says little about other targets.
"""

LABELS = {
    "updates": "updates",
    "passes": "passes over the documents",
    "train_loss": "train loss (nats a token)",
    "held_out_loss": "loss on documentation it never saw (nats a token)",
    "train_conversations": "train conversations",
    "two_turn_conversations": "... of two turns",
    "train_reply_tokens": "train reply tokens",
    "held_out_conversations": "held-out conversations",
    "mean_held_out_reply_tokens": "held-out reply, mean tokens",
    "mean_top1_probability": "held-out replies: mean probability of the greedy token",
    "mean_entropy_nats": "held-out replies: mean entropy (nats)",
    "most_mask_probability": "held-out replies: largest probability of the mask token",
    "distinct_4gram_share": "held-out replies: share of distinct 4-grams",
    "prompt_lookup_acceptance": "held-out replies: tokens a verification by prompt lookup, block 8",
    "held_out_8grams_in_train": "held-out replies: share of 8-grams that a train reply has too",
}


def render_readme(model, tokenizer, figures: dict, args, model_bytes: int) -> str:
    """Return README.md with the figures of a run; those without a label go into the sentences."""
    given = {k: v for k, v in vars(args).items() if v != make_parser().get_default(k) and k not in ("out", "compile")}
    given = {k: v for k, v in given.items() if not args.quick or k not in {**QUICK, "quick": True}}
    flags = ["--quick"] * args.quick + [f"--{k.replace('_', '-')} {v}" for k, v in given.items()]
    return README.format(
        num_layers=model.config.num_hidden_layers,
        num_parameters=sum(p.numel() for p in model.parameters()),
        model_bytes=model_bytes,
        vocab_tokens=len(tokenizer),
        mask=MASK,
        row_tokens=ROW_TOKENS,
        lookahead=LOOKAHEAD.format(args.lookahead_tokens) if args.lookahead_tokens else "",
        table="\n".join(f"| {label} | {figures[key]} |" for key, label in LABELS.items()),
        command=" ".join(["python tools/make_tiny_target.py", *flags]),
        **{key: value for key, value in figures.items() if key not in LABELS},
    )


def facts_of_run(device: str, start_seconds: float) -> dict:
    return {
        "minutes": round((time.monotonic() - start_seconds) / 60, 1),
        "device": "a CPU" if device == "cpu" else "one " + torch.cuda.get_device_name(),
        "torch_version": ".".join(torch.__version__.split(".")[:2]),
        "python_version": ".".join(platform.python_version_tuple()[:2]),
    }


QUICK = {
    "entries": 16,
    "updates": 150,
    "batch_rows": 4,
    "learning_rate": 4e-3,
    "warmup_updates": 10,
    "prompts": 200,
    "conversations": 40,
    "held_out_conversations": 3,
    "generation_batch": 200,
    "print_updates": 25,
    "compile": False,
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_out = pathlib.Path(__file__).parents[1] / "graphcap" / "assets" / "tiny"
    parser.add_argument("--out", type=pathlib.Path, default=default_out, help="folder to write to")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="where to train and to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the corpus, the first weights and the sampling")
    parser.add_argument("--minutes", type=float, default=2.5, help="stop training after this time, or ...")
    parser.add_argument("--updates", type=int, default=30_000, help="... after this many updates")
    parser.add_argument("--entries", type=int, default=3400, help="how many things of the documentation to learn")
    parser.add_argument("--vocab-tokens", type=int, default=2048, help="tokens of the tokenizer, special ones included")
    parser.add_argument("--batch-rows", type=int, default=64, help=f"rows of {ROW_TOKENS} tokens in an update")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--warmup-updates", type=int, default=200, help="updates until the learning rate is reached")
    parser.add_argument("--lookahead-tokens", type=int, default=3, help="tokens after the next that a middle layer learns")
    parser.add_argument("--prompts", type=int, default=16_000, help="user turns to sample before de-duplication")
    parser.add_argument("--conversations", type=int, default=4000, help="train conversations at most")
    parser.add_argument("--held-out-conversations", type=int, default=200, help="held-out conversations at most")
    parser.add_argument("--generation-batch", type=int, default=2048, help="conversations written at a time")
    parser.add_argument("--print-updates", type=int, default=500, help="updates between two printed losses")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="train without torch.compile")
    parser.add_argument("--quick", action="store_true", help="small settings that show every step in a minute or two")
    parser.add_argument("--check", action="store_true", help="only decode held-out prompts of --out again and compare")
    return parser


def main() -> None:
    start_seconds = time.monotonic()
    args = make_parser().parse_args()
    if args.check:
        raise SystemExit(0 if check(args.out, args.device) else "no held-out reply came out the same: make it again")
    if args.quick:
        vars(args).update(QUICK)
    train_stories, held_out_stories, text = build_corpus(args.entries, args.seed)
    tokenizer = train_tokenizer(text, args.vocab_tokens)
    documents = [d for d in map(encode_with(tokenizer), train_stories) if len(d) <= ROW_TOKENS]
    held_out_documents = [d for d in map(encode_with(tokenizer), held_out_stories) if len(d) <= ROW_TOKENS]
    figures = {"documents": len(documents), "corpus_tokens": sum(map(len, documents))}
    print(f"{figures}, {time.monotonic() - start_seconds:.0f} s", flush=True)
    model = make_model(len(tokenizer), args.seed)
    figures |= train(model, pack_rows(documents), pack_rows(held_out_documents), args)
    print(figures, flush=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    model.float()  # the weights as saved, but float32 arithmetic
    train_written, held_out_written = write_conversations(model, tokenizer, args)
    if not held_out_written or not train_written:
        raise SystemExit("the model wrote no usable conversation; train longer (--minutes, --updates)")
    (args.out / "conversations").mkdir(exist_ok=True)
    for name, stories in (("train", train_written), ("held_out", held_out_written)):
        lines = [json.dumps({"messages": s}, ensure_ascii=False) + "\n" for s in stories]
        (args.out / "conversations" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    figures |= measure(model, tokenizer, train_written, held_out_written)
    figures |= facts_of_run(args.device, start_seconds)
    model_bytes = (args.out / "model.safetensors").stat().st_size
    (args.out / "README.md").write_text(render_readme(model, tokenizer, figures, args, model_bytes), encoding="utf-8")
    print(json.dumps(figures, indent=1), f"{time.monotonic() - start_seconds:.0f} s in all", sep="\n")


def encode_with(tokenizer):
    return lambda story: tokenizer.apply_chat_template(story, return_dict=False)


if __name__ == "__main__":
    main()
