"""How much memory this process holds, on the device it computes on.

On a GPU: what torch's allocator has handed out (the context and libraries come on top). On a CPU: the resident set,
which counts memory shared with other processes in each of them.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
MEMORY = Path("/proc/meminfo")


def peak_memory_bytes() -> int:
    """The most this process has held since it started (on a GPU: since the allocator's statistics were reset)."""
    cuda = _cuda_in_use()
    if cuda is not None:
        return cuda.max_memory_allocated()
    # ru_maxrss survives exec: a worker started by a large parent would report the parent's peak. VmHWM does not.
    peak = _status_bytes("VmHWM")
    return peak if peak is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def current_memory_bytes() -> int:
    """What this process holds now."""
    cuda = _cuda_in_use()
    if cuda is not None:
        return cuda.memory_allocated()
    now = _status_bytes("VmRSS")
    return now if now is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_memory_bytes(device) -> int:
    """What `device` (a torch.device) still has room for; on a CPU shared by all processes of the machine."""
    if device.type == "cuda":
        return sys.modules["torch"].cuda.mem_get_info(device)[0]
    available = _field_bytes(MEMORY, "MemAvailable")
    return available if available is not None else 0


def _cuda_in_use():
    """torch.cuda if this process computes on a GPU; torch is not imported for the question."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _status_bytes(field: str) -> int | None:
    return _field_bytes(STATUS, field)


def _field_bytes(file: Path, field: str) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:  # no /proc, as in some sandboxes
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024  # the kernel writes kB
    return None
