"""The laws of the source tree: who may import whom, what must start fast, how files look.

Read from the syntax trees, so that imports hidden inside functions count as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
FILES = sorted(SRC.rglob("*.py"))

# A room may import from its own row and from those below.
ROWS = (
    {"freight", "__main__"},
    {"entrypoints"},
    {"jobs"},
    {"distributed"},
    {"runtime"},
    {"memory", "plan"},
    {"partition"},
    {"hardware", "model", "kernels"},
    {"errors", "quantities", "demo"},
)
STRANGERS = {("memory", "plan"), ("plan", "memory"), ("memory", "model"), ("memory", "partition")}
HEAVY = {"torch", "transformers"}
LIGHT_ROOMS = {"plan", "hardware", "partition"}
LIGHT_MODEL = {
    f"freight.model.{name}" for name in ("config", "families", "programme", "checkpoint", "batch")
}
MOST_LINES = 450
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "base"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def row(module: str) -> int:
    return next(index for index, rooms in enumerate(ROWS) if room(module) in rooms)


MODULES = {module_name(path): path for path in FILES}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(module: str) -> frozenset[str]:
    """Every module that a module imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(tree(MODULES[module])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import in line {node.lineno}"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else node.module)
    return frozenset(found)


def own_imports(module: str) -> Iterator[str]:
    return (name for name in imports(module) if name in MODULES)


def reached(module: str) -> set[str]:
    """All modules, foreign ones by their first name, that a module can come to import."""
    seen: set[str] = set()
    open_ = [module]
    while open_:
        name = open_.pop()
        if name not in seen:
            seen.add(name)
            open_ += imports(name) if name in MODULES else ()
    return {name if name in MODULES else name.split(".")[0] for name in seen}


def light_modules() -> list[str]:
    return [
        name
        for name in MODULES
        if (room(name) in LIGHT_ROOMS and name != "freight") or name in LIGHT_MODEL
    ]


def in_python(source: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SRC)!r})\n{source}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def loaded_by(source: str, names: set[str]) -> list[str]:
    report = f"\nprint('\\n'.join(sorted({names!r} & set(sys.modules))))"
    return in_python(source + report).split()


def test_every_room_has_its_row() -> None:
    rooms = {room(name) for name in MODULES}
    assert rooms <= set().union(*ROWS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    for other in own_imports(module):
        assert row(other) >= row(module), f"{module} imports {other}, which is above it"
        assert (room(module), room(other)) not in STRANGERS, f"{module} imports {other}"


def test_no_module_imports_itself_over_others() -> None:
    for module in MODULES:
        for other in own_imports(module):
            if module != "freight":  # its names are imported when they are used
                assert module not in reached(other), f"{module} and {other} import each other"


@pytest.mark.parametrize("module", light_modules())
def test_planning_needs_no_torch(module: str) -> None:
    assert not HEAVY & reached(module)


def test_planning_needs_no_torch_in_truth_either() -> None:
    source = "\n".join(f"import {module}" for module in light_modules())
    assert light_modules()
    assert loaded_by(source, HEAVY) == []


@pytest.mark.parametrize(
    "source",
    [
        "import freight",
        "from freight.entrypoints.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from freight.entrypoints.cli import main\n"
        "try: main(['run', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_help_answers_at_once(source: str) -> None:
    heavy = HEAVY | {"numpy", "tokenizers", "jinja2", "huggingface_hub", "tqdm", "triton", "numba"}
    quiet = (
        f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n exec({source!r})"
    )
    assert loaded_by(quiet, heavy) == []


def test_computing_without_a_device_needs_no_triton() -> None:
    assert loaded_by("import freight.runtime.engine, freight.runtime.profiler", {"triton"}) == []


def test_naming_a_model_needs_no_torch() -> None:
    assert loaded_by("from freight import LLM, SamplingParams", HEAVY) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_files_are_short_and_say_what_they_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert path.stem not in VAGUE
    if text and not text.isspace():
        assert ast.get_docstring(tree(path)), "the file opens without a docstring"


def test_only_entrypoints_print() -> None:
    for module, path in MODULES.items():
        if room(module) == "entrypoints":
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{module} prints in line {node.lineno}"


@pytest.mark.parametrize("module", [name for name, p in MODULES.items() if p.stem != "__init__"])
def test_public_names_are_listed_and_exist(module: str) -> None:
    body = tree(MODULES[module]).body
    defined = set().union(*map(_names, body))
    listed = [
        ast.literal_eval(node.value)
        for node in body
        if isinstance(node, ast.Assign) and _names(node) == {"__all__"}
    ]
    assert len(listed) == 1, "it has no __all__"
    assert set(listed[0]) <= defined
    assert len(set(listed[0])) == len(listed[0])


def _names(node: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Assign():
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name()):
            return {node.target.id}
        case ast.Import() | ast.ImportFrom():
            return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        case ast.If() | ast.Try():
            return set().union(*map(_names, node.body))
        case _:
            return set()


def names_of_models() -> set[str]:
    """What models are called: families, architectures and types of configurations."""
    from freight.model.families import FAMILIES

    tables = FAMILIES.values()
    told = (own for table in tables for own in (*table.architectures, *table.model_types))
    return {name.lower() for name in (*FAMILIES, *told)}


def constants(node: ast.AST) -> Iterator[str]:
    for own in ast.walk(node):
        if isinstance(own, ast.Constant) and isinstance(own.value, str):
            yield own.value.lower()


@pytest.mark.parametrize("module", MODULES)
def test_nothing_asks_what_a_model_is_called(module: str) -> None:
    """Models differ by what their tables say; a name is looked up, never compared."""
    tests: list[ast.AST] = []
    for node in ast.walk(tree(MODULES[module])):
        if isinstance(node, ast.Compare | ast.MatchValue):
            tests.append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asks = node.func.attr in ("startswith", "endswith", "__contains__", "count", "find")
            tests += node.args if asks else []
    asked = {name for test in tests for name in constants(test)} & names_of_models()
    assert not asked, f"{module} asks for {', '.join(sorted(asked))}"


def test_a_family_is_a_short_table() -> None:
    sizes = {
        path.stem: node.end_lineno - node.lineno + 1
        for path in (SRC / "freight" / "model" / "families").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Family"
        and node.end_lineno is not None
    }
    assert len(sizes) > 8 and max(sizes.values()) < 60
