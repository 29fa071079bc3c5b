"""One failure per job: how a rank records its error, which rank's error is the cause, and what the job raises.

When one rank fails, the others fail of it: their collectives lose a peer, then the launcher stops them. The records are
in the format of torch's elastic agent (TORCHELASTIC_ERROR_FILE), with a finer clock and the type of the error, so
torchrun shows them too. The worker writes them without `torch.distributed.elastic.multiprocessing.errors.record`, which
would import torch before anything else.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from framework.process import STOPPED

# Words of gloo, NCCL and torch's store when a peer is gone: such an error is the consequence of another rank's.
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport", "NCCL error",
             "recvValue failed", "failed to recv", "remote process exited")


class JobFailed(Exception):  # noqa: N818 (the name says what happened)
    """A job did not complete. Its traceback has been shown; `summary` is what the run folder's summary.json holds."""

    def __init__(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        error = summary["error"]
        where = "" if error["rank"] is None else f"rank {error['rank']}: "
        super().__init__(f"{summary['status']}: {where}{error['type']}: {error['message']}")
        self.exit_code = exit_code
        self.summary = dict(summary)

    @property
    def interrupted(self) -> bool:
        """Whether a person or a scheduler ended it; a sweep then ends as well."""
        return self.summary["status"] == "interrupted"


@dataclass(frozen=True)
class Failure:
    """The error a job ended with. `rank` is None when it is no rank's: the launcher's own, or a request to stop."""

    rank: int | None
    type: str
    message: str
    traceback: str
    exit_code: int
    interrupted: bool = False

    @property
    def lost_peer(self) -> bool:
        """Whether this is what a rank says of another one's death."""
        return any(text in self.message for text in LOST_PEER)

    def complete(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """What a run folder's summary becomes with this failure; fields that rank 0 has written stay."""
        error = {name: getattr(self, name) for name in ("rank", "type", "message", "traceback")}
        return {**summary, "status": "interrupted" if self.interrupted else "failed", "error": error}


def failure_of(error: BaseException, *, rank: int | None) -> Failure:
    """The failure of a rank, or of the launcher (None), that raised `error`."""
    return Failure(rank, type(error).__name__, str(error), "".join(traceback.format_exception(error)), 1)


def interruption(signum: int) -> Failure:
    """The end of a job that was told to stop."""
    name = signal.Signals(signum).name
    return Failure(None, name, f"the job was told to stop by {name}", "", 128 + signum, interrupted=True)


def record_error(failure: Failure, path: str) -> None:
    """Write the failure of this rank where the launcher looks for it. An earlier record stays."""
    if os.path.exists(path):
        return
    extra = {
        "py_callstack": failure.traceback,
        "timestamp": str(int(time.time())),
        "time_ns": time.time_ns(),
        "type": failure.type,
        "text": failure.message,
    }
    with open(path, "w") as file:
        json.dump({"message": {"message": f"{failure.type}: {failure.message}", "extraInfo": extra}}, file)


def first_failure(failures: Mapping[int, Any]) -> Failure:
    """The cause among the ranks' failures (torch's `ProcessFailure` by rank, in the order the agent saw them)."""
    ranks = list(failures)
    rank = min(ranks, key=lambda rank: (*_blame(failures[rank], is_first=rank == ranks[0]), ranks.index(rank)))
    failure, extra = failures[rank], _extra(failures[rank])
    exit_code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    if "type" in extra:
        return Failure(rank, extra["type"], extra.get("text", ""), extra["py_callstack"], exit_code)
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " (the kernel does this when memory runs out; see dmesg)" if name == "SIGKILL" else ""
        return Failure(rank, name, f"process {failure.pid} was ended by {name}{hint}", "", exit_code)
    return Failure(rank, "SystemExit", f"process {failure.pid} ended with exit code {failure.exitcode}", "", exit_code)


def _blame(failure: Any, *, is_first: bool) -> tuple[int, int]:
    """Sort key: the smaller, the likelier the cause. The launcher stops ranks with SIGTERM, the warden with SIGKILL."""
    extra = _extra(failure)
    if extra.get("type") == STOPPED:
        return (4, 0)
    if "type" in extra:
        lost_peer = any(text in extra["text"] for text in LOST_PEER)
        return (3 if lost_peer else 1, extra["time_ns"])
    if failure.exitcode in (-signal.SIGTERM, -signal.SIGINT):
        return (2 if is_first else 4, 0)  # the first one seen died before the launcher stopped any
    if failure.exitcode == -signal.SIGABRT:
        return (2, 0)  # communication libraries abort on the loss of a peer
    return (0, 0)


def _extra(failure: Any) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    return message.get("extraInfo", {}) if isinstance(message, Mapping) else {}
