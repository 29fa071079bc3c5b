"""The run folder: claimed once, never shared by accident, its files whole."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from framework.run_folder import RunFolder, claim


def test_jobs_started_in_the_same_second_get_folders_of_their_own(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: claim("auto", launch_dir=tmp_path, label="gpt2"), range(8)))
    paths = {folder.path for folder in folders}
    assert len(paths) == 8
    for path in paths:
        assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d_gpt2(-\d)?", str(path.relative_to(tmp_path)))


def test_a_label_cannot_lead_out_of_the_folder_of_the_day(tmp_path):
    folder = claim("auto", launch_dir=tmp_path, label="../my exp/x")
    assert folder.path.parent.parent == tmp_path / "outputs"


def test_jobs_of_a_sweep_are_numbered(tmp_path):
    folder = claim("auto", launch_dir=tmp_path, label="x", sweep=("2026-01-02_03-04-05", 3))
    assert folder.path == tmp_path / "outputs/multirun/2026-01-02_03-04-05/3"
    again = claim("auto", launch_dir=tmp_path, label="x", sweep=("2026-01-02_03-04-05", 3))
    assert again.path.name == "3-2"


def test_a_sweep_with_a_folder_of_its_own_still_separates_its_jobs(tmp_path):
    folders = [claim("mine", launch_dir=tmp_path, label="x", sweep=("stamp", n)) for n in range(2)]
    assert [folder.path for folder in folders] == [tmp_path / "mine/0", tmp_path / "mine/1"]


def test_an_explicit_folder_is_relative_to_where_the_command_was_typed(tmp_path):
    assert claim("a/b", launch_dir=tmp_path, label="x").path == tmp_path / "a/b"
    assert claim(str(tmp_path / "c"), launch_dir=Path("/"), label="x").path == tmp_path / "c"


def test_a_folder_a_running_job_writes_to_is_refused_by_name(tmp_path):
    first = claim("mine", launch_dir=tmp_path, label="x")
    with pytest.raises(ValueError, match=r"run\.dir=.*another running job.*run\.dir=auto"):
        claim("mine", launch_dir=tmp_path, label="x")
    first.release()
    claim("mine", launch_dir=tmp_path, label="x")


def test_records_of_an_earlier_run_in_the_folder_are_kept_apart(tmp_path):
    for loss in (1.0, 2.0, 3.0):
        folder = claim("mine", launch_dir=tmp_path, label="x")
        folder.append_metrics({"loss": loss})
        folder.write_json(folder.summary_path, {"final_loss": loss})
        folder.release()
    kept = {name: json.loads((tmp_path / "mine" / name).read_text())["final_loss"]
            for name in ("summary.1.json", "summary.2.json", "summary.json")}
    assert kept == {"summary.1.json": 1.0, "summary.2.json": 2.0, "summary.json": 3.0}
    assert [line["loss"] for line in folder.read_metrics()] == [3.0]


def test_a_folder_that_cannot_be_made_is_an_error_about_run_dir(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run\.dir=file/run: .*cannot be made"):
        claim("file/run", launch_dir=tmp_path, label="x")


def test_a_folder_travels_to_a_rank_as_its_path(tmp_path):
    folder = claim("mine", launch_dir=tmp_path, label="x")
    copy = pickle.loads(pickle.dumps(folder))
    assert copy.path == folder.path
    assert copy.metrics_path == tmp_path / "mine/metrics.jsonl"
    assert copy.logs.is_dir()


def test_numbers_that_are_not_finite_survive_the_file(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_metrics({"loss": math.nan, "norms": [math.inf, -math.inf, 0.1]})
    assert json.loads(folder.metrics_path.read_text()) == {"loss": "NaN", "norms": ["Infinity", "-Infinity", 0.1]}
    line, = folder.read_metrics()
    assert math.isnan(line["loss"])
    assert line["norms"] == [math.inf, -math.inf, 0.1]


def test_a_loss_is_written_with_every_digit(tmp_path):
    folder, loss = RunFolder(tmp_path), 10.812345678901234
    folder.append_metrics({"loss": loss})
    assert folder.read_metrics() == [{"loss": loss}]


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1})
    with folder.metrics_path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert folder.read_metrics() == [{"step": 1}]


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1})
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:4]))
    with pytest.raises(OSError, match=r"metrics\.jsonl: 4 of 12 bytes"):
        folder.append_metrics({"step": 2})
    assert folder.read_metrics() == [{"step": 1}]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write_json("summary.json", {"status": "completed"})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write_json("summary.json", {"status": "failed"})
    assert json.loads(folder.summary_path.read_text()) == {"status": "completed"}
    assert os.listdir(tmp_path) == ["summary.json"]
