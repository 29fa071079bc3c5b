"""Makes sure that `framework`, `strategies`, `kernels` and `models` are ours, before anything else imports them.

The names are common. `python -m` puts the current directory first on the path, so a folder of the user's own named
`models` would be taken for ours; moving the directory last is not enough, because an editable install is found by a
finder that comes after the whole path. So the four are imported from where this file lies, once, with nothing before.

A distribution named `kernels` (Hugging Face's) owns one of the names and cannot share an environment with us.
Standard library only: this runs before every other import.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

PACKAGES = ("framework", "strategies", "kernels", "models")
FOREIGN_DISTRIBUTION = "kernels"


def settle_import_path(directory: str | None) -> None:
    """Take `directory` (what `python -m` put first on the path) off the path, import our packages, put it back last.

    Raises SystemExit with a message, status 2, when a package is not ours.
    """
    home = str(Path(__file__).resolve().parent.parent)
    if directory is not None and sys.path and sys.path[0] == directory:
        del sys.path[0]
    sys.path.insert(0, home)
    try:
        for name in PACKAGES:
            importlib.import_module(name)
    except ImportError as error:
        _refuse([f"{error.name or error}: not found beside {home}/framework"])
    finally:
        sys.path.remove(home)
    if directory is not None and directory not in sys.path:
        sys.path.append(directory)
    reasons = environment_problems()
    if reasons:
        _refuse(reasons)


def environment_problems() -> list[str]:
    """Why this environment cannot run us, one line each; empty when it can."""
    home = Path(__file__).resolve().parent.parent
    reasons = []
    for name in PACKAGES:
        file = getattr(sys.modules.get(name) or importlib.import_module(name), "__file__", None)
        if file is None or Path(file).resolve().parent != home / name:
            found = file or "a folder without __init__.py"
            reasons.append(f"the package {name} is {found}, not {home / name}: rename or remove the other one")
    if _installed(FOREIGN_DISTRIBUTION):
        reasons.append(
            f"the distribution {FOREIGN_DISTRIBUTION} is installed and owns our package name {FOREIGN_DISTRIBUTION}: "
            f"pip uninstall {FOREIGN_DISTRIBUTION}, then reinstall shardlight, or use a virtual environment of its own"
        )
    return reasons


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _refuse(reasons: list[str]) -> None:
    print("shardlight cannot run in this environment:", *reasons, sep="\n  ", file=sys.stderr)
    raise SystemExit(2)
