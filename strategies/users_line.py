"""Which line of the user's own code a thread is at: outside Python's library, torch, Lightning and this project."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

_ROOT = Path(__file__).resolve().parent.parent
_OURS = tuple(f"{_ROOT / package}{os.sep}" for package in ("framework", "kernels", "models", "strategies"))
_ENGINE = f"{_ROOT / 'strategies'}{os.sep}"
_LIBRARY = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_MACHINERY = tuple(f"{os.sep}{name}{os.sep}"
                   for name in ("torch", "lightning", "lightning_fabric", "pytorch_lightning"))


def users_line(thread: int) -> str:
    """`file:line in function` of the innermost frame of user code in this thread, with the text of the line.

    User code is what is not installed and not ours. Where there is none, as in a job whose model and data are this
    project's or another package's: the innermost frame that is not the engine, torch, Lightning or Python's library.
    """
    frame = sys._current_frames().get(thread)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    if not frames:
        return "no line (the thread that made the mesh has ended)"
    for is_users in (_is_own_script, _is_above_the_engine):
        for each in frames:
            if is_users(each.f_code.co_filename):
                return _shown(each)
    return _shown(frames[0])


def _is_own_script(file: str) -> bool:
    return not (file.startswith((*_OURS, *_LIBRARY, "<frozen ")) or any(part in file for part in _INSTALLED))


def _is_above_the_engine(file: str) -> bool:
    if file.startswith((_ENGINE, "<frozen ")) or any(part in file for part in _MACHINERY):
        return False
    return any(part in file for part in _INSTALLED) or not file.startswith(_LIBRARY)


def _shown(frame: FrameType) -> str:
    file, number = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(file, number).strip()
    place = f"{file.removeprefix(os.getcwd() + os.sep)}:{number} in {frame.f_code.co_name}"
    return f"{place}: `{source}`" if source else place
