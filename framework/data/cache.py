"""A per-user folder of prepared data, shared by every rank of every job on the machine.

An entry is a folder named by a hash of its settings (content hash, sizes, library versions), so a change of any of
them is another entry and nothing is ever stale. One process builds an entry while the others wait:

    lock <entry>.lock  ->  look again  ->  build in .<entry>.building-<host>-<pid>  ->  manifest  ->  rename  ->  unlock

A rename is atomic, so an entry is there whole or not at all. The lock is `flock`: the kernel releases it when its
holder dies, however it dies, and the next process builds afresh. Each opening checks every file against the manifest;
an entry that was damaged is put aside and rebuilt.

Alternatives considered: building on rank 0 and a barrier behind it leaves several jobs and several nodes to race, and
needs a process group before there is data.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.data.corpus import Notify

MANIFEST = "manifest.json"
POLL_S = 0.2  # how often a waiting process looks again, and a building one writes its progress
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True)
class CacheEntry:
    """A complete, checked entry. `notices` tells the user what was out of the ordinary."""

    path: Path
    notices: tuple[str, ...] = ()


class _FolderUnusableError(Exception):
    """A cache folder cannot be written, locked, or holds no more."""


def user_cache_root(environ: Mapping[str, str], *, base: Path) -> Path | None:
    """SHARDLIGHT_CACHE (relative to `base`), else $XDG_CACHE_HOME/shardlight, else ~/.cache/shardlight.

    None when the user has no home folder.
    """
    if chosen := environ.get("SHARDLIGHT_CACHE"):
        return base / Path(chosen).expanduser()
    xdg = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification: a relative value is ignored
        return Path(xdg) / "shardlight"
    try:
        return Path.home() / ".cache" / "shardlight"
    except RuntimeError:
        return None


class Cache:
    """Entries below `root`, or below `fallback` where `root` cannot be used."""

    def __init__(self, *, root: Path | None, fallback: Path, notify: Notify) -> None:
        self._root = root
        self._fallback = fallback
        self._notify = notify

    def get(
        self, kind: str, settings: Mapping[str, Any], build: Callable[[Path, Notify], None]
    ) -> CacheEntry:
        """The entry for these settings; `build(folder, notify)` fills an empty folder if there is none.

        Any number of processes may call this at once; not collective. Raises what `build` raises, and OSError when
        neither folder can be used.
        """
        name = f"{kind}-{settings_key(settings)}"
        reason = "there is no home folder for a cache"
        if self._root is not None:
            try:
                return self._get_in(self._root, name, settings, build)
            except _FolderUnusableError as error:
                reason = f"the cache folder {self._root} cannot be used ({error})"
        fix = "set SHARDLIGHT_CACHE to a folder that can be written"
        try:
            entry = self._get_in(self._fallback, name, settings, build)
        except _FolderUnusableError as error:
            raise OSError(f"{reason}, and neither can {self._fallback} ({error}); {fix}") from error
        notice = f"{reason}: this run keeps its prepared data in {self._fallback}; {fix}"
        return CacheEntry(path=entry.path, notices=(notice, *entry.notices))

    def _get_in(
        self, root: Path, name: str, settings: Mapping[str, Any], build: Callable[[Path, Notify], None]
    ) -> CacheEntry:
        entry = root / name
        if entry_problem(entry) is None:  # needs no lock, and works in a folder that can only be read
            return CacheEntry(path=entry)
        with _locked(root, name, self._notify) as report:
            problem = entry_problem(entry)
            if problem is None:  # another process built it while this one waited
                return CacheEntry(path=entry)
            notices: tuple[str, ...] = ()
            if entry.exists():
                notices = (f"the cached data in {entry} was damaged ({problem}) and was prepared again",)
            self._build(root, name, settings, build, report)
            return CacheEntry(path=entry, notices=notices)

    def _build(
        self, root: Path, name: str, settings: Mapping[str, Any], build: Callable[[Path, Notify], None],
        report: Notify,
    ) -> None:
        """Build aside and publish; the lock is held. Leaves nothing behind when it fails."""
        _remove_leftovers(root, name)
        aside = root / f".{name}.building-{socket.gethostname()}-{os.getpid()}"
        try:
            with _folder_errors():
                aside.mkdir()
            build(aside, report)
            with _folder_errors():
                _write_manifest(aside, settings)
                _publish(aside, root / name)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise _FolderUnusableError(str(error)) from error
            raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # after the rename there is nothing of this name


def settings_key(settings: Mapping[str, Any]) -> str:
    """A short hash of the settings, independent of their order."""
    text = json.dumps(settings, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def entry_problem(entry: Path) -> str | None:
    """Why the entry cannot be used ("missing", or what is wrong with it); None when every file is as it was built."""
    try:
        manifest = json.loads((entry / MANIFEST).read_text("utf-8"))
        files = {str(name): (int(file["bytes"]), str(file["sha256"])) for name, file in manifest["files"].items()}
    except FileNotFoundError:
        return "its manifest is missing" if entry.exists() else "missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read: {error}"
    for name, (num_bytes, sha256) in files.items():
        try:
            with open(entry / name, "rb") as file:
                found_bytes = os.fstat(file.fileno()).st_size
                if found_bytes != num_bytes:
                    return f"{name} has {found_bytes} bytes instead of {num_bytes}"
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    return f"{name} does not match its checksum"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


@contextmanager
def _folder_errors() -> Iterator[None]:
    """Errors of the cache folder itself, as opposed to those of reading the user's data."""
    try:
        yield
    except OSError as error:
        raise _FolderUnusableError(str(error)) from error


@contextmanager
def _locked(root: Path, name: str, notify: Notify) -> Iterator[Notify]:
    """Hold the entry's lock. Yields a `notify` that also writes progress where waiting processes read it."""
    with _folder_errors():
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with _folder_errors():
            while not _try_lock(descriptor):
                notify(*_read_progress(descriptor))
                time.sleep(POLL_S)
            os.ftruncate(descriptor, 0)
        yield _ProgressWriter(descriptor, notify)
    finally:
        os.close(descriptor)  # releases the lock


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _ProgressWriter:
    """Passes progress on, and keeps the latest of it in the lock file for those who wait."""

    def __init__(self, descriptor: int, notify: Notify) -> None:
        self._descriptor = descriptor
        self._notify = notify
        self._stage = ""
        self._written_s = 0.0

    def __call__(self, stage: str, done: float, total: float) -> None:
        self._notify(stage, done, total)
        now_s = time.monotonic()
        if stage == self._stage and now_s - self._written_s < POLL_S:
            return
        self._stage, self._written_s = stage, now_s
        line = json.dumps([stage, done, total]).encode() + b"\n"
        try:
            os.pwrite(self._descriptor, line, 0)
        except OSError as error:
            # A full disk must not end the run over a progress line; the build itself meets the same error.
            if error.errno not in DISK_FULL:
                raise


def _read_progress(descriptor: int) -> tuple[str, float, float]:
    """What the lock's holder is doing, as it last wrote it; lines may be shorter than an older one they overwrote."""
    line = os.pread(descriptor, 4096, 0).partition(b"\n")[0]
    try:
        stage, done, total = json.loads(line)
        return f"{stage} (another process)", float(done), float(total)
    except (ValueError, TypeError):
        return "waiting for another process to prepare the data", 0, 0


def _write_manifest(folder: Path, settings: Mapping[str, Any]) -> None:
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
            files[path.relative_to(folder).as_posix()] = {"bytes": file.tell(), "sha256": digest}
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({"settings": dict(settings), "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _publish(aside: Path, entry: Path) -> None:
    """Give the finished folder its name. An entry in the way is damaged, or another machine's on a shared disk."""
    if entry.exists():
        broken = entry.with_name(f".{entry.name}.broken-{socket.gethostname()}-{os.getpid()}")
        entry.rename(broken)  # readers that have its files open keep them
        shutil.rmtree(broken, ignore_errors=True)
    try:
        aside.rename(entry)
    except OSError:
        # Some network disks do not share locks between machines: the same entry may have been published just now.
        if entry_problem(entry) is not None:
            raise
    descriptor = os.open(entry.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(root: Path, name: str) -> None:
    """Remove what killed builders on this machine left; another machine's may still be at work."""
    for pattern in (f".{name}.building-", f".{name}.broken-"):
        for folder in root.glob(f"{pattern}{socket.gethostname()}-*"):
            shutil.rmtree(folder, ignore_errors=True)
