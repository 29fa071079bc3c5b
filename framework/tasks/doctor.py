"""task=doctor: whether this machine, this environment and the engine on it are well. Needs no data and no weights."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from framework.build import mesh_shape
from framework.config import RunConfig
from framework.doctor.findings import Finding, Verdict, lines
from framework.doctor.machine import judge_allocator, kept_share, look_at_machine
from framework.doctor.self_test import self_test
from framework.doctor.speeds import measure
from framework.report import Measured, Recorded, build_summary
from framework.run_folder import RunFolder
from framework.tasks.session import connected, screen
from strategies.mesh import Mesh

REPORT = "doctor.json"


def examine(config: RunConfig, *, folder: RunFolder) -> None:
    """Print a verdict per item and leave doctor.json and summary.json in `folder`. Collective over the world.

    Raises:
        RuntimeError: an item failed; on every rank, after the report.
    """
    started_s = time.monotonic()
    with connected(config) as device:
        mesh = Mesh(mesh_shape(config.parallel), device=device, timeout_s=config.trainer.timeout_s,
                    transport=config.parallel.transport)
        with screen() as progress:
            findings = list(look_at_machine(config))
            shares = mesh.world.gather_list(torch.tensor([kept_share()]), what="allocator in force")
            findings.append(judge_allocator([round(float(share[0]), 3) for share in shares]))
            findings += [*measure(mesh), *self_test(mesh)]
            if mesh.rank == 0:
                _write(config, folder, findings, mesh=mesh, wall_time_s=time.monotonic() - started_s)
                progress.say(lines(findings))
                progress.say(f"results in {folder.path / REPORT}")
    wrong = [finding for finding in findings if finding.verdict is Verdict.FAILED]
    if wrong:
        raise RuntimeError(f"task=doctor: {len(wrong)} of {len(findings)} items failed: "
                           + "; ".join(f"{finding.item}: {finding.text}" for finding in wrong))


def _write(config: RunConfig, folder: RunFolder, findings: Sequence[Finding], *, mesh: Mesh, wall_time_s: float
           ) -> None:
    folder.write_json(REPORT, {"items": [finding.plain() for finding in findings]})
    counts = {verdict.value: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    status = "failed" if counts["failed"] else "completed"
    measured = Measured(world_size=mesh.world_size, wall_time_s=wall_time_s)
    summary = build_summary(config, status=status, recorded=Recorded(), measured=measured)
    folder.write_json(folder.summary_path, summary | {"verdicts": counts})
