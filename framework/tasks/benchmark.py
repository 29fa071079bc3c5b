"""task=benchmark: the same model, data and optimizer under several systems, sample by sample, and a table at the end.

This process takes no part in any sample: it starts one fork server per allocator setting and asks them in turn. Every
sample is written to benchmark.jsonl as it comes, so that an interrupted benchmark goes on in the same run.dir.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from framework import schema
from framework.benchmark.catalog import allocator_environment, installed
from framework.benchmark.chart import bar_chart
from framework.benchmark.client import Inputs, SampleServer
from framework.benchmark.comparison import compare, judge
from framework.benchmark.samples import Sample, SampleFile, Slot, fingerprint, machine, plan, sample_of
from framework.benchmark.server import SAMPLE
from framework.benchmark.table import MIB, Results, as_json, markdown
from framework.benchmark.targets import setting_of, targets_of
from framework.build import training_loader
from framework.config import BenchmarkTask, RunConfig
from framework.data.source import DataSource, prepare
from framework.launch import worker_allocator_environment
from framework.progress import Progress, duration
from framework.report import Measured, Recorded, build_summary, versions
from framework.run_folder import RunFolder, write_whole


def benchmark(config: RunConfig, task: BenchmarkTask, *, folder: RunFolder, launch_dir: Path, entry: str = SAMPLE
              ) -> None:
    """Run every sample that is not there yet, then write and print the comparison. `entry` runs one on a rank.

    A sample that fails or hangs is reported and the next one starts.

    Raises:
        ValueError: no system is installed, or the data does not fit the settings.
        RuntimeError: no sample of any system succeeded.
    """
    started_s = time.monotonic()
    with Progress() as progress:
        systems, absent = installed(task.systems)
        notes = [f"Left out, because the package is not installed: {', '.join(absent)}."] if absent else []
        for note in notes:
            progress.say(note)
        if not systems:
            raise ValueError(f"task.systems={task.systems}: none of them is installed; fix: add one of ours, zero3")
        source = prepare(config.dataset, vocab_size=config.model.vocab_size, max_seq_len=config.model.max_seq_len,
                         seed=config.seed, base=launch_dir, scratch=folder.path, notify=progress.notify)
        file = SampleFile(folder.path, fingerprint(config, data_hash=source.content_hash))
        samples = _run(config, task, systems, source=source, folder=folder, file=file, progress=progress, entry=entry)
        if all(sample.error is not None for sample in samples.values()):
            errors = list(dict.fromkeys(sample.error for sample in samples.values()))
            raise RuntimeError("no sample succeeded: " + "; ".join(map(str, errors)))
        results = _compared(config, task, systems, samples, notes)
        text = markdown(results)
        write_whole(folder.path / "benchmark.md", text)
        folder.write_json("benchmark.json", as_json(results))
        write_whole(folder.path / "benchmark.svg", bar_chart(results.title, results.rows))
        measured = Measured(
            world_size=int(config.trainer.devices), data_hash=source.content_hash,
            parameters=next(sample.parameters for sample in samples.values() if sample.error is None),
            wall_time_s=time.monotonic() - started_s)
        summary = build_summary(config, status="completed", recorded=Recorded(), measured=measured)
        failed = sum(sample.error is not None for sample in samples.values())
        folder.write_json(folder.summary_path, summary | {"samples": len(samples), "failed_samples": failed})
        progress.say(f"\n{text}\nresults in {folder.path}")


def _run(config: RunConfig, task: BenchmarkTask, systems: list[str], *, source: DataSource, folder: RunFolder,
         file: SampleFile, progress: Progress, entry: str) -> dict[Slot, Sample]:
    """All samples of the plan: those the folder holds already, and the rest."""
    slots = plan(systems, task.allocators, task.rounds)
    kept = file.read()
    samples = {slot: kept[slot] for slot in slots if slot in kept}
    progress.say(_opening(config, len(slots), len(samples), file))
    folder.logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".samples_", dir=folder.path)))
        schema.write(config, scratch / "config.yaml")
        _save_batches(config, source, scratch / "batches.pt")
        servers: dict[str, SampleServer] = {}
        for allocator in task.allocators:
            log = folder.logs / f"samples_{allocator}.log"
            inputs = Inputs(scratch / "config.yaml", scratch / "batches.pt", log, entry)
            servers[allocator] = stack.enter_context(SampleServer(inputs, _server_environment(allocator)))
        spent: dict[str, list[float]] = {system: [] for system in systems}
        for number, slot in enumerate(slots, start=1):
            if slot in samples:
                continue
            started_s = time.monotonic()
            sample = sample_of(slot, servers[slot.allocator].run(slot.system, timeout_s=task.sample_timeout_s))
            file.append(sample)
            samples[slot] = sample
            spent[slot.system].append(time.monotonic() - started_s)
            left = [later.system for later in slots[number:] if later not in samples]
            progress.say(f"[{number}/{len(slots)}] {_line(sample)}, {duration(_expected_s(left, spent))} left")
    return samples


def _compared(config: RunConfig, task: BenchmarkTask, systems: list[str], samples: dict[Slot, Sample],
              notes: list[str]) -> Results:
    rows = {allocator: compare([sample for slot, sample in samples.items() if slot.allocator == allocator], systems)
            for allocator in task.allocators}
    targets = targets_of(setting_of(config))
    return Results(
        title=_title(config), machine=machine(), rounds=task.rounds, steps=config.trainer.max_steps,
        tokens_per_update=int(config.batch.global_size) * int(config.dataset.seq_len), rows=rows,
        verdicts={allocator: judge(each, targets, allocator) for allocator, each in rows.items()},
        variables={allocator: _allocator_variables() if allocator == "tuned" else {} for allocator in task.allocators},
        notes=notes, versions=versions())


def _save_batches(config: RunConfig, source: DataSource, path: Path) -> None:
    """tokens and labels of every rank and update, [ranks, steps, micro-batches, batch, positions], int64."""
    assert isinstance(config.task, BenchmarkTask)
    steps = config.trainer.max_steps + config.task.memory_steps
    everyone = []
    for rank in range(int(config.trainer.devices)):
        loader = training_loader(config, source, data_rank=rank)
        everyone.append([loader.step_batches(step) for step in range(steps)])
    torch.save({name: torch.stack([torch.stack([torch.stack([getattr(batch, field) for batch in batches])
                                                for batches in rank_steps]) for rank_steps in everyone])
                for name, field in (("tokens", "tokens_BT"), ("labels", "labels_BT"))}, path)


def _allocator_variables() -> dict[str, str]:
    """What the launcher sets for its workers where the shell sets nothing."""
    return worker_allocator_environment({})


def _server_environment(allocator: str) -> dict[str, str]:
    # numpy's own pool of threads would make forks of the server unsafe; no system computes with it.
    single = {"OPENBLAS_NUM_THREADS": "1"}
    return allocator_environment(allocator, os.environ, _allocator_variables()) | single


def _opening(config: RunConfig, total: int, reused: int, file: SampleFile) -> str:
    lines = [f"{_title(config)}: {total} samples"]
    if reused:
        lines.append(f"{reused} of them are there already, in {file.path}, and are not measured again")
    if file.foreign_lines:
        lines.append(f"{file.foreign_lines} lines there are of another config, code, version or machine: not used")
    return "\n".join(lines)


def _title(config: RunConfig) -> str:
    model, setting = config.model, setting_of(config)
    accumulation = f" x {setting['accumulation']}" if setting["accumulation"] > 1 else ""
    threads = config.trainer.threads
    return (f"{model.num_layers} layers x {model.hidden_size}, vocabulary {model.vocab_size}, "
            f"{setting['micro_size']}{accumulation} x {setting['seq_len']} tokens per rank, {setting['precision']}, "
            f"{setting['ranks']} ranks, {threads} thread{'s' * (threads != 1)} each")


def _line(sample: Sample) -> str:
    slot = sample.slot
    where = f"round {slot.round + 1} {slot.allocator} {slot.system}"
    if sample.error is not None:
        return f"{where}: failed: {sample.error}"
    assert sample.losses is not None
    busy = f", disturbed ({sample.foreign_cpu:.2f} cores used by others)" if sample.disturbed else ""
    return (f"{where}: {sample.step_s:.4f} s/step, peak {(sample.peak_bytes or 0) / MIB:.0f} MiB, "
            f"loss {sample.losses[-1]:.4f}{busy}")


def _expected_s(left: list[str], spent: dict[str, list[float]]) -> float:
    """Seconds for the systems left, each at its own mean; at everyone's where it has not run yet."""
    everyone = [seconds for each in spent.values() for seconds in each]
    return sum(sum(spent[system] or everyone) / len(spent[system] or everyone) for system in left)
