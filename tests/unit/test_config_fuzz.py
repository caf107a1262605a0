"""Recipes nobody would write: every one is a Recipe or a ConfigError in the one form, never another exception."""

import dataclasses
import random

import pytest

from graphcap.config import Recipe, build_recipe, load_recipe, to_toml
from graphcap.errors import ConfigError
from tests.toys import fresh_seed

GOOD = {"target": {"path": "t"}, "data": {"train": ["a.jsonl"], "held_out": ["b.jsonl"]}}
SECTIONS = {section.name: [field.name for field in dataclasses.fields(section.type)] for section in dataclasses.fields(Recipe)}
TEXTS = [
    "",
    " ",
    "a",
    "auto",
    "cpu",
    "..",
    "../x",
    "é🦩",
    "\x00",
    "\n",
    '"',
    "\\",
    "\ud800",
    "x" * 300,
    "true",
    "-",
    "1_0",
    "٣",
    "²",
]
TEXTS += [
    "1e400",
    "nan",
    "-inf",
    "0x10",
    "1" * 5000,
    "[]",
    "[",
    "1,2",
    "2,1",
    ",,",
    "(required)",
    "=",
    "a=b",
    "5",
    "0",
    "-1",
    "2.5",
]
NUMBERS = [0, 1, -1, 2, 7, 10**30, -(10**30), 10**400, 0.0, 0.5, 1.0, -0.0, 1e308, float("nan"), float("inf"), float("-inf")]
RAW = [
    "1979-05-27",
    "07:32:00",
    "{}",
    "{ a = 1 }",
    "[[]]",
    "[1, 'a']",
    "1e400",
    "1_000",
    "+nan",
    "0xff",
    "'''",
    '"\\ud800"',
    "9" * 5000,
]
RAW += ["0x" + "f" * 5000, "[" * 3000, "[0x" + "f" * 5000 + "]"]


def random_value(draw: random.Random, depth: int = 0):
    kind = draw.randrange(6 if depth < 2 else 3)
    if kind == 0:
        return draw.choice(TEXTS)
    if kind == 1:
        return draw.choice(NUMBERS)
    if kind == 2:
        return draw.choice([True, False])
    if kind < 5:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice([*TEXTS, "path"]): random_value(draw, depth + 1) for _ in range(draw.randrange(3))}


def random_name(draw: random.Random, known: list[str]) -> str:
    """Mostly a known name, else one with a letter changed, or anything."""
    name = draw.choice(known)
    if draw.random() < 0.75:
        return name
    place = draw.randrange(len(name) + 1)
    return draw.choice([name[:place] + draw.choice("x._ é\x00=") + name[place + 1 :], draw.choice(TEXTS), name.upper()])


def random_tables(draw: random.Random) -> dict:
    tables = {name: dict(keys) for name, keys in GOOD.items()} if draw.random() < 0.8 else {}
    for _ in range(draw.randint(0, 3)):
        section = random_name(draw, list(SECTIONS))
        if draw.random() < 0.1:
            tables[section] = random_value(draw)
        elif isinstance(tables.setdefault(section, {}), dict):
            tables[section][random_name(draw, SECTIONS.get(section, ["path"]))] = random_value(draw)
    return tables


def random_override(draw: random.Random) -> str:
    section = random_name(draw, list(SECTIONS))
    name = random_name(draw, SECTIONS.get(section, ["path"]))
    text = draw.choice(TEXTS) if draw.random() < 0.6 else str(random_value(draw))
    return draw.choice([f"{section}.{name}={text}"] * 6 + [f"{section}{name}={text}", f"{section}.{name}", text, f"={text}"])


def random_toml(draw: random.Random) -> bytes:
    """TOML text, often broken: values that the parser's own types do not have, bytes cut and changed."""
    lines = ["[target]", 'path = "t"', "[data]", 'train = "a"', 'held_out = "b"']
    for _ in range(draw.randint(1, 3)):
        section = random_name(draw, list(SECTIONS))
        lines += [f"[{section}]", f"{random_name(draw, SECTIONS.get(section, ['path']))} = {draw.choice(RAW)}"]
    text = bytearray("\n".join(lines).encode("utf-8", "surrogatepass"))
    for _ in range(draw.choice([0, 0, 1, 3])):
        text[draw.randrange(len(text))] = draw.randrange(256)
    return bytes(text[: draw.randrange(len(text))] if draw.random() < 0.2 else text)


def outcome(make) -> "Recipe | None":
    """The recipe, or None where it was refused in the one form and in characters that any file takes."""
    try:
        return make()
    except ConfigError as error:
        message = str(error)
        assert "expected " in message and ", got " in message and ". Fix: " in message, message
        assert error.exit_code == 2 and len(message) < 2000, message[:200]
        return None


def test_a_thousand_random_recipes_are_recipes_or_config_errors(tmp_path):
    draw = random.Random(fresh_seed())
    path, made, refused = tmp_path / "r.toml", 0, 0
    for number in range(1000):
        overrides = [random_override(draw) for _ in range(draw.choice([0, 0, 1, 2]))]
        if number % 4:
            tables = random_tables(draw)
            shown = f"tables {tables!r}, overrides {overrides!r}"
            make = lambda: build_recipe(tables, overrides, source="r.toml")  # noqa: B023, E731
        else:
            path.write_bytes(random_toml(draw))
            shown = f"file {path.read_bytes()!r}, overrides {overrides!r}"
            make = lambda: load_recipe(path, overrides)  # noqa: B023, E731
        print(shown[:2000]) if number == 0 else None
        try:
            recipe = outcome(make)
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}\n{shown[:2000]}")
        if recipe is None:
            refused += 1
            continue
        made += 1
        try:  # what is accepted can be written down and read again: the run's folder holds it
            path.write_text(to_toml(recipe), encoding="utf-8")
            assert load_recipe(path) == recipe
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}\n{shown[:2000]}")
    assert made > 50 and refused > 50, (made, refused)


@pytest.mark.parametrize("override", ["target.path=a\0b", "data.train=ok.jsonl,\udcff.jsonl", "run.on_end=\ud800"])
def test_text_that_no_file_or_file_system_takes_is_refused(override):
    with pytest.raises(ConfigError, match=f"'{override.split('=')[0]}'.*Unicode text without a NUL"):
        build_recipe(GOOD, [override], source="r.toml")
    assert build_recipe(GOOD, [override.encode("ascii", "replace").decode().replace("\0", "é")], source="r.toml")
