"""Progress on a terminal, in a file, and on outputs that fail."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from framework.progress import Progress, memory_text
from framework.report import StepReport

ROOT = Path(__file__).parent.parent


def report(step: int, **extra: float) -> StepReport:
    return StepReport(step=step, loss=10.81 / step, lr=3e-4, grad_norm=1.0, tokens=4096, step_time_s=0.1,
                      tokens_per_s=40_960.0, peak_memory_bytes_per_rank=[2**30, 2**29], extra=extra)


def run_script(stdout: int, script: str, *, columns: int = 100, encoding: str = "utf-8") -> subprocess.Popen:
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "PYTHONIOENCODING": encoding}
    return subprocess.Popen([sys.executable, "-c", script], stdout=stdout, stderr=subprocess.PIPE, cwd=ROOT,
                            env=environment)


TRAIN = """
import time
from framework.progress import Progress
from framework.report import StepReport
with Progress() as progress:
    for done in range(3):
        progress.notify("training the tokenizer", done, 2)
    progress.start(30)
    for step in range(1, 31):
        time.sleep(0.02)
        progress.step(StepReport(step=step, loss=10.8 / step, lr=3e-4, grad_norm=1.0, tokens=4096, step_time_s=0.1,
                                 tokens_per_s=40960.0, peak_memory_bytes_per_rank=[2**30, 2**29]))
        if step == 10:
            print("printed [by] the user")
            progress.say("said [bold]plainly[/bold]")
print("done")
"""


def test_into_a_file_every_logged_step_is_a_whole_line():
    text = io.StringIO()
    progress = Progress(stream=text)
    progress.start(3)
    for step in (1, 2, 3):
        progress.step(report(step, val_loss=7.125) if step == 3 else report(step))
    progress.close()
    lines = text.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("step 1/3 loss 10.8100 0:00<0:0")
    assert "40,960 tok/s mem 1.00|0.50 GiB lr 3.00e-04" in lines[0]
    assert lines[2].endswith("val_loss 7.125")
    assert "\x1b" not in text.getvalue()


def test_many_steps_are_thinned_to_the_clock_and_the_last_is_shown():
    text = io.StringIO()
    progress = Progress(stream=text)
    progress.start(1000)
    for step in range(1, 1001):
        progress.step(report(step))
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("step 1/1000 ")
    assert lines[-1].startswith("step 1000/1000 ")
    assert len(lines) < 10


def test_preparing_data_is_shown_in_a_file_without_flooding_it():
    text = io.StringIO()
    progress = Progress(stream=text)
    for done in range(101):
        progress.notify("tokenizing", done, 100)
    progress.notify("training", 0, 0)  # its length is not known, and it reports nothing until it ends
    progress.notify("training", 1, 1)
    progress.notify("reading", 5, 0)
    assert text.getvalue().splitlines() == [
        "tokenizing 0% 0:00", "tokenizing 100% 0:00", "training 0:00", "training 100% 0:00", "reading 5 0:00"]


def on_terminal(*, columns: int = 100, encoding: str = "utf-8") -> str:
    outer, inner = pty.openpty()
    process = run_script(inner, TRAIN, columns=columns, encoding=encoding)
    os.close(inner)
    shown = b""
    while True:
        try:
            part = os.read(outer, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(outer)
    assert process.wait(timeout=30) == 0, process.stderr.read().decode()
    assert process.stderr.read() == b""
    process.stderr.close()
    return shown.decode(encoding)


def test_on_a_terminal_one_line_is_redrawn_and_prints_go_above_it():
    shown = on_terminal()
    assert re.search(r"━+ step 30/30 loss 0\.3600 0:00<0:00 40,960 tok/s mem 1\.00\|0\.50 GiB", shown)
    # Neither a print nor say lands inside the bar: each starts at an erased line and ends it.
    assert "\x1b[2Kprinted [by] the user\r\n" in shown
    assert "\x1b[2Ksaid [bold]plainly[/bold]\r\n" in shown
    assert shown.endswith("\x1b[?25hdone\r\n")
    assert "training the tokenizer 100%" in shown


@pytest.mark.parametrize("columns", [1, 10, 24, 40])
def test_a_narrow_terminal_gets_one_short_line(columns):
    drawn = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "\n", on_terminal(columns=columns)).replace("\r", "\n")
    bars = [line for line in drawn.split("\n") if "step" in line]
    assert all(len(line) < columns for line in bars)


def test_a_terminal_without_unicode_gets_an_ascii_bar():
    assert re.search(r"#+ step 30/30", on_terminal(encoding="ascii"))


def test_a_reader_that_leaves_does_not_end_the_run():
    receiving, sending = os.pipe()
    process = run_script(sending, TRAIN)
    os.close(sending)
    os.read(receiving, 10)
    os.close(receiving)
    errors = process.communicate(timeout=30)[1].decode()
    assert (process.returncode, errors) == (0, "")


def test_a_closed_stream_and_a_full_disk_do_not_end_the_run():
    closed = io.StringIO()
    closed.close()

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    for stream in (closed, Full()):
        progress = Progress(stream=stream)
        progress.start(1)
        progress.step(report(1))
        progress.say("text")
        progress.close()
        progress.close()


def test_time_left_follows_the_pace_after_the_first_step(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("framework.progress.time.monotonic", lambda: now[0])
    text = io.StringIO()
    progress = Progress(stream=text)
    progress.start(14, done_steps=10)
    for step, seconds in ((11, 50.0), (12, 2.0), (13, 2.0)):
        now[0] += seconds
        progress.step(report(step))
    assert re.findall(r"(\d:\d\d<\S+)", text.getvalue()) == ["0:50<2:30", "0:52<0:04", "0:54<0:02"]


def test_memory_of_many_ranks_is_a_range():
    assert memory_text([2**30, 2**31]) == "1.00|2.00 GiB"
    assert memory_text([2**30 * n for n in range(1, 9)]) == "1.00-8.00 GiB on 8 ranks"


def test_a_renderable_can_be_said():
    table = Table("axis")
    table.add_row("data")
    text = io.StringIO()
    Progress(stream=text).say(table)
    assert "data" in text.getvalue()
