"""Rules about the code itself: who imports whom, what an import costs, sizes, names, private API, package names."""

import ast
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from support.private_names import private_names
from support.source_files import PACKAGES, ROOT, files_of_tests, functions, imports, module_name, modules, shown, tree

MAY_IMPORT = {
    "kernels": {"kernels"},
    "models": {"kernels", "models"},
    "strategies": {"kernels", "strategies"},
    "framework": {"kernels", "models", "strategies", "framework"},
}
# Packages that only some of our folders may import; all other files may not, at any depth.
CONFINED = {
    "hydra": ("framework/",),
    "omegaconf": ("framework/",),
    "lightning": ("framework/", "strategies/lightning/"),
    "pytorch_lightning": (),
    "transformers": (),
    "datasets": ("framework/data/hf_corpus.py",),
    "tokenizers": ("framework/data/",),
    "safetensors": ("framework/",),
    "wandb": ("framework/tracking.py",),
    "rich": ("framework/",),
}
MOST_FILE_LINES, MOST_FUNCTION_LINES = 500, 99
NAMELESS = re.compile(r"(utils?|helpers?|common|misc|tools?|stuff|base|core|main|lib|shared)\d*$")
# Private names of other packages: file or folder -> name -> why there is no public way.
PRIVATE = {
    "framework/composition.py": {
        "hydra._internal.config_loader_impl.ConfigLoaderImpl": "the compose API cannot list a group's options",
        "hydra._internal.utils.create_config_search_path": "the compose API cannot add --config-dir",
        "hydra._internal.utils.get_args_parser": "Hydra's own flags, read before Hydra runs",
    },
    "framework/overrides.py": {
        "hydra._internal.core_plugins.basic_sweeper.BasicSweeper": "the default sweeper as a config names it",
    },
    "strategies/lightning/": {
        "_apply": "a module that overrides how it is moved has something to move",
        "torch.nn.modules.batchnorm._BatchNorm": "the common class of BatchNorm1d, 2d and 3d",
        "lightning.fabric.utilities.device_dtype_mixin._update_properties": "what LightningModule.device says",
        "lightning.pytorch.core.optimizer._MockOptimizer": "what a module without an optimizer is given",
        "lightning.pytorch.plugins.precision.precision.Precision._after_closure": "where Lightning hands over to hooks",
        "lightning.pytorch.plugins.precision.precision.Precision._clip_gradients": "its one call for clipping",
        "lightning.pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher": "what launches all",
        "lightning.pytorch.strategies.parallel.ParallelStrategy._layer_sync": "Trainer(sync_batchnorm=True)",
        "lightning.pytorch.strategies.strategy.Strategy._configure_launcher": "where a strategy chooses its launcher",
        "lightning.pytorch.strategies.strategy.Strategy._launcher": "set by _configure_launcher",
        "lightning.pytorch.strategies.strategy.Strategy._lightning_optimizers": "the wrappers Lightning calls",
    },
    "strategies/zero/discover.py": {
        "_no_split_modules": "how Hugging Face models declare their blocks",
    },
    "strategies/zero/torch_private.py": {  # each with its reason in the file
        "_modules": "a walk over them in each pass, without names; a child called as torch.compile's wrapper calls it",
        "_parameters": "the same",
        "_backward_hooks": "the order of a tensor's hooks, which registering cannot choose",
        "torch._C": "the home of the next two",
        "torch._C._current_graph_task_id": "two backwards through one graph are told apart by nothing else",
        "torch._C._autograd": "the home of _unsafe_set_version_counter",
        "torch._C._autograd._unsafe_set_version_counter": "its public wrapper only restores a counter after a block",
        "torch.utils._python_dispatch._disable_current_modes": "selective checkpointing must not see our copies",
        "torch.autograd.Variable._execution_engine": "a callback for the end of a backward, as DDP and FSDP2 use it",
    },
}
# Reads which distributions and top-level names are to be absent, and which modules to import.
IMPORT_WITHOUT_EXTRAS = """
import importlib, json, sys

distributions, absent, names = json.loads(sys.stdin.read())


class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *where):
        return None if name.split(".")[0] in absent else self.finder.find_spec(name, *where)

    def find_distributions(self, *context):
        found = getattr(self.finder, "find_distributions", lambda *_: [])(*context)
        return (each for each in found if each.metadata["Name"] not in distributions)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = map(Without, sys.meta_path)
for name in names:
    importlib.import_module(name)
"""
FILES = modules()
IDS = [shown(path) for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_follow_the_layers(path):
    package = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        top = name.split(".")[0]
        if top in PACKAGES:
            allowed = MAY_IMPORT[package]
            assert top in allowed, f"{shown(path)} imports {name}; {package} may import {allowed}"
        if top in CONFINED:
            assert shown(path).startswith(CONFINED[top]), f"{shown(path)} imports {name}; allowed in {CONFINED[top]}"


def test_only_the_door_of_strategies_names_its_lightning_part():
    for path in FILES:
        if shown(path).startswith("strategies/") and not shown(path).startswith("strategies/lightning/"):
            named = [name for name in imports(path) if name.startswith("strategies.lightning")]
            assert shown(path) == "strategies/__init__.py" or not named, f"{shown(path)} imports {named}"


def test_the_packages_themselves_import_nothing_heavy():
    for package in PACKAGES:
        path = ROOT / package / "__init__.py"
        if package == "strategies":  # names to look up when asked for
            assert {name.split(".")[0] for name in imports(path, at_import=True)} <= {*sys.stdlib_module_names, package}
        else:
            (docstring,) = tree(path).body
            assert isinstance(docstring, ast.Expr)
            assert isinstance(docstring.value, ast.Constant)


@pytest.mark.parametrize("path", [*FILES, *files_of_tests()], ids=shown)
def test_files_and_functions_are_short_and_named_for_what_they_hold(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MOST_FILE_LINES, f"{shown(path)} has {lines} lines, allowed are {MOST_FILE_LINES}"
    long = [(name, length) for name, length in functions(path) if length > MOST_FUNCTION_LINES]
    assert not long, f"{shown(path)}: {long} have more than {MOST_FUNCTION_LINES} lines"
    for part in path.relative_to(ROOT).with_suffix("").parts:
        assert not NAMELESS.match(part), f"{shown(path)}: {part} does not say what is in it"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(tree(path)), f"{shown(path)} has no docstring"


def test_every_module_imports_with_the_base_dependencies_alone():
    base, todo = set(), [Requirement("shardlight")]
    while todo:
        requirement = todo.pop()
        key = (_normal(requirement.name), frozenset(requirement.extras))
        if key not in base:
            base.add(key)
            todo += _needed(requirement)
    allowed = {name for name, _ in base}
    extra = sorted({each.metadata["Name"] for each in importlib.metadata.distributions()
                    if _normal(each.metadata["Name"]) not in allowed})
    owners = importlib.metadata.packages_distributions()
    absent = sorted(top for top, names in owners.items() if set(names) <= set(extra))
    assert "pytest" in absent
    given = json.dumps([extra, absent, [module_name(path) for path in FILES]])
    command = [sys.executable, "-c", IMPORT_WITHOUT_EXTRAS]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def _normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def _needed(requirement):
    """What an installed distribution needs, with the extras that are asked for. Nothing for one that is not there."""
    try:
        texts = importlib.metadata.requires(requirement.name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    for text in texts:
        needed = Requirement(text)
        asked = [{"extra": extra} for extra in ("", *requirement.extras)]
        if needed.marker is None or any(needed.marker.evaluate(environment) for environment in asked):
            yield needed


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_private_names_of_other_packages_are_listed_with_a_reason(path):
    listed = {name for place, names in PRIVATE.items() if shown(path).startswith(place) for name in names}
    assert private_names(path) - listed == set(), f"{shown(path)}: list each name and its reason in PRIVATE"


@pytest.mark.parametrize("place", PRIVATE)
def test_listed_private_names_are_in_use(place):
    found = {name for path in FILES if shown(path).startswith(place) for name in private_names(path)}
    assert set(PRIVATE[place]) - found == set(), f"{place}: no longer used; fix: take it off PRIVATE"


# -- packaging ------------------------------------------------------------------------------------------------------


def test_every_package_travels_in_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {module_name(path) for path in FILES if path.name == "__init__.py"}
    assert set(settings["packages"]) == found | {"framework.conf"}
    assert {path.parent.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)


def test_our_version_is_not_taken_for_hugging_faces_kernels():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version.startswith("0.1.")
    assert importlib.metadata.version("shardlight") == version, "reinstall: pip install -e '.[dev]'"


@pytest.mark.parametrize("where", ["the checkout", "an empty folder"])
def test_transformers_finds_no_hugging_face_kernels(where, tmp_path):
    pytest.importorskip("transformers")
    script = (
        "import sys\n"
        "import transformers.modeling_utils\n"
        "from transformers.utils import is_kernels_available\n"
        "assert not is_kernels_available()\n"
        "assert 'kernels' not in sys.modules, 'transformers has imported our kernels'\n"
        "import kernels\n"
        "print(kernels.__file__)\n"
    )
    folder = ROOT if where == "the checkout" else tmp_path
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.split()[-1]) == Path(importlib.util.find_spec("kernels").origin)
