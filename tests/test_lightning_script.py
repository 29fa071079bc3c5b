"""As a user's own script has it: Lightning starts the other rank, and nothing of ours imports Lightning unasked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.lightning_runs import loader, make_module, quiet, trainer

TESTS = Path(__file__).resolve().parent

FIT = """
import json, sys
import strategies
assert not any(name.split(".")[0] in ("lightning", "pytorch_lightning") for name in sys.modules)
import torch
torch.set_num_threads(1)
import lightning.pytorch as pl
strategies.ZeroStrategy
from support.lightning_runs import ROWS_PER_UPDATE, data, make_module
from torch.utils.data import DataLoader

module = make_module("Plain")
trainer = pl.Trainer(strategy="zero3", accelerator="cpu", devices=2, max_epochs=1, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0)
loader = DataLoader(data(1), batch_size=ROWS_PER_UPDATE // 2)
score = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
trainer.fit(module, DataLoader(data(), batch_size=ROWS_PER_UPDATE // 2))
trainer.fit_loop.max_epochs = 2
trainer.fit(module, DataLoader(data(), batch_size=ROWS_PER_UPDATE // 2))
state = trainer.strategy.engine.state_dict()
if trainer.is_global_zero:
    found = {"score": score, "steps": trainer.global_step, "world": trainer.world_size,
             "norm": float(torch.stack([v.norm() for v in state.values()]).norm())}
    open(sys.argv[1], "w").write(json.dumps(found))
"""

OTHER_TREE = """
import pytorch_lightning
from strategies import ZeroStrategy

for strategy in ("zero3", ZeroStrategy(stage=3)):
    try:
        pytorch_lightning.Trainer(strategy=strategy, accelerator="cpu", devices=1)
    except ValueError as error:
        print(error)
"""


def run_script(folder, text, *arguments):
    script = folder / "script.py"
    script.write_text(text)
    environ = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    process = subprocess.Popen([sys.executable, str(script), *arguments], env=environ, cwd=folder, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        return process, *process.communicate(timeout=100)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the rank that Lightning started, if it is still there


def test_a_script_on_two_processes_that_lightning_starts(tmp_path):
    done, _, errors = run_script(tmp_path, FIT, str(tmp_path / "found.json"))
    assert done.returncode == 0, errors
    assert "destroy_process_group" not in errors
    found = json.loads((tmp_path / "found.json").read_text())
    with quiet():
        module, one = make_module("Plain"), trainer(num_sanity_val_steps=0)
        score = one.validate(module, loader(1, seed=1), verbose=False)[0]["val_loss"]
    assert found["score"] == pytest.approx(score, abs=1e-6)
    assert (found["steps"], found["world"]) == (10, 2)
    start = float(torch.stack([value.norm() for value in module.state_dict().values()]).norm())
    assert found["norm"] != pytest.approx(start, abs=1e-3)


def test_a_trainer_of_the_other_tree_is_told_so(tmp_path):
    _, output, errors = run_script(tmp_path, OTHER_TREE)
    told = [line for line in output.splitlines() if "fix: from lightning.pytorch import Trainer" in line]
    assert len(told) == 2, output + errors
