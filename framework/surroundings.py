"""Rules about what lies around a run: input files, the run folder, packages. Run by `framework/validate.py`."""

from __future__ import annotations

import glob
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

from framework.benchmark.catalog import SAMPLES_FILE
from framework.config import AUTO, BenchmarkTask, FileLogger, HfDataset, RunConfig, TextDataset, TokensDataset
from framework.machine import Machine
from framework.problems import Problem, nearest
from framework.rules import rule


@rule("dataset.name")
def hugging_face_datasets_is_installed(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if isinstance(config.dataset, HfDataset) and not _installed("datasets"):
        fix = "pip install 'shardlight[hf]', or dataset=text"
        yield Problem("dataset", "hf", "needs the package datasets, which is not installed", fix)


@rule("logger.name")
def tensorboard_is_installed(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    wants = isinstance(config.logger, FileLogger) and config.logger.name == "tensorboard"
    if wants and not (_installed("tensorboard") or _installed("tensorboardX")):
        fix = "pip install 'shardlight[tensorboard]', or logger=csv"
        yield Problem("logger", "tensorboard", "needs the package tensorboard, which is not installed", fix)


@rule("dataset.path", "dataset.files")
def data_files_exist(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    dataset = config.dataset
    if isinstance(dataset, TokensDataset):
        if not Path(dataset.path).is_file():
            yield Problem("dataset.path", dataset.path, "no such file", _nearest_path("dataset.path", dataset.path))
        return
    if isinstance(dataset, HfDataset):
        path = dataset.path
        if path.startswith("/") and not Path(path).exists():
            yield Problem("dataset.path", path, "no such file or folder", _nearest_path("dataset.path", path))
        return
    if not isinstance(dataset, TextDataset):
        return
    if not dataset.files:
        yield Problem("dataset.files", [], "at least one file or pattern", "dataset.files=[notes.txt]")
    for pattern in dataset.files:
        if Path(pattern).is_dir():
            fix = f"dataset.files=['{pattern}/**/*.txt']"
            yield Problem("dataset.files", pattern, "a folder; files or patterns are needed", fix)
        elif not any(os.path.isfile(path) for path in glob.iglob(pattern, recursive=True)):
            yield Problem("dataset.files", pattern, "no such file", _nearest_path("dataset.files", pattern))


@rule("model.weights")
def weights_exist(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    path = config.model.weights
    if path is None:
        return
    if not Path(path).exists():
        yield Problem("model.weights", path, "no such file or folder", _nearest_path("model.weights", path))
    elif Path(path).is_dir() and not any(Path(path).glob("*.safetensors")):
        inside = next((str(found.parent) for found in sorted(Path(path).rglob("*.safetensors"))), None)
        fix = f"model.weights={inside}" if inside else "name a folder that holds one, e.g. <run>/checkpoints/final"
        yield Problem("model.weights", path, "a folder without a .safetensors file", fix)


@rule("run.dir")
def run_folder_can_be_made(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    if config.run.dir == AUTO:
        return
    path = Path(config.run.dir)
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    if not parent.is_dir():
        yield Problem("run.dir", str(path), f"{parent} is a file", "run.dir=auto, or a path with no file on its way")
    elif not os.access(parent, os.W_OK | os.X_OK):
        yield Problem("run.dir", str(path), f"{parent} cannot be written to", "run.dir=auto, or a folder of your own")
    elif (path / "summary.json").exists() and not _goes_on_there(config, path):
        free = next(name for name in (f"{path}-{count}" for count in range(2, 10**6)) if not Path(name).exists())
        allowed = "holds a finished run, which is never overwritten"
        yield Problem("run.dir", str(path), allowed, f"run.dir={free}, or run.dir=auto")


def _goes_on_there(config: RunConfig, path: Path) -> bool:
    """Whether the run adds to what the folder holds: samples of a benchmark are only ever added to."""
    return isinstance(config.task, BenchmarkTask) and (path / SAMPLES_FILE).exists()


def _installed(distribution: str) -> bool:
    """Asks the installed distributions: a folder of this name in the current directory is not the package."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _nearest_path(key: str, path: str) -> str:
    """The likeliest path meant: a name in the same folder, else the first folder of the path that is not there."""
    missing = Path(path)
    while not missing.parent.exists():
        missing = missing.parent
    names = [entry.name for entry in missing.parent.iterdir()] if missing.parent.is_dir() else []
    best = nearest(missing.name, names)
    if best is None:
        return f"{missing} does not exist; correct {key}"
    return f"{key}={missing.parent / best}" if missing == Path(path) else f"did you mean {missing.parent / best}?"
