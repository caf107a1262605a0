"""Do the tests notice? Apply each one-line fault of tests/mutations.toml to a copy of the tree and run its tests there.

    python tools/mutate.py                    every mutation, one after the other; about five seconds each on one core
    python tools/mutate.py --only 3 17        some of them
    python tools/mutate.py --tests tests/unit other tests than those that a mutation names

A mutation is caught if the test that it names goes red. Exit code 1 if one is not, if the tests are red without any
mutation, or if a `find` text does not stand exactly once in its file. It calls nothing of graphcap.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = "tests/mutations.toml"
NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", ".pytest_cache", ".venv", "out", "build", "dist", "*.egg-info")
TIMEOUT_S = 300


@dataclass(frozen=True)
class Mutation:
    """One fault: `find` becomes `replace` in `file`, and the test `red` must fail. `why` says what the fault does."""

    file: str
    find: str
    replace: str
    why: str
    red: str


def read_mutations(root: Path) -> list[Mutation]:
    """The mutations of a tree, in the order of its list."""
    return [Mutation(**entry) for entry in tomllib.loads((root / LIST).read_text(encoding="utf-8"))["mutation"]]


def problems(root: Path, mutation: Mutation) -> list[str]:
    """Why a mutation cannot be applied or judged, in words; empty if it can."""
    found, path = [], root / mutation.file
    count = path.read_text(encoding="utf-8").count(mutation.find) if path.is_file() else 0
    if count != 1:
        found.append(f"{mutation.file}: {mutation.find!r} stands there {count} times, not once")
    file, _, name = mutation.red.partition("::")
    tests = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
    if not re.search(rf"^def {re.escape(name)}\(", tests, re.MULTILINE):
        found.append(f"{mutation.red}: no such test")
    if mutation.find == mutation.replace:
        found.append(f"{mutation.file}: {mutation.find!r} is replaced by itself")
    return found


def run_tests(tree: Path, tests: list[str]) -> tuple[int, list[str], str]:
    """pytest on `tests` in `tree`, up to the first failure: exit code, tests that failed, and the end of its output."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-q", "-rf", "--tb=line", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return -1, [], f"no end within {TIMEOUT_S} s"
    return done.returncode, re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE), done.stdout[-2000:]


def judge(mutation: Mutation, tests: list[str]) -> tuple[bool, str]:
    """Whether the fault is caught by the test it names (or by any of `tests`, where given), and a line about it."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=NOT_COPIED)
        path = tree / mutation.file
        path.write_text(path.read_text(encoding="utf-8").replace(mutation.find, mutation.replace), encoding="utf-8")
        code, failed, output = run_tests(tree, tests or [mutation.red])
        if code == 1 and failed:
            return True, failed[0].partition("::")[2]
        if code == 0 and not tests:
            code, failed, output = run_tests(tree, [mutation.red.partition("::")[0]])
            if failed:
                return False, f"RED, BUT NOT THE TEST IT NAMES: {failed[0]}"
    if code == 0:
        return False, "SURVIVES"
    return False, f"NO TEST RAN TO ITS END (exit code {code}): {(output.strip().splitlines() or [''])[-1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of mutations, from 1")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="run these tests instead of the named ones")
    arguments = parser.parse_args()
    mutations = list(enumerate(read_mutations(ROOT), 1))
    chosen = [(n, one) for n, one in mutations if not arguments.only or n in arguments.only]
    wrong = [f"{n}: {problem}" for n, one in chosen for problem in problems(ROOT, one)]
    if wrong:
        print("\n".join(wrong))
        return 1
    code, failed, output = run_tests(ROOT, arguments.tests or sorted({one.red for _, one in chosen}))
    if code != 0:
        print(f"red without any mutation: {', '.join(failed) or output}")
        return 1
    caught = 0
    for n, one in chosen:
        good, line = judge(one, arguments.tests)
        caught += good
        mark, file = "caught" if good else "------", one.file.removeprefix("graphcap/")
        print(f"{n:>3}  {mark}  {file:<22} {one.why}\n     {line}", flush=True)
    print(f"{caught} of {len(chosen)} mutations caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
