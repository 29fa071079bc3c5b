"""The cache: many processes at once, killed builders, damaged entries, folders that cannot be used."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from framework.data.cache import Cache, entry_problem, user_cache_root

SETTINGS = {"content": "abc", "size": 3}

# argv: root, log file, seconds the build takes. Appends to the log when a build starts, makes the file `waiting` beside
# it when it waits for another process, and prints what was read.
BUILDER = """
import pathlib, sys, time
from framework.data.cache import Cache
root, log, seconds = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), float(sys.argv[3])

def build(folder, notify):
    (folder / "half.bin").write_bytes(b"half")
    with open(log, "a") as file:
        file.write("build\\n")
    for tick in range(10):
        notify("working", tick, 10)
        time.sleep(seconds / 10)
    (folder / "whole.bin").write_bytes(b"whole")

def notify(stage, done, total):
    stages.add(stage)
    if "another process" in stage:
        log.with_name("waiting").touch()

stages = set()
cache = Cache(root=root, fallback=root / "fallback", notify=notify)
entry = cache.get("test", {"content": "abc", "size": 3}, build)
print((entry.path / "whole.bin").read_text(), sorted(stages))
"""


def start_builder(root: Path, log: Path, *, seconds: float) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(root), str(log), str(seconds)], stdout=subprocess.PIPE, text=True
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def quiet(stage: str, done: float, total: float) -> None:
    pass


class CountedBuild:
    """Writes one file, and counts how often it was asked to."""

    def __init__(self, text: str = "whole") -> None:
        self.text = text
        self.num_builds = 0

    def __call__(self, folder: Path, notify) -> None:
        self.num_builds += 1
        (folder / "whole.bin").write_text(self.text)


def cache_at(root: Path | None, tmp_path: Path) -> Cache:
    return Cache(root=root, fallback=tmp_path / "fallback", notify=quiet)


def test_an_entry_is_built_once_and_found_again(tmp_path):
    build = CountedBuild()
    first = cache_at(tmp_path / "root", tmp_path).get("test", SETTINGS, build)
    second = cache_at(tmp_path / "root", tmp_path).get("test", dict(reversed(SETTINGS.items())), build)
    assert first == second
    assert build.num_builds == 1
    assert first.notices == ()
    assert not (tmp_path / "fallback").exists()


def test_every_setting_and_the_kind_are_part_of_the_key(tmp_path):
    build = CountedBuild()
    cache = cache_at(tmp_path / "root", tmp_path)
    paths = {
        cache.get(kind, settings, build).path
        for kind, settings in [("a", SETTINGS), ("b", SETTINGS), ("a", {**SETTINGS, "size": 4}), ("a", {"size": 3})]
    }
    assert len(paths) == build.num_builds == 4


def test_of_several_processes_one_builds_and_the_others_wait_and_see_its_progress(tmp_path):
    root, log = tmp_path / "root", tmp_path / "log"
    processes = [start_builder(root, log, seconds=1.5) for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert log.read_text() == "build\n"
    assert all(output.startswith("whole ") for output in outputs)
    assert sum("'working'" in output for output in outputs) == 1
    assert any("working (another process)" in output for output in outputs)


def test_a_builder_killed_in_the_middle_leaves_nothing_to_read_and_the_next_one_builds(tmp_path):
    root, log = tmp_path / "root", tmp_path / "log"
    victim = start_builder(root, log, seconds=60)
    wait_for(log)
    waiter = start_builder(root, log, seconds=0)
    wait_for(tmp_path / "waiting")
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=20)
    output, _ = waiter.communicate(timeout=20)
    assert waiter.returncode == 0
    assert output.startswith("whole ")
    assert log.read_text() == "build\nbuild\n"
    (entry,) = [path for path in root.iterdir() if path.is_dir()]  # the victim's folder is gone
    assert entry_problem(entry) is None
    assert sorted(path.name for path in entry.iterdir()) == ["half.bin", "manifest.json", "whole.bin"]


def truncate(entry: Path) -> None:
    (entry / "whole.bin").write_text("who")


def flip(entry: Path) -> None:
    (entry / "whole.bin").write_text("whose")


def remove_file(entry: Path) -> None:
    (entry / "whole.bin").unlink()


def remove_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


def garble_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text('{"files": [')


def empty_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text(json.dumps([]))


@pytest.mark.parametrize("damage", [truncate, flip, remove_file, remove_manifest, garble_manifest, empty_manifest])
def test_a_damaged_entry_is_rebuilt_with_a_notice(tmp_path, damage):
    build = CountedBuild()
    cache = cache_at(tmp_path / "root", tmp_path)
    path = cache.get("test", SETTINGS, build).path
    damage(path)
    again = cache.get("test", SETTINGS, build)
    assert build.num_builds == 2
    assert (again.path / "whole.bin").read_text() == "whole"
    assert len(again.notices) == 1
    assert "damaged" in again.notices[0]
    assert str(path) in again.notices[0]
    assert cache.get("test", SETTINGS, build).notices == ()
    assert [entry.name for entry in (tmp_path / "root").iterdir() if entry.is_dir()] == [path.name]


def test_a_failing_build_leaves_no_entry_and_raises_its_own_error(tmp_path):
    def build(folder: Path, notify) -> None:
        (folder / "half.bin").write_text("half")
        raise PermissionError("the user's file")

    cache = cache_at(tmp_path / "root", tmp_path)
    with pytest.raises(PermissionError, match="the user's file"):
        cache.get("test", SETTINGS, build)
    assert [entry for entry in (tmp_path / "root").iterdir() if entry.is_dir()] == []
    assert cache.get("test", SETTINGS, CountedBuild()).notices == ()


@pytest.mark.parametrize("place", ["file in the way", "no home"])
def test_a_folder_that_cannot_be_used_is_replaced_with_a_notice(tmp_path, place):
    (tmp_path / "file").write_text("")
    root = None if place == "no home" else tmp_path / "file" / "root"
    build = CountedBuild()
    entry = cache_at(root, tmp_path).get("test", SETTINGS, build)
    assert entry.path.parent == tmp_path / "fallback"
    assert "SHARDLIGHT_CACHE" in entry.notices[0]
    cache_at(root, tmp_path).get("test", SETTINGS, build)
    assert build.num_builds == 1


def test_a_disk_that_fills_up_while_building_moves_the_build_to_the_fallback(tmp_path):
    root = tmp_path / "root"

    def build(folder: Path, notify) -> None:
        (folder / "whole.bin").write_text("whole")
        if root in folder.parents:
            raise OSError(errno.ENOSPC, "No space left on device")

    entry = cache_at(root, tmp_path).get("test", SETTINGS, build)
    assert entry.path.parent == tmp_path / "fallback"
    assert "No space left" in entry.notices[0]
    assert [path for path in root.iterdir() if path.is_dir()] == []


def test_two_unusable_folders_are_an_error_that_names_both(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(root=tmp_path / "file" / "a", fallback=tmp_path / "file" / "b", notify=quiet)
    with pytest.raises(OSError, match=r"file/a cannot be used .* neither can .*file/b .*SHARDLIGHT_CACHE"):
        cache.get("test", SETTINGS, CountedBuild())


def test_the_users_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    for environ, expected in [
        ({}, Path("/home/someone/.cache/shardlight")),
        ({"XDG_CACHE_HOME": "/xdg"}, Path("/xdg/shardlight")),
        ({"XDG_CACHE_HOME": "relative"}, Path("/home/someone/.cache/shardlight")),
        ({"XDG_CACHE_HOME": "/xdg", "SHARDLIGHT_CACHE": "/own"}, Path("/own")),
        ({"SHARDLIGHT_CACHE": "own"}, tmp_path / "own"),
        ({"SHARDLIGHT_CACHE": "~/own"}, Path("/home/someone/own")),
    ]:
        assert user_cache_root(environ, base=tmp_path) == expected
    assert os.environ["HOME"] == "/home/someone"
