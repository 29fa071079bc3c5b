"""task=doctor: a verdict per item, also in doctor.json; what is not well names its fix; a failed item fails the job."""

import json
import re

import pytest
import torch

from framework.config import DoctorTask
from framework.doctor import machine
from framework.doctor.findings import Verdict, failed, lines, ok, warning
from framework.doctor.machine import judge_allocator, look_at_machine
from support.jobs import started_job
from support.run_configs import run_config
from support.run_jobs import changed, run_in_pool

LOCAL = {"versions", "system", "processors", "memory", "huge pages", "GPUs", "backends", "allocator", "copy"}
TOGETHER = {"algorithms", "all-gather", "reduce-scatter", "all-reduce", "vote"}
STAGES = {f"stage {stage}" for stage in range(4)}


def config(devices=2):
    return changed(run_config(devices=devices), task=DoctorTask(name="doctor"))


@pytest.mark.parametrize(("devices", "items"), [(2, LOCAL | TOGETHER | STAGES), (1, LOCAL | STAGES)])
def test_every_item_has_a_verdict_and_the_engine_is_right(tmp_path, devices, items):
    run = run_in_pool(config(devices), tmp_path / "run")
    found = {item["item"]: item for item in json.loads((run.path / "doctor.json").read_text())["items"]}
    assert found.keys() == items
    for name, item in found.items():
        assert re.search(rf"^{item['verdict']} +{name}  ", run.terminal, re.MULTILINE)
        assert (item["fix"] is None) == (item["verdict"] == "ok")
    assert {found[stage]["verdict"] for stage in STAGES} == {"ok"}
    assert run.summary["status"] == "completed"
    assert run.summary["verdicts"]["failed"] == 0
    assert sum(run.summary["verdicts"].values()) == len(items)
    left = {path.name for path in run.path.iterdir()}
    assert left - {"cache", "terminal.txt", "terminal1.txt"} == {"doctor.json", "summary.json"}
    if devices == 2:
        assert found["all-gather"]["seconds"].keys() == found["all-gather"]["native_seconds"].keys()
        assert all(seconds > 0 for seconds in found["reduce-scatter"]["seconds"].values())


def test_a_broken_engine_fails_the_job_after_the_report(tmp_path):
    with started_job("doctor_on_a_broken_engine", folder=tmp_path / "run") as job:
        job.process.wait(timeout=120)
        code, output, _ = job.end()
    assert code == 1
    assert re.search(r"^failed +stage 3 .*gradients differ by at most .*; allowed is 1e-05$", output, re.MULTILINE)
    assert re.search(r"^ok +versions ", output, re.MULTILINE)
    assert re.search(r"RuntimeError: task=doctor: 4 of \d+ items failed: stage 0: ", output)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["verdicts"]["failed"] == 4
    verdicts = {item["item"]: item["verdict"]
                for item in json.loads((tmp_path / "run" / "doctor.json").read_text())["items"]}
    assert {verdicts[stage] for stage in STAGES} == {"failed"}


def found_on(monkeypatch, tmp_path, *, setting="[always] madvise never", ranks=1):
    file = tmp_path / "enabled"
    file.write_text(setting)
    monkeypatch.setattr(machine, "HUGE_PAGES", file)
    monkeypatch.setattr(machine, "available_cpus", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    return {finding.item: finding for finding in look_at_machine(config())}


def test_what_is_not_well_on_a_machine_names_its_fix(monkeypatch, tmp_path):
    well = found_on(monkeypatch, tmp_path)
    assert (well["huge pages"].verdict, well["huge pages"].values["setting"]) == (Verdict.OK, "always")
    off = found_on(monkeypatch, tmp_path, setting="always madvise [never]")["huge pages"]
    assert (off.verdict, off.fix) == (Verdict.WARNING, f"as root: echo madvise > {tmp_path / 'enabled'}")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert found_on(monkeypatch, tmp_path, ranks=2)["processors"].verdict is Verdict.OK
        crowded = found_on(monkeypatch, tmp_path, ranks=4)["processors"]
    finally:
        torch.set_num_threads(threads)
    assert (crowded.verdict, crowded.fix) == (Verdict.WARNING, "trainer.threads=1, or trainer.devices=2")


def test_versions_outside_the_tested_range_are_named(monkeypatch):
    monkeypatch.setattr(machine.importlib.metadata, "requires",
                        lambda name: ["torch<1.0", "numpy>=1", "no-such-package", "wandb; extra == 'hf'"])
    found = next(look_at_machine(config()))
    assert found.verdict is Verdict.WARNING
    assert found.fix == "pip install 'torch<1.0' 'no-such-package'"


def test_the_allocator_is_judged_by_its_effect(monkeypatch):
    for name in machine.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    unset = judge_allocator([0.0, 0.0])
    assert unset.verdict is Verdict.WARNING
    assert "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=" in unset.fix
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    assert judge_allocator([1.0, 0.9]).verdict is Verdict.OK
    without_effect = judge_allocator([1.0, 0.1])
    assert without_effect.verdict is Verdict.WARNING
    assert "1 of 2 ranks" in without_effect.text
    assert "unset them" in without_effect.fix


def test_the_report_puts_each_fix_below_its_line():
    text = lines([ok("a", "well"), warning("long", "slow", fix="more"), failed("b", "wrong", fix="stop")])
    assert text.splitlines() == [
        "ok      a     well", "warning long  slow", "              fix: more", "failed  b     wrong",
        "              fix: stop"]
