"""Samples that go wrong, for the entry of the benchmark's fork server; every other system runs as it is."""

from __future__ import annotations

import os
import signal
import time

import torch.distributed as dist

from framework.benchmark.sample import run_sample


def some_fail(system, config, place):
    """ddp raises on rank 1 while rank 0 waits for it; fsdp2 is killed on rank 0."""
    if system == "ddp" and place.rank == 1:
        raise ValueError("rank 1 has had enough\nand says so at length")
    if system == "fsdp2" and place.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return run_sample(system, config, place)


def all_fail(system, config, place):
    """No system gets anywhere."""
    assert not dist.is_initialized()
    raise ValueError("nothing works today")


def one_hangs(system, config, place):
    """Rank 1 never comes, so rank 0 waits for it."""
    if place.rank == 1:
        time.sleep(600)
    return run_sample(system, config, place)
