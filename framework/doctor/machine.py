"""Versions, processors, memory, and whether the allocator that the launcher asks for is in force. Local to a rank."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from framework.config import RunConfig
from framework.doctor.findings import Finding, ok, warning
from framework.launch import worker_allocator_environment
from framework.machine import available_cpus
from framework.memory import available_memory_bytes
from framework.plan import bytes_text
from framework.report import versions

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROBE_BYTES = 64 << 20
ALLOCATOR_VARIABLES = ("GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_CONF")
LEAST_FREE_BYTES = 1 << 30


def look_at_machine(config: RunConfig) -> Iterator[Finding]:
    """Everything about this machine that needs no other rank."""
    yield _versions()
    yield ok("system", f"Linux {platform.release()}, glibc {platform.libc_ver()[1] or 'none'}, {platform.machine()}",
             kernel=platform.release(), glibc=platform.libc_ver()[1])
    yield _processors(config)
    yield _memory()
    yield _huge_pages()
    yield _gpus()
    yield _backends()


def _versions() -> Finding:
    found = versions()
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    wrong = [str(each) for each in map(Requirement, importlib.metadata.requires("shardlight") or [])
             if (each.marker is None or each.marker.evaluate({"extra": ""})) and not _is_met(each)]
    if wrong:
        return warning("versions", f"{text}; not what this project is tested with: {', '.join(wrong)}",
                       fix="pip install " + " ".join(f"'{each.split(';')[0].strip()}'" for each in wrong), found=found)
    return ok("versions", text, found=found)


def _is_met(requirement: Requirement) -> bool:
    try:
        installed = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(installed, prereleases=True)


def _processors(config: RunConfig) -> Finding:
    cores, threads, ranks = available_cpus(), torch.get_num_threads(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    text = f"{cores} CPU cores for {ranks} processes of {threads} threads; {_cpu_name()}"
    values = {"cpu_cores": cores, "processes": ranks, "threads": threads, "cpu": _cpu_name()}
    if config.trainer.accelerator == "cpu" and ranks * threads > cores:
        fix = f"trainer.threads={max(1, cores // ranks)}, or trainer.devices={max(1, cores // threads)}"
        return warning("processors", text, fix=fix, **values)
    return ok("processors", text, **values)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _memory() -> Finding:
    free = available_memory_bytes(torch.device("cpu"))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{bytes_text(free)} of {bytes_text(total)} available"
    if free < LEAST_FREE_BYTES:
        return warning("memory", text, fix="end what else runs here: a job that does not fit is killed by the kernel",
                       available_bytes=free, total_bytes=total)
    return ok("memory", text, available_bytes=free, total_bytes=total)


def _huge_pages() -> Finding:
    if not HUGE_PAGES.exists():
        return warning("huge pages", "this kernel has no transparent huge pages", setting=None,
                       fix="a kernel with CONFIG_TRANSPARENT_HUGEPAGE; without, mapping memory costs more")
    chosen = HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    if chosen == "never":
        return warning("huge pages", "transparent huge pages are off", setting=chosen,
                       fix=f"as root: echo madvise > {HUGE_PAGES}")
    return ok("huge pages", f"transparent huge pages: {chosen}", setting=chosen)


def _gpus() -> Finding:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ok("GPUs", ", ".join(names) or "none; training runs on the CPU", names=names)


def _backends() -> Finding:
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available(),
             "ucc": dist.is_ucc_available()}
    names = [name for name, available in there.items() if available]
    if torch.cuda.is_available() and not there["nccl"]:
        return warning("backends", ", ".join(names), fix="a torch built with NCCL: GPUs are there", available=there)
    return ok("backends", ", ".join(names), available=there)


def kept_share() -> float:
    """Share of a large tensor's memory that the next one of its size gets without new pages from the kernel. Local."""
    pages = PROBE_BYTES // resource.getpagesize()
    torch.empty(PROBE_BYTES, dtype=torch.uint8).fill_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(PROBE_BYTES, dtype=torch.uint8).fill_(1)
    return max(0.0, 1.0 - (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / pages)


def judge_allocator(shares: list[float]) -> Finding:
    """What the allocator settings are, and on how many ranks they work. `shares`: `kept_share` of each rank."""
    settings = {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ}
    text = ", ".join(f"{name}={value}" for name, value in settings.items()) or "no settings"
    works = sum(share > 0.5 for share in shares)
    text += f"; a freed {bytes_text(PROBE_BYTES)} tensor's memory is kept on {works} of {len(shares)} ranks"
    values = {"settings": settings, "kept_share_per_rank": shares}
    missing = worker_allocator_environment()
    if works == len(shares):
        return ok("allocator", text, **values)
    if missing:
        fix = ("start with python -m framework, which sets them for its processes, or export "
               + " ".join(f"{name}={value}" for name, value in missing.items()))
    else:
        fix = "the settings do not keep freed memory: unset them to get the launcher's; glibc 2.35 or newer is needed"
    return warning("allocator", text, fix=fix, **values)
