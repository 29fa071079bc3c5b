"""The project's own Python files as syntax trees: what they import, how long they are."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("kernels", "models", "strategies", "framework")


def modules() -> list[Path]:
    """Every file of the four packages."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def files_of_tests() -> list[Path]:
    """Every file of the tests."""
    return sorted((ROOT / "tests").rglob("*.py"))


def shown(path: Path) -> str:
    """A path as people name it: `strategies/engine.py`."""
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """`strategies/zero/__init__.py` is `strategies.zero`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path, *, at_import: bool = False) -> Iterator[str]:
    """Dotted names that a file imports anywhere, by statement or by `import_module("...")`.

    `from a import b` gives `a.b`. `at_import` leaves out what stands in functions and under TYPE_CHECKING.
    """
    for node in _nodes(tree(path), at_import=at_import):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{shown(path)}:{node.lineno}: a relative import; fix: name the package"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(given.value) for given in node.args[:1] if isinstance(given, ast.Constant))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of every function, decorators not counted."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def _nodes(node: ast.AST, *, at_import: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        if not (at_import and later):
            yield child
            yield from _nodes(child, at_import=at_import)
