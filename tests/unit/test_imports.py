"""The house stays in order: imports point one way, doors are light, and the README's tree is the tree.

The tree in README.md is the fenced block after the heading `## The tree`: one file or folder a line, indented below its
folder, a folder with a slash at its end, then what it is for. A folder of which something is listed lists all its
Python files, `__init__.py` and `__main__.py` apart; any other folder only has to be there.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERBS = ("train", "eval", "export", "preview", "shapes", "extract", "regenerate")
# From the bottom up; "" is the package itself, which imports nothing. A module imports its own layer and those below.
LAYERS = (
    ("", "errors"),
    ("config", "versions"),
    ("data",),
    ("kernels",),
    ("model",),
    ("engine",),
    ("ops",),
    ("build", "layout", "offline", "room"),
    VERBS,
    ("cli",),
    ("__main__",),
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules(root: Path) -> dict[str, Path]:
    """Dotted names without `graphcap.` of all modules below root/graphcap; the package itself is ''."""
    found = {}
    for path in sorted((root / "graphcap").rglob("*.py")):
        parts = path.relative_to(root / "graphcap").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, root: Path, *, types_too: bool = True) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file, inside functions too; `from a import b` gives a.b.

    types_too: also imports under `if TYPE_CHECKING:`, which never run.
    """
    package = path.relative_to(root).parent.parts
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    only_types = set() if types_too else {inner for guard in guards for part in guard.body for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if node in only_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def edges(root: Path, *, types_too: bool = True) -> Iterator[tuple[str, int, str]]:
    """(module, line, module it imports) for imports of graphcap by graphcap."""
    known = modules(root)
    for module, path in known.items():
        for line, name in imported(path, root, types_too=types_too):
            if name.split(".")[0] == "graphcap":
                inner = name.removeprefix("graphcap").removeprefix(".")
                yield module, line, inner if inner in known else inner.rpartition(".")[0]  # the last part: a name in it


def wrong_ways(root: Path) -> list[str]:
    """One line for each import that points up, leaves the package for its tests or tools, or has no place in LAYERS."""
    wrong = [f"graphcap/{name}: has no place in LAYERS" for name in modules(root) if name.split(".")[0] not in LEVELS]
    for module, line, other in edges(root):
        if LEVELS.get(other.split(".")[0], 99) > LEVELS.get(module.split(".")[0], -1):
            wrong.append(f"{module}:{line}: imports {other or 'graphcap'}, which is above it")
    for module, path in modules(root).items():
        for line, name in imported(path, root):
            if name.split(".")[0] in ("tests", "tools"):
                wrong.append(f"{module}:{line}: imports {name}, which is not of the package")
    return wrong


def circle(root: Path) -> list[str]:
    """Modules that import each other in a circle, imports inside functions counted; empty where there is none."""
    others: dict[str, set[str]] = {module: set() for module in modules(root)}
    for module, _, other in edges(root, types_too=False):
        others[module] |= {other} - {module}
    left = set(others)
    while True:  # peel off what imports nothing that is left, and what nothing that is left imports
        inner = {module for module in left if others[module] & left and any(module in others[other] for other in left)}
        if inner == left:
            return sorted(left)
        left = inner


def naming(root: Path, dotted: str, allowed: str) -> list[str]:
    """Places outside `allowed` that name `dotted` (torch.distributed, say) in code: imported, or as an attribute."""
    places = []
    for module, path in modules(root).items():
        if f"{module}.".startswith(f"{allowed}."):
            continue
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        used = {node.lineno for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node) == dotted}
        used |= {line for line, name in imported(path, root) if f"{name}.".startswith(f"{dotted}.")}
        places += [f"{module}:{line}: names {dotted}" for line in sorted(used)]
    return places


def tree_faults(root: Path) -> list[str]:
    """Where the README's tree and the files differ."""
    text = (root / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^## The tree\n.*?^```[^\n]*\n(.*?)^```", text, re.S | re.M)
    if not block:
        return ["README.md has no fenced block after '## The tree'"]
    faults, listed, above = [], set(), []
    for line in filter(str.strip, block[1].splitlines()):
        bare = re.sub(r"[│├└─]", " ", line)
        indent, name = len(bare) - len(bare.lstrip()), bare.split()[0]
        above = [(depth, folder) for depth, folder in above if depth < indent]
        path = Path(*(folder for _, folder in above), name)
        listed.add(path)
        if not ((root / path).is_dir() if name.endswith("/") else (root / path).is_file()):
            faults.append(f"{path} is in the tree and not there")
        if name.endswith("/"):
            above.append((indent, name))
    for folder in {path.parent for path in listed} - {Path()}:
        files = {path.relative_to(root) for path in (root / folder).glob("*.py") if not path.name.startswith("__")}
        faults += [f"{path} is there and not in the tree" for path in sorted(files - listed)]
    return faults


def test_imports_point_one_way():
    assert wrong_ways(ROOT) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circle(ROOT) == []


def test_only_the_capture_names_cuda_graphs_and_only_ops_names_process_groups():
    assert naming(ROOT, "torch.cuda.CUDAGraph", "engine.capture") + naming(ROOT, "torch.distributed", "ops") == []


def test_the_readmes_tree_is_the_tree():
    if not (ROOT / "README.md").exists():
        pytest.skip("README.md is not written yet")
    assert tree_faults(ROOT) == []


@pytest.mark.parametrize("module", ["config", "errors", "cli", "ops.checkpoint", "ops.progress"])
def test_the_doors_load_no_torch(module):
    if module not in modules(ROOT):
        pytest.skip(f"graphcap.{module} is not written yet")
    program = f"import sys, graphcap.{module}; print(sorted({{'torch', 'transformers', 'tqdm'}} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr


def house(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"graphcap/__init__.py": "", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    "name, text",
    [
        ("graphcap/model/loss.py", "from graphcap.engine import step"),
        ("graphcap/model/loss.py", "def f():\n    import graphcap.ops.report"),
        ("graphcap/engine/step.py", "from ..ops.report import x"),
        ("graphcap/errors.py", "from graphcap import config"),
        ("graphcap/ops/report.py", "from graphcap.cli import main"),
        ("graphcap/ops/report.py", "from tools import bench"),
        ("graphcap/utils.py", ""),
    ],
)
def test_must_fail_an_import_that_points_up_is_found(tmp_path, name, text):
    names = ("config", "errors", "cli", "engine/step", "ops/report", "model/loss")
    files = {f"graphcap/{path}.py": "" for path in names}
    assert wrong_ways(house(tmp_path, files)) == []
    assert len(wrong_ways(house(tmp_path, files | {name: text}))) == 1


def test_must_fail_a_circle_is_found(tmp_path):
    for name, text in {"a": "from graphcap.ops.b import x", "b": "", "c": "from . import a"}.items():
        house(tmp_path, {f"graphcap/ops/{name}.py": text})
    for text in ("", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import y"):
        assert circle(house(tmp_path, {"graphcap/ops/b.py": text})) == []
    assert circle(house(tmp_path, {"graphcap/ops/b.py": "def f():\n    from .a import y"})) == ["ops.a", "ops.b"]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nx = torch.distributed.get_rank()",
        "import torch.distributed as d",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "def f():\n    import torch.distributed.checkpoint",
    ],
)
def test_must_fail_a_process_group_outside_ops_is_found(tmp_path, text):
    files = {"graphcap/ops/topology.py": text, "graphcap/train.py": '"""torch.distributed is only in ops."""'}
    assert naming(house(tmp_path, files), "torch.distributed", "ops") == []
    assert len(naming(house(tmp_path, files | {"graphcap/engine/step.py": text}), "torch.distributed", "ops")) == 1


@pytest.mark.parametrize("text", ["import torch\ng = torch.cuda.CUDAGraph()", "from torch.cuda import CUDAGraph"])
def test_must_fail_a_cuda_graph_outside_the_capture_is_found(tmp_path, text):
    files = {"graphcap/engine/capture.py": text, "graphcap/engine/capture_other.py": ""}
    assert naming(house(tmp_path, files), "torch.cuda.CUDAGraph", "engine.capture") == []
    files["graphcap/engine/capture_other.py"] = text
    assert len(naming(house(tmp_path, files), "torch.cuda.CUDAGraph", "engine.capture")) == 1


TREE = """# x
## The tree
some words
```
setup.cfg      metadata
graphcap/      the package
  cli.py       the door
  ops/         processes
    report.py  says it
runs/
```
"""


@pytest.mark.parametrize(
    "change, fault",
    [
        ({}, None),
        ({"graphcap/ops/new.py": ""}, "graphcap/ops/new.py is there and not in the tree"),
        ({"README.md": TREE.replace("says it", "says it\n    old.py")}, "graphcap/ops/old.py is in the tree and not there"),
        ({"README.md": TREE.replace("  ops/ ", "├── ops/").replace("    report", "│   └── report")}, None),
        ({"README.md": "# x"}, "README.md has no fenced block after '## The tree'"),
    ],
)
def test_must_fail_a_tree_that_differs_from_the_files_is_found(tmp_path, change, fault):
    empty = dict.fromkeys(("setup.cfg", "graphcap/cli.py", "graphcap/ops/report.py", "runs/tiny.toml"), "")
    assert tree_faults(house(tmp_path, {"README.md": TREE, **empty, **change})) == ([fault] if fault else [])
