"""The list of mutations fits the tree: every text to replace stands there once, and every named test exists."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def mutate():
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "tools" / "mutate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_fault_is_caught_and_a_change_that_is_none_is_not(mutate):
    fault = next(one for one in mutate.read_mutations(ROOT) if one.file == "graphcap/model/blocks.py")
    caught, line = mutate.judge(fault, [])
    assert caught, line
    harmless = mutate.Mutation(**(vars(fault) | {"replace": fault.find}))
    caught, line = mutate.judge(harmless, [])  # must fail
    assert not caught and "NO TEST" not in line, line


def test_every_mutation_can_be_applied_once_and_names_a_test_that_exists(mutate):
    mutations = mutate.read_mutations(ROOT)
    assert len(mutations) >= 27
    assert [problem for one in mutations for problem in mutate.problems(ROOT, one)] == []
    assert len({(one.file, one.find, one.replace) for one in mutations}) == len(mutations)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"find": "no such text"}, "stands there 0 times"),
        ({"find": "torch"}, "times, not once"),
        ({"file": "graphcap/none.py"}, "stands there 0 times"),
        ({"red": "tests/unit/test_blocks.py::test_nothing"}, "no such test"),
    ],
)
def test_a_mutation_that_does_not_fit_the_tree_is_named(mutate, changes, problem):
    first = mutate.read_mutations(ROOT)[0]
    hurt = mutate.Mutation(**(vars(first) | changes))
    (line,) = mutate.problems(ROOT, hurt)
    assert problem in line
