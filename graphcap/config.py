"""A recipe: the only place where a default stands.

A recipe is TOML with the sections below; `section.key=value` on the command line overrides a key and is read by the
key's type, without quotes. Unknown keys are errors that name the nearest key. Loads no torch.

Every key says what it may do when a run is continued with another value:
`same` it changes the updates, so a change is refused; `free` it does not; `grow` it may only become larger.
"""

import dataclasses
import difflib
import os
import shlex
import stat
import tomllib
import types
import typing
from dataclasses import dataclass
from pathlib import Path

from graphcap.errors import ConfigError


def key(
    default, doc: str, *, resume: str, unit: str = "", choices: tuple = (), low: float | None = None, above: float | None = None
):
    """One key of a recipe. resume: same, free or grow. low: smallest value allowed; above: bound not reached."""
    assert resume in ("same", "free", "grow"), f"resume is same, free or grow, not {resume}"
    meta = {"doc": doc, "resume": resume, "unit": unit, "choices": choices, "low": low, "above": above}
    return dataclasses.field(default=default, metadata=meta)


REQUIRED = "(required)"


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str = key("", "name of the run's folder; empty: the recipe's file name", resume="free")
    out: str = key("runs/out", "folder that holds the runs", resume="free")
    note: str = key("", "printed first: what the run does and how long it takes", resume="free")
    seed: int = key(0, "seed of every draw", resume="same", low=0)
    device: str = key("auto", "where to compute; auto: cuda if there is one", resume="same", choices=("auto", "cpu", "cuda"))
    threads: int = key(0, "CPU threads; 0: what torch chooses", unit="threads", resume="same", low=0)
    deadline_s: float = key(300.0, "a rank that begins nothing for so long is ended; 0: never", unit="s", resume="free", low=0)
    start_deadline_s: float = key(
        7200.0, "the same until the first update: loading and warming up take longer", unit="s", resume="free", low=0
    )
    max_restarts: int = key(
        0, "restarts in a row without a new checkpoint, after a rank died", unit="restarts", resume="free", low=0
    )
    max_hours: float = key(0.0, "save and stop after so long, to go on later; 0: never", unit="hours", resume="free", low=0)
    gpu_core_dump: bool = key(False, "name the kernel of a fault on the GPU, by a dump of some megabytes", resume="free")
    on_end: str = key(
        "", "command to run when the run has ended, for at most 20 s; the path of end.json is appended", resume="free"
    )


@dataclass(frozen=True, kw_only=True)
class Target:
    path: str = key(REQUIRED, "folder or Hub name of the frozen target", resume="same")
    revision: str = key("main", "revision of a Hub name", resume="same")
    dtype: str = key(
        "auto",
        "dtype of weights and features; auto: bfloat16 on cuda, float32 on cpu",
        resume="same",
        choices=("auto", "float32", "bfloat16"),
    )
    trust_remote_code: bool = key(False, "run Python code that comes with the target", resume="same")


@dataclass(frozen=True, kw_only=True)
class Data:
    train: tuple[str, ...] = key(
        (),
        "conversations to train on: .jsonl, .jsonl.gz, .parquet, hf:OWNER/NAME[:SPLIT], a prepared folder (required)",
        resume="same",
    )
    held_out: tuple[str, ...] = key((), "conversations never trained on, in the same forms (required)", resume="same")
    max_length: int = key(4096, "longest document", unit="tokens", resume="same", low=2)
    on_long: str = key(
        "error",
        "a document over max_length: stop, cut its end off, or drop it",
        resume="same",
        choices=("error", "truncate", "drop"),
    )
    on_bad_line: str = key(
        "error", "a line or row that cannot be used: stop, or skip and count it", resume="same", choices=("error", "skip")
    )
    cache: str = key(
        "auto", "folder that keeps the tokens of large texts; auto: the user's cache folder; empty: none", resume="free"
    )


@dataclass(frozen=True, kw_only=True)
class Drafter:
    num_layers: int = key(5, "decoder layers", unit="layers", resume="same", low=1)
    block_size: int = key(16, "tokens of a block, anchor included", unit="tokens", resume="same", low=2)
    num_tapped_layers: int = key(
        5, "target layers to tap, where target_layer_ids names none", unit="layers", resume="same", low=1
    )
    target_layer_ids: tuple[int, ...] = key((), "tapped target layers, 0-based outputs; empty: spread evenly", resume="same")
    mask_token: str = key(
        "", "token that stands for MASK; empty: an unused row of the target's embedding is found", resume="same"
    )
    intermediate_size: int = key(0, "width of the MLP; 0: as the target's", resume="same", low=0)
    num_heads: int = key(0, "query heads; 0: as the target's", unit="heads", resume="same", low=0)
    num_kv_heads: int = key(0, "key and value heads; 0: as the target's", unit="heads", resume="same", low=0)
    head_dim: int = key(0, "head size; 0: as the target's", resume="same", low=0)
    checkpointing: bool = key(False, "gradient checkpointing: less memory, each layer's forward runs twice", resume="free")
    init: str = key(
        "", "drafter folder, or a run, whose best checkpoint counts, to start from; empty: random weights", resume="same"
    )


@dataclass(frozen=True, kw_only=True)
class Features:
    path: str = key(
        "",
        "folder of features that `graphcap extract` wrote, to train from with no target in memory; empty: the target computes "
        "them in every step",
        resume="same",
    )
    missing: str = key(
        "refuse",
        "documents that path lacks or has damaged: stop, or load the target before training, compute them and keep them there",
        resume="free",
        choices=("refuse", "compute"),
    )
    threads: int = key(
        4, "threads that read and check rows of features ahead of training", resume="free", unit="threads", low=1
    )
    shard_bytes: int = key(2**30, "features in one shard of a folder", unit="bytes", resume="free", low=1)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    plan: str = key("auto", "auto, or a shapes file", resume="same")
    row_length: int = key(0, "length of the largest bucket; 0: from the data", unit="tokens", resume="same", low=0)
    anchor_density: float = key(0.1667, "anchors per supervised token", unit="anchors/token", resume="same", above=0.0)
    max_buckets: int = key(6, "most buckets a plan may have", unit="buckets", resume="same", low=1)
    rows: str = key("packed", "several documents a row, or one document a row", resume="same", choices=("packed", "single"))
    window: int = key(4096, "documents shuffled and packed together", unit="documents", resume="same", low=1)
    memory_gib: float = key(
        0.0,
        "memory that a plan may take; 0: what is free on the GPU; elsewhere nothing is counted",
        unit="GiB",
        resume="free",
        low=0,
    )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    learning_rate: float = key(6e-4, "highest learning rate", resume="same", above=0.0)
    warmup_fraction: float = key(0.04, "share of all updates in which the learning rate rises", resume="same", low=0.0)
    beta1: float = key(0.9, "AdamW's decay of the first moment", resume="same", low=0.0)
    beta2: float = key(0.999, "AdamW's decay of the second moment", resume="same", low=0.0)
    eps: float = key(1e-8, "AdamW's epsilon", resume="same", above=0.0)
    weight_decay: float = key(0.0, "AdamW's decoupled weight decay", resume="same", low=0.0)
    max_grad_norm: float = key(1.0, "global gradient norm above which gradients are clipped", resume="same", above=0.0)
    epochs: int = key(6, "passes over the training documents", unit="epochs", resume="grow", low=1)
    rows_per_update: int = key(
        0, "rows of one update over all ranks; 0: from tokens_per_update", unit="rows", resume="same", low=0
    )
    tokens_per_update: int = key(32768, "tokens of one update over all ranks", unit="tokens", resume="same", low=1)
    max_skipped: int = key(
        10, "updates in a row without finite gradients that end the run", unit="updates", resume="free", low=1
    )
    max_updates: int = key(0, "stop after so many updates; 0: after the epochs", unit="updates", resume="grow", low=0)


@dataclass(frozen=True, kw_only=True)
class Loss:
    gamma: float = key(
        0.0,
        "decay of the loss weight exp(-(k-1)/gamma) along a block; 0: 7, 5, 4 for blocks of 16, 10, 8",
        resume="same",
        low=0.0,
    )
    chunk_tokens: int = key(
        0,
        "draft tokens whose logits exist at once, up to a sixteenth more; 0: as 768 MiB hold, a power of two",
        unit="tokens",
        resume="same",
        low=0,
    )


@dataclass(frozen=True, kw_only=True)
class Eval:
    every: int = key(100, "updates between evaluations on held-out text", unit="updates", resume="same", low=1)
    documents: int = key(64, "held-out documents of an evaluation", unit="documents", resume="same", low=1)
    prompts: int = key(32, "held-out prompts decoded for the table", unit="prompts", resume="free", low=1)
    max_new_tokens: int = key(128, "longest decoded reply", unit="tokens", resume="free", low=1)
    dtype: str = key(
        "auto",
        "dtype of target and drafter when decoding; auto: as in training",
        resume="free",
        choices=("auto", "float32", "bfloat16"),
    )
    passes: int = key(3, "timed passes over the prompts; the median counts", unit="passes", resume="free", low=1)
    temperature: float = key(0.0, "temperature of the decoded replies; 0: greedy", resume="free", low=0)
    rule: str = key(
        "match",
        "above temperature 0: greedy drafts kept while the target samples them, or sampled drafts kept with min(1, p/q)",
        resume="free",
        choices=("match", "sampled"),
    )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    every: int = key(100, "updates between checkpoints", unit="updates", resume="free", low=1)
    keep: int = key(2, "newest checkpoints kept, beside the best", unit="checkpoints", resume="free", low=1)


@dataclass(frozen=True, kw_only=True)
class Progress:
    every: int = key(10, "updates between two lines of metrics fetched from the device", unit="updates", resume="free", low=1)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All sections of a recipe; see `describe` for the text of `train --help`."""

    run: Run = Run()
    target: Target = Target()
    data: Data = Data()
    drafter: Drafter = Drafter()
    features: Features = Features()
    shapes: Shapes = Shapes()
    optimizer: Optimizer = Optimizer()
    loss: Loss = Loss()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    progress: Progress = Progress()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.run.out) / self.run.name


def load_recipe(path: str | Path, overrides: list[str] = (), *, needed: tuple = ("train", "held_out")) -> Recipe:
    """Read a recipe file and apply `section.key=value` overrides. needed: as in build_recipe.

    Raises: ConfigError naming the key, what was expected, what came and the nearest key.
    """
    path = Path(path)
    if path.is_dir() or not path.exists():
        got = "a folder" if path.is_dir() else "no such file"
        raise ConfigError(
            "recipe", path, expected="a TOML file", got=got, fix="give the path of a recipe, for example runs/tiny.toml"
        )
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError, OSError) as error:  # also numbers and nesting beyond what Python reads
        raise ConfigError(
            "recipe", path, expected="TOML in UTF-8", got=_cut(str(error)), fix="mend that line or the file's rights"
        ) from error
    return build_recipe(tables, overrides, source=str(path), needed=needed)


def load_planned(words: list[str], *, target: str | None, keys: dict[str, object]) -> Recipe:
    """The recipe that `graphcap shapes` plans for: a recipe file, or files of conversations, and overrides among them.

    words: as on the command line. keys: values by section.key; None: as the recipe has it. Raises: ConfigError.
    """
    sections = {field.name for field in dataclasses.fields(Recipe)}
    overrides = [word for word in words if "=" in word and word.split(".")[0] in sections and not Path(word).exists()]
    sources = [word for word in words if word not in overrides]
    for word in overrides:
        name, _, value = word.partition("=")
        if name.strip() == "shapes.plan" and value.strip() != "auto":
            fix = "leave it out; --out FILE says where the new plan goes, and `graphcap train` takes one that is made"
            raise ConfigError("override", _cut(word), expected="no plan, for this makes one", got=f"'{_cut(value)}'", fix=fix)
    overrides += [f"{name}={value}" for name, value in keys.items() if value is not None]
    if target is not None:
        overrides.append(f"target.path={target}")
    overrides.append("shapes.plan=auto")  # a file that the recipe names is what is to be made
    recipes = [word for word in sources if word.endswith(".toml")]
    if recipes and len(sources) > 1:
        raise ConfigError(
            "command line",
            " ".join(sources),
            expected="one recipe, or files of conversations",
            got="both or several",
            fix="give the recipe alone; data.train=FILE overrides its data",
        )
    if recipes:
        return load_recipe(recipes[0], overrides, needed=("train",))
    if not any(word.partition("=")[0].strip() == "target.path" for word in overrides):
        fix = "add --target FOLDER: lengths are counted in its tokens"
        raise ConfigError("option", "--target", expected="the target's folder or Hub name", got="nothing", fix=fix)
    return build_recipe({"data": {"train": sources}}, overrides, source="shapes", needed=("train",))


def build_recipe(tables: dict, overrides: list[str] = (), *, source: str, needed: tuple = ("train", "held_out")) -> Recipe:
    """Turn parsed TOML and overrides into a checked Recipe. source: the recipe's path; its stem is the default run.name.

    needed: the keys of [data] that must name something; planning alone needs no held-out conversations.
    """
    sections = {field.name: field.type for field in dataclasses.fields(Recipe)}
    values: dict[str, dict] = {name: {} for name in sections}
    for name, table in tables.items():
        _known(name, sections, f"section of {source}")
        if not isinstance(table, dict):
            raise ConfigError(
                "section", name, expected="a table of keys", got=_shown(table), fix=f"write [{name}] and its keys below it"
            )
        for key_name, value in table.items():
            field = _known(key_name, _fields(sections[name]), f"recipe key of [{name}]")
            values[name][key_name] = _from_toml(value, field, f"{name}.{key_name}")
    for override in overrides:
        name, key_name, text = _split(override)
        _known(name, sections, "section")
        field = _known(key_name, _fields(sections[name]), f"recipe key of [{name}]")
        values[name][key_name] = _from_text(text, field, f"{name}.{key_name}")
    recipe = Recipe(**{name: cls(**values[name]) for name, cls in sections.items()})
    if not recipe.run.name:
        recipe = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, name=Path(source).stem))
    _check(recipe, needed)
    return recipe


def _fields(section: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(section)}


def _known(name: str, known: dict, thing: str):
    """The entry of `known` called `name`, or an error that names the nearest."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        fix = f"did you mean '{near[0]}'? All: {', '.join(known)}" if near else f"use one of {', '.join(known)}"
        raise ConfigError(thing, _cut(name), expected="a known name", got=f"'{_cut(name)}'", fix=fix)
    return known[name]


def _split(override: str) -> tuple[str, str, str]:
    left, equals, text = override.partition("=")
    section, dot, key_name = left.strip().partition(".")
    if not (equals and dot and section and key_name):
        raise ConfigError(
            "override",
            _cut(override),
            expected="section.key=value",
            got=f"'{_cut(override)}'",
            fix="write for example optimizer.epochs=2",
        )
    return section, key_name, text.strip()


def _wrong(where: str, field: dataclasses.Field, got: object) -> ConfigError:
    unit = field.metadata["unit"]
    return ConfigError(
        "recipe key",
        where,
        expected=_type_name(field) + (f" in {unit}" if unit else ""),
        got=_shown(got),
        fix=f"set {where} ({field.metadata['doc']})",
    )


def _shown(value: object) -> str:
    """A value of any size in one short piece. Python writes no number of more than 4300 digits."""
    try:
        return _cut(repr(value))
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too long to print"


def _cut(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:100]}… ({len(text)} characters)"


def _from_toml(value, field: dataclasses.Field, where: str):
    """A TOML value as the field's type; int for float is fine, one string for a list of strings too."""
    kind = field.type
    if isinstance(kind, types.GenericAlias):
        item = typing.get_args(kind)[0]
        items = value if isinstance(value, list) else [value]
        if not all(type(i) is item for i in items):
            raise _wrong(where, field, value)
        return tuple(items)
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise _wrong(where, field, value) from error
    if type(value) is not kind:
        raise _wrong(where, field, value)
    return value


def _from_text(text: str, field: dataclasses.Field, where: str):
    """An override's text as the field's type; lists are separated by commas, quoted as in a recipe or not."""
    kind = field.type
    if isinstance(kind, types.GenericAlias):
        item = typing.get_args(kind)[0]
        parts = [_unquoted(part.strip()) for part in text.strip("[]").split(",") if part.strip()]
        return tuple(_scalar(part, item, field, where) for part in parts)
    return _scalar(text, kind, field, where)


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _scalar(text: str, kind: type, field: dataclasses.Field, where: str):
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise _wrong(where, field, text)
        return text.lower() == "true"
    try:
        return kind(text.replace("_", ""))
    except ValueError as error:
        raise _wrong(where, field, text) from error


def _check(recipe: Recipe, needed: tuple) -> None:
    """Values against their bounds and against each other."""
    for section in dataclasses.fields(recipe):
        for field in dataclasses.fields(section.type):
            value, meta, where = (
                getattr(getattr(recipe, section.name), field.name),
                field.metadata,
                f"{section.name}.{field.name}",
            )
            if field.default == REQUIRED and value in (REQUIRED, ""):
                raise ConfigError(
                    "recipe key", where, expected=_type_name(field), got="nothing", fix=f"set {where} ({meta['doc']})"
                )
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and where != "run.name" and not _is_text(text):
                    fix = f"set {where} without it; a file with such a name has to be renamed"
                    raise ConfigError("recipe key", where, expected="Unicode text without a NUL", got=_shown(text), fix=fix)
            if meta["choices"] and value not in meta["choices"]:
                near = difflib.get_close_matches(str(value), meta["choices"], n=1)
                fix = f"did you mean '{near[0]}'?" if near else f"set {where} ({meta['doc']})"
                raise ConfigError(
                    "recipe key", where, expected=f"one of {', '.join(meta['choices'])}", got=_shown(value), fix=fix
                )
            if isinstance(value, float) and not abs(value) < float("inf"):
                raise ConfigError(
                    "recipe key", where, expected="a finite number", got=_shown(value), fix=f"set {where} ({meta['doc']})"
                )
            numbers = [number for number in (value if isinstance(value, tuple) else (value,)) if type(number) is int]
            if any(not number < (1024 if where == "run.threads" else 2**63) for number in numbers):
                bound = "at most 1023" if where == "run.threads" else "below 2^63"
                raise ConfigError(
                    "recipe key", where, expected=f"a whole number {bound}", got=_shown(value), fix=f"set {where} lower"
                )
            if meta["low"] is not None and value < meta["low"] or meta["above"] is not None and not value > meta["above"]:
                bound = f"at least {meta['low']}" if meta["low"] is not None else f"above {meta['above']}"
                raise ConfigError(
                    "recipe key",
                    where,
                    expected=f"{_type_name(field)} {bound}",
                    got=_shown(value),
                    fix=f"set {where} ({meta['doc']})",
                )
    _check_together(recipe, needed)


def _is_text(text: str) -> bool:
    """Whether a file can hold it and the file system take it: no NUL, and no byte that was not UTF-8 on the command line."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _check_together(recipe: Recipe, needed: tuple) -> None:
    for name in needed:
        if not getattr(recipe.data, name):
            raise ConfigError(
                "recipe key",
                f"data.{name}",
                expected="at least one file",
                got="nothing",
                fix=f'write {name} = "conversations.jsonl" under [data]',
            )
    check_data_paths(recipe.data)
    if recipe.target.revision != Target.revision and Path(recipe.target.path).is_dir():
        raise ConfigError(
            "recipe key",
            "target.revision",
            expected="a revision of a Hub name",
            got=f"'{_cut(recipe.target.revision)}' of the folder {recipe.target.path}",
            fix="leave it out: a folder holds one revision",
        )
    try:
        shlex.split(recipe.run.on_end)
    except ValueError as error:
        raise ConfigError(
            "recipe key",
            "run.on_end",
            expected="a command as a shell splits it",
            got=_shown(recipe.run.on_end),
            cause=str(error).lower(),
            fix="close its quotes",
        ) from error
    name = recipe.run.name
    if Path(name).name != name or name in ("", ".", "..") or not name.isprintable() or len(name.encode()) > 200:
        fix = "leave out slashes and control characters, and keep it under 200 bytes"
        raise ConfigError("recipe key", "run.name", expected="a plain folder name", got=repr(name[:60]), fix=fix)
    for name in ("beta1", "beta2", "warmup_fraction"):
        value = getattr(recipe.optimizer, name)
        if not value < 1.0:
            raise ConfigError(
                "recipe key", f"optimizer.{name}", expected="a number below 1", got=repr(value), fix="give 0.9, for example"
            )
    if recipe.checkpoint.every % recipe.eval.every and recipe.eval.every % recipe.checkpoint.every:
        raise ConfigError(
            "recipe key",
            "checkpoint.every",
            expected=f"a multiple or a divisor of eval.every ({recipe.eval.every})",
            got=str(recipe.checkpoint.every),
            cause="the best checkpoint is chosen by an evaluation at the same update",
            fix=f"write checkpoint.every = {recipe.eval.every}",
        )
    ids = recipe.drafter.target_layer_ids
    if any(i < 0 for i in ids) or list(ids) != sorted(set(ids)):
        raise ConfigError(
            "recipe key",
            "drafter.target_layer_ids",
            expected="rising 0-based layer numbers, none twice",
            got=_shown(list(ids)),
            fix="list each tapped layer once, for example 1,3,5,7,9",
        )


def check_data_paths(data: Data) -> None:
    """Raises: ConfigError for a pipe or a device, and for a file that is held out and trained on, however it is spelled."""
    found: dict[str, dict] = {}
    for name in ("train", "held_out"):
        found[name] = {}
        for path in getattr(data, name):
            try:
                status = os.stat(path)
            except OSError:  # of the Hub, or missing: whoever reads it tells
                found[name][path] = path
                continue
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                raise ConfigError(
                    "recipe key",
                    f"data.{name}",
                    expected="files or folders",
                    got=f"'{path}', a pipe or a device",
                    cause="a run reads its conversations again whenever it goes on",
                    fix="write them into a file",
                )
            found[name][status.st_dev, status.st_ino] = path
    for key, path in found["held_out"].items():
        if key in found["train"]:
            raise ConfigError(
                "recipe key",
                "data.held_out",
                expected="files that are not trained on",
                got=f"'{path}', which is in data.train too, as '{found['train'][key]}'",
                cause="every figure on held-out text would flatter the drafter",
                fix="split the conversations into two files",
            )


def _type_name(field: dataclasses.Field) -> str:
    if isinstance(field.type, types.GenericAlias):
        return f"list of {typing.get_args(field.type)[0].__name__}"
    return {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}[field.type.__name__]


def _toml_value(value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        import json

        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def to_toml(recipe: Recipe) -> str:
    """The whole recipe as TOML that `load_recipe` reads back to an equal Recipe."""
    lines = []
    for section in dataclasses.fields(recipe):
        lines.append(f"[{section.name}]")
        part = getattr(recipe, section.name)
        lines += [f"{field.name} = {_toml_value(getattr(part, field.name))}" for field in dataclasses.fields(part)]
        lines.append("")
    return "\n".join(lines)


def describe() -> str:
    """Every key with type, default, unit, what it may do at a resume, and one line; what `train RECIPE --help` prints."""
    lines = []
    for section in dataclasses.fields(Recipe):
        lines.append(f"\n[{section.name}]")
        for field in dataclasses.fields(section.type):
            meta = field.metadata
            default = "required" if field.default == REQUIRED else f"default {_toml_value(field.default)}"
            unit = f", {meta['unit']}" if meta["unit"] else ""
            choices = f" ({' | '.join(meta['choices'])})" if meta["choices"] else ""
            lines.append(f"  {section.name}.{field.name}: {_type_name(field)}{unit}, {default}, at resume {meta['resume']}")
            lines.append(f"      {meta['doc']}{choices}")
    return "\n".join(lines)


def check_resume(old: Recipe, new: Recipe) -> None:
    """Refuse to continue `old` as `new` where a key that changes the updates differs.

    Raises: ConfigError naming every such key with both values.
    """
    changed = []
    for section in dataclasses.fields(Recipe):
        for field in dataclasses.fields(section.type):
            before, after = getattr(getattr(old, section.name), field.name), getattr(getattr(new, section.name), field.name)
            rule = field.metadata["resume"]
            shrank = rule == "grow" and before != after and (after < before and after != 0 or before == 0)
            if (rule == "same" and before != after) or shrank:
                changed.append(f"{section.name}.{field.name} {_toml_value(before)} -> {_toml_value(after)}")
    if changed:
        raise ConfigError(
            "run",
            new.folder,
            expected="the keys it began with",
            got="; ".join(changed),
            cause="these keys change the updates already made",
            fix="set them back, or start a new run with run.name=OTHER",
        )
