"""Which names of other packages' private API a file uses.

Three ways lead to one: an import (`from hydra._internal...`), an attribute of something that is not ours
(`tensor._base`), and a class that derives from a foreign one and uses or overrides what that keeps private.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from support.source_files import module_name, tree

FOREIGN = ("torch", "lightning", "hydra", "omegaconf", "transformers", "datasets", "tokenizers", "wandb", "rich")
_DOTTED = re.compile(rf"\b(?:{'|'.join(FOREIGN)})(?:\.\w+)*\._[a-z]\w*(?:\.\w+)*")


def private_names(path: Path) -> set[str]:
    """Private names of foreign packages that the file uses, dotted where their home is known."""
    return {*_imported(path), *_attributes(path), *_spelled_out(path), *_inherited(path)}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if _is_foreign(name) and any(map(_is_private, name.split("."))))


def _attributes(path: Path) -> Iterator[str]:
    """Private attributes of anything but self and cls, and of names the file itself does not define."""
    module, own = tree(path), _own_names(path)
    standard = {alias.asname or alias.name for node in ast.walk(module) if isinstance(node, ast.Import)
                for alias in node.names if alias.name.split(".")[0] in sys.stdlib_module_names}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_self(node.value):
            owner = ast.unparse(node.value)
            if node.attr not in own and owner not in standard:
                yield f"{owner}.{node.attr}" if _is_foreign(owner) else node.attr


def _own_names(path: Path) -> set[str]:
    """Functions, classes, annotated fields and attributes of self in a file."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and _is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def _spelled_out(path: Path) -> Iterator[str]:
    """In strings: the name given to getattr and its like, and dotted paths."""
    own = _own_names(path)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and _is_private(str(name.value)) and name.value not in own:
                yield str(name.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            yield from _DOTTED.findall(node.value)


def _inherited(path: Path) -> Iterator[str]:
    module = importlib.import_module(module_name(path))
    for cls in vars(module).values():
        if not inspect.isclass(cls) or cls.__module__ != module.__name__:
            continue
        bases = [base for base in cls.__mro__ if _is_foreign(base.__module__)]
        used = _used_by(cls)
        for base in bases:
            theirs = {name for name in vars(base) if _is_private(name)} | _set_by(base)
            yield from (f"{base.__module__}.{base.__name__}.{name}" for name in used & theirs)


def _used_by(cls: type) -> set[str]:
    """Private names a class defines or touches on self."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_self(node.value)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {name for name in names if _is_private(name)}


def _set_by(base: type) -> set[str]:
    """Private attributes a foreign class sets on its instances."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(base)))
    except (OSError, TypeError):  # written in C
        return set()
    return {node.attr for node in ast.walk(body) if isinstance(node, ast.Attribute) and _is_self(node.value)
            and isinstance(node.ctx, ast.Store) and _is_private(node.attr)}


def _is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "super":
        return True
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_foreign(name: str) -> bool:
    return name.split(".")[0] in FOREIGN
