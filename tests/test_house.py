"""The rules that keep the project readable, checked on its syntax trees: who may import whom, sizes, no stubs."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("rlx", "kernels", "tests", "configs", "experiments", "bench")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 70

# A module imports from its own row and the rows above it. What is in no row (rlx.train, rlx.cli, ...) is the top row.
ROWS = (
    "rlx_kernels",
    "rlx.types",
    "rlx.config",
    "rlx.algos",
    "rlx.parallel",
    "rlx.models",
    "rlx.learner",
    "rlx.sandbox",
    "rlx.envs",
    "rlx.rollout",
    "rlx.agents",
    "rlx.sessions",
    "rlx.sync",
    "rlx.data",
    "rlx.metrics",
    "rlx.proxy",
)
HOST = (
    "rlx.types",
    "rlx.config",
    "rlx.sandbox",
    "rlx.envs",
    "rlx.rollout",
    "rlx.agents",
    "rlx.sessions",
    "rlx.data",
    "rlx.metrics",
    "rlx.proxy",
)
DEVICE_IN_HOST = ("rlx.rollout.local", "rlx.rollout.lanes")
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax"}
CONFIG_EDGE = ("rlx.config.parse", "rlx.config.flags")
# Scripts that run in the engines' environment, which has torch and neither rlx nor its Python.
ENGINE_ENVIRONMENT = "rlx.engine_env"
ENGINE_LIBRARIES = {"torch", "sglang"}


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of rlx and rlx_kernels by its dotted name."""
    found = {}
    for folder in (ROOT / "rlx", ROOT / "kernels" / "rlx_kernels"):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def imported(node: ast.AST, module: str) -> Iterator[str]:
    """Dotted names that an import statement of `module` brings in, the project's own as far as they are modules."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = module if modules().get(module, Path()).name == "__init__.py" else module.rpartition(".")[0]
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, node.module] if node.module else above)
        for alias in node.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(module: str, at_run_time: bool = False) -> set[str]:
    """What `module` imports anywhere in its file; `at_run_time` leaves out blocks for type checkers."""
    found: set[str] = set()
    pending: list[ast.AST] = [tree(modules()[module])]
    while pending:
        node = pending.pop()
        if not (at_run_time and is_type_checking(node)):
            found |= set(imported(node, module))
            pending += ast.iter_child_nodes(node)
    return found


def row(module: str) -> int:
    return next((i for i, package in enumerate(ROWS) if within(module, package)), len(ROWS))


def is_host(module: str) -> bool:
    return any(within(module, h) for h in HOST) and module not in DEVICE_IN_HOST


def test_modules_import_only_from_their_own_row_and_the_rows_above():
    wrong = [
        f"{module} (row {row(module)}) imports {name} (row {row(name)})"
        for module in modules()
        for name in imports(module)
        if name in modules() and name != "rlx" and row(name) > row(module)
    ]
    assert wrong == []


def test_kernels_import_nothing_of_rlx():
    wrong = {m: n for m in modules() if within(m, "rlx_kernels") for n in imports(m) if within(n, "rlx")}
    assert wrong == {}


def test_no_module_imports_itself_over_others():
    graph = {m: {n for n in imports(m) if n in modules()} for m in modules()}
    cycles = []
    for start in graph:
        seen: set[str] = set()
        pending = list(graph[start])
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                pending += graph[name]
        if start in seen:
            cycles.append(start)
    assert cycles == []


def test_host_modules_reach_no_device_library():
    def reached(module: str, seen: set[str]) -> Iterator[str]:
        """'a <- b': library a, imported by module b."""
        seen.add(module)
        for name in imports(module, at_run_time=True):
            if name.split(".")[0] in DEVICE_LIBRARIES:
                yield f"{name} <- {module}"
            elif name in modules() and name not in seen:
                yield from reached(name, seen)

    wrong = {module: found for module in modules() if is_host(module) and (found := sorted(reached(module, set())))}
    assert wrong == {}


def test_host_modules_load_no_device_library():
    """The same at run time, libraries' own imports included. grain imports jax: its users are only read above."""
    names = ["rlx", *(m for m in modules() if is_host(m) and "grain" not in {n.split(".")[0] for n in imports(m)})]
    code = f"import sys, importlib\nfor name in {names!r}:\n    importlib.import_module(name)\n"
    code += f"    found = sorted(set(sys.modules) & {DEVICE_LIBRARIES!r})\n"
    code += "    if found: sys.exit(f'importing {name} loads {found}')\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_engines_environment_and_this_one_do_not_mix():
    wrong = []
    for module in modules():
        inside, names = within(module, ENGINE_ENVIRONMENT), imports(module)
        if inside:
            wrong += [f"{module} imports {name}" for name in names if within(name, "rlx")]
        else:
            wrong += [f"{module} imports {name}" for name in names if within(name, ENGINE_ENVIRONMENT)]
            wrong += [f"{module} imports {name}" for name in names if name.split(".")[0] in ENGINE_LIBRARIES]
    assert wrong == []


def test_init_files_import_nothing():
    """Two kinds of names for one thing is one too many; a package of kernels re-exports its interface."""
    inits = {m: imports(m) for m, path in modules().items() if path.name == "__init__.py"}
    wrong = {
        m: names
        for m, names in inits.items()
        if names and not (within(m, "rlx_kernels") and all(within(n, m) and m != "rlx_kernels" for n in names))
    }
    assert wrong == {}


def undescribed() -> list[str]:
    """Modules of rlx that docs/design.md's table does not name in the row of their package (the last row, `top`)."""
    lines = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").splitlines()
    cells = [line.split("|")[1:3] for line in lines if line.startswith("| ")]
    named = {
        place.strip(" `").removesuffix(".py").replace("/", "."): set(re.findall(r"\w+", files))
        for place, files in cells
    }
    wrong = []
    for module in modules():
        package, _, name = module.rpartition(".")
        if module not in named and within(module, "rlx") and modules()[module].name != "__init__.py":
            wrong += [] if name in named.get(package, named["top"]) else [module]
    return wrong


def test_the_page_on_the_design_names_every_module():
    assert undescribed() == []


def test_ml_collections_stays_at_the_edge():
    users = {m for m in modules() if any(within(name, "ml_collections") for name in imports(m))}
    assert users <= set(CONFIG_EDGE)


def test_files_are_short():
    lines = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    assert {name: n for name, n in lines.items() if n > MAX_FILE_LINES} == {}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def test_functions_are_short():
    lengths = {
        f"{relative(path)}:{f.lineno} {f.name}": (f.end_lineno or 0) - f.lineno + 1
        for path in sources()
        for f in functions(path)
        if not (path.parent.name == "configs" and f.name == "get_config")  # a table of settings
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


def is_empty(body: list[ast.stmt]) -> bool:
    """Nothing but `pass`, `...` and strings."""
    return all(isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)) for s in body)


def stubs(path: Path) -> Iterator[str]:
    classes = [c for c in ast.walk(tree(path)) if isinstance(c, ast.ClassDef)]
    protocols = [c for c in classes if any("Protocol" in ast.unparse(base) for base in c.bases)]
    declared = {member for c in protocols for member in c.body}
    written = [f for f in functions(path) if f not in declared]
    yield from (f"{relative(path)}:{f.lineno}: {f.name} does nothing" for f in written if is_empty(f.body))
    for node in ast.walk(tree(path)):
        where = f"{relative(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Name) and node.id == "NotImplementedError":
            yield f"{where}: NotImplementedError"
        if isinstance(node, ast.ExceptHandler) and (node.type is None or is_empty(node.body)):
            yield f"{where}: an exception is swallowed"
    markers = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        yield from (f"{relative(path)}:{number}: {marker}" for marker in markers if marker in line)


def test_nothing_is_a_stub_and_no_exception_is_swallowed():
    assert [stub for path in sources() for stub in stubs(path)] == []


def called(node: ast.AST) -> set[str]:
    """The last part of the name of everything that is called in `node`."""
    calls = [ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)]
    return {name.rpartition(".")[2] for name in calls}


def unasserted(path: Path) -> Iterator[str]:
    """Test functions that neither assert nor call what does: pytest.raises, assert_allclose, a `check`, a helper."""
    asserting = {"raises", "warns", "fail", "run_state_machine_as_test"}
    pending = list(functions(path))
    while grown := [
        f
        for f in pending
        if any(isinstance(n, ast.Assert) for n in ast.walk(f))
        or any(name in asserting or name.startswith(("assert_", "check")) for name in called(f))
    ]:
        asserting |= {f.name for f in grown}
        pending = [f for f in pending if f not in grown]
    yield from (f"{relative(path)}:{f.lineno} {f.name}" for f in pending if f.name.startswith("test_"))


def test_every_test_can_fail():
    files = [path for path in sources() if path.name.startswith("test_")]
    assert [name for path in files for name in unasserted(path)] == []


@pytest.mark.parametrize(
    "text, found",
    [
        ("def f():\n    '''Words.'''\n    ...\n", "f does nothing"),
        ("def f():\n    raise NotImplementedError\n", "NotImplementedError"),
        ("try:\n    f()\nexcept OSError:\n    pass\n", "an exception is swallowed"),
        ("try:\n    f()\nexcept:\n    g()\n", "an exception is swallowed"),
        ("x = 1  # TO" + "DO later\n", "TO" + "DO"),
    ],
)
def test_stubs_are_found(tmp_path, monkeypatch, text, found):
    path = tmp_path / "file.py"
    path.write_text(text)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (line,) = stubs(path)
    assert line.endswith(found)


def test_tests_without_assertions_are_found(tmp_path, monkeypatch):
    path = tmp_path / "test_file.py"
    path.write_text(
        "def same(a, b):\n    assert a == b\n"
        "def test_a():\n    same(1, 1)\n"
        "def test_b():\n    print(1)\n"
        "def test_c():\n    with pytest.raises(ValueError):\n        f()\n"
        "def test_d():\n    np.testing.assert_allclose(1, 1)\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert list(unasserted(path)) == ["test_file.py:5 test_b"]
