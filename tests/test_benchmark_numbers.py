"""The benchmark's arithmetic: the order of samples, paired ratios, what counts, targets, table and chart."""

import json
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from framework.benchmark.catalog import BASELINES, SYSTEMS, allocator_environment
from framework.benchmark.chart import bar_chart
from framework.benchmark.comparison import Ratio, compare, judge, paired_ratio
from framework.benchmark.samples import Sample, SampleFile, Slot, plan, sample_of
from framework.benchmark.table import Results, aligned, as_json, markdown
from framework.benchmark.targets import FP32, SIZE_A, SIZE_B, TARGETS, Target, targets_of
from framework.run_folder import plain

MIB = 2**20


def sample(system, round, step_s=None, *, allocator="tuned", error=None, foreign_cpu=0.0, **values):
    measured = {} if error else {"losses": [7.0, 6.0 + round], "peak_bytes": 100 * MIB, "live_bytes": 30 * MIB,
                                 "state_bytes": 20 * MIB, "parameters": 2_621_440, "foreign_cpu": foreign_cpu}
    return Sample(slot=Slot(round, allocator, system), step_s=step_s, error=error, **(measured | values))


# -- order ----------------------------------------------------------------------------------------------------------


def test_rounds_run_forward_and_reversed_in_turn():
    order = [slot.system for slot in plan(["a", "b", "c"], ["tuned"], 3)]
    assert order == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]


def test_every_round_has_every_system_once_under_every_allocator_setting():
    slots = plan(["a", "b"], ["tuned", "stock"], 4)
    assert len(set(slots)) == len(slots) == 16
    assert slots[4:8] == [Slot(1, s.allocator, s.system) for s in reversed(slots[:4])]
    assert [slot.round for slot in slots] == sorted(slot.round for slot in slots)
    # Settings come in blocks, so that systems under one setting are next to each other in time.
    for left, right in pairwise(slots):
        assert left.allocator == right.allocator or (left.round, right.round) in [(0, 0), (1, 1), (2, 2), (3, 3)]


# -- ratios ---------------------------------------------------------------------------------------------------------


def test_a_drift_of_the_machine_cancels_in_the_paired_ratios():
    speed = [1.0, 1.5, 3.0]
    ours = [sample("zero3", n, 0.3 * factor) for n, factor in enumerate(speed)]
    theirs = [sample("fsdp2", n, 0.6 * factor) for n, factor in enumerate(speed)]
    assert paired_ratio(ours, theirs) == Ratio(pytest.approx(0.5), pytest.approx(0.5), pytest.approx(0.5), 3)


def test_only_rounds_that_have_both_make_a_pair():
    ours = [sample("zero3", 0, 1.0), sample("zero3", 2, 3.0)]
    theirs = [sample("fsdp2", 1, 2.0), sample("fsdp2", 2, 2.0), sample("fsdp2", 0, 4.0)]
    assert paired_ratio(ours, theirs) == Ratio(0.875, 0.25, 1.5, 2)
    assert paired_ratio(ours, theirs[:1]) is None


def test_a_row_is_the_median_of_samples_nobody_disturbed():
    samples = [sample("ddp", 0, 1.0), sample("ddp", 1, 9.0, foreign_cpu=0.11), sample("ddp", 2, 2.0, foreign_cpu=0.1),
               sample("ddp", 3, 4.0)]
    (row,) = compare(samples, ["ddp"])
    assert (row.step_s, row.samples, row.disturbed, row.foreign_cpu) == (2.0, 3, 1, 0.1)
    assert row.ratios == {"ddp": Ratio(1.0, 1.0, 1.0, 3)}
    assert row.loss == 6.0
    assert row.state_multiple == 2.0


def test_disturbed_samples_count_where_there_are_no_others_and_are_marked():
    (row,) = compare([sample("ddp", n, 1.0 + n, foreign_cpu=0.5) for n in range(3)], ["ddp"])
    assert (row.step_s, row.samples, row.disturbed) == (2.0, 3, 3)
    target = Target(system="ddp", measure="state_bytes", at_most=2.0)
    text = markdown(results({"tuned": [row]}, {"tuned": judge([row], [target], "tuned")}))
    assert "0.50*" in text
    assert "met* |" in text


def test_a_system_that_failed_has_a_row_without_numbers_and_its_errors_once():
    samples = [sample("zero3", n, error="rank 1: ValueError: no") for n in range(2)] + [sample("ddp", 0, 1.0)]
    row, other = compare(samples, ["zero3", "ddp"])
    assert (row.step_s, row.peak_bytes, row.loss, row.ratios, row.samples) == (None, None, None, {}, 0)
    assert row.errors == ["rank 1: ValueError: no"]
    assert other.step_s == 1.0
    assert "- `zero3` failed: rank 1: ValueError: no" in markdown(results({"tuned": [row, other]}))


def test_a_sample_is_the_slower_rank_the_larger_one_and_the_mean_loss():
    def report(step_s, peak, own, losses):
        return {"step_s": step_s, "peak_bytes": peak, "whole_peak_bytes": peak, "anonymous_peak_bytes": None,
                "live_bytes": 1, "state_bytes": 1, "parameters": 5, "losses": losses, "wall_s": 10.0,
                "machine_cpu_s": 22.0, "own_cpu_s": own, "stolen_cpu_s": 0.5}

    reply = {"reports": [report(0.5, 10, 9.0, [4.0, 2.0]), report(0.7, 8, 9.5, [6.0, 3.0])]}
    found = sample_of(Slot(0, "tuned", "ddp"), reply)
    assert (found.step_s, found.peak_bytes, found.losses, found.foreign_cpu) == (0.7, 10, [5.0, 2.5], 0.35)
    assert found.anonymous_peak_bytes is None
    assert found.disturbed


# -- targets --------------------------------------------------------------------------------------------------------


def test_targets_name_systems_that_exist_and_belong_to_the_sizes_of_the_experiments():
    assert {target.system for target in TARGETS} <= set(SYSTEMS)
    assert {target.against for target in TARGETS if target.against} <= set(BASELINES)
    for target in TARGETS:
        assert (target.at_most is None) != (target.at_least is None)
    assert len(targets_of({**SIZE_A, **FP32})) == len(targets_of({**SIZE_B, **FP32})) == 11
    assert targets_of({**SIZE_A, **FP32, "ranks": 3}) == []
    assert targets_of({**SIZE_A, **FP32, "hidden_size": 321}) == []


def verdict(target, *samples, allocator="tuned"):
    systems = list(dict.fromkeys(each.slot.system for each in samples))
    (found,) = judge(compare(samples, systems), [target], allocator)
    return found


def test_targets_are_judged_on_what_the_table_shows():
    def at_most(bound, **more):
        return Target(system="zero3", at_most=bound, **more)

    pair = sample("zero3", 0, 0.752), sample("fsdp2", 0, 1.0, peak_bytes=80 * MIB)
    assert verdict(at_most(0.75, measure="step_s", against="fsdp2"), *pair).met is True
    assert verdict(at_most(0.74, measure="step_s", against="fsdp2"), *pair).met is False
    assert verdict(at_most(1.0, measure="peak_bytes", against="fsdp2"), *pair).measured == 1.25
    assert verdict(at_most(2.0, measure="state_bytes"), pair[0]).measured == 2.0
    more_tokens = Target(system="zero3", measure="tokens_per_s", against="fsdp2", at_least=1.33)
    assert verdict(more_tokens, *pair).measured == pytest.approx(1 / 0.752)
    assert verdict(more_tokens, *pair).met is True


def test_a_target_is_left_open_by_a_failure_and_left_out_without_its_baseline_or_the_tuned_allocator():
    target = Target(system="zero3", measure="step_s", against="fsdp2", at_most=0.75)
    failed = sample("fsdp2", 0, error="no")
    assert verdict(target, sample("zero3", 0, 1.0), failed).met is None
    assert judge(compare([sample("zero3", 0, 1.0)], ["zero3"]), [target], "tuned") == []
    rows = compare([sample("zero3", 0, 1.0), sample("fsdp2", 0, 1.0)], ["zero3", "fsdp2"])
    assert judge(rows, [target], "stock") == []


# -- what is shown --------------------------------------------------------------------------------------------------


def results(rows, verdicts=None):
    return Results(title="a <model> & its data", machine="2 x CPU", rounds=2, steps=20, tokens_per_update=1024,
                   rows=rows, verdicts=verdicts or {}, variables={"tuned": {"NAME": "1"}}, notes=["Left out: x."],
                   versions={"torch": "2.13"})


def test_the_table_has_a_column_per_baseline_that_ran_and_a_line_per_system():
    rows = compare([sample("ddp", 0, 0.5), sample("zero3", 0, 0.4), sample("zero3", 1, 0.6)], ["ddp", "zero3"])
    target = Target(system="zero3", measure="step_s", against="ddp", at_most=0.75)
    text = markdown(results({"tuned": rows}, {"tuned": judge(rows, [target], "tuned")}))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert lines[0][:4] == ["system", "s/step", "x ddp (range)", "peak MiB"]
    assert lines[3][:4] == ["zero3", "0.5000", "0.800 (0.80-0.80)", "100.0"]
    assert "20.0 (2.00)" in lines[3]
    assert lines[-1] == ["zero3", "time against ddp", "0.80", "<= 0.75", "missed"]
    assert "## Allocator: tuned (`NAME=1`)" in text
    assert "Left out: x." in text


def test_a_table_is_aligned():
    lines = aligned(["a", "long head"], [["first", "1"], ["x", "12345678901"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1] == "| ----- | ----------: |"
    assert lines[2] == "| first |           1 |"


def test_the_json_has_the_rows_and_the_verdicts():
    rows = compare([sample("ddp", 0, 0.5), sample("zero3", 0, 0.4)], ["ddp", "zero3"])
    target = Target(system="zero3", measure="step_s", against="ddp", at_most=0.85)
    document = results({"tuned": rows}, {"tuned": judge(rows, [target], "tuned")})
    read = json.loads(json.dumps(plain(as_json(document))))
    assert read["rows"]["tuned"][1]["ratios"]["ddp"]["median"] == pytest.approx(0.8)
    assert read["rows"]["tuned"][0]["tokens_per_s"] == 2048
    assert read["verdicts"]["tuned"][0]["met"] is True
    assert read["verdicts"]["tuned"][0]["at_most"] == 0.85


def test_the_chart_is_svg_with_bars_as_long_as_the_times():
    rows = {"tuned": compare([sample("ddp", 0, 1.0), sample("zero3", 0, 0.5)], ["ddp", "zero3"]),
            "stock": compare([sample("ddp", 0, error="no")], ["ddp", "zero3"])}
    root = ET.fromstring(bar_chart("<title> & more", rows))
    name = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in root.iter(f"{name}text")]
    assert texts[0] == "<title> & more"
    assert texts.count("failed") == 2
    background, _, _, ddp, _, zero3, _ = (float(bar.get("width")) for bar in root.iter(f"{name}rect"))
    assert ddp == pytest.approx(2 * zero3, abs=0.2)
    assert ddp < background


# -- what is kept ---------------------------------------------------------------------------------------------------


def test_samples_are_read_back_the_last_of_each_slot_and_no_failed_one(tmp_path):
    file = SampleFile(tmp_path, "mine")
    kept = [sample("ddp", 0, 1.0), sample("ddp", 0, 2.0), sample("zero3", 0, error="no"), sample("zero3", 1, 3.0)]
    for each in kept:
        file.append(each)
    SampleFile(tmp_path, "another").append(sample("ddp", 5, 1.0))
    assert file.read() == {Slot(0, "tuned", "ddp"): kept[1], Slot(1, "tuned", "zero3"): kept[3]}
    assert file.foreign_lines == 1


def test_a_line_cut_off_by_a_crash_spoils_no_other(tmp_path):
    file = SampleFile(tmp_path, "mine")
    file.append(sample("ddp", 0, 1.0))
    whole = file.path.read_bytes()
    file.path.write_bytes(whole + whole[:20])
    file.append(sample("ddp", 1, 2.0))
    assert [slot.round for slot in file.read()] == [0, 1]
    assert file.path.read_bytes().startswith(whole)


def test_every_allocator_setting_is_exact_whatever_the_shell_has_set():
    shell = {"PATH": "/bin", "GLIBC_TUNABLES": "mine", "MALLOC_ARENA_MAX": "1"}
    tuned = {"GLIBC_TUNABLES": "ours", "THP_MEM_ALLOC_ENABLE": "1"}
    assert allocator_environment("tuned", shell, tuned) == {"PATH": "/bin", **tuned}
    assert allocator_environment("stock", shell, tuned) == {"PATH": "/bin"}
    with pytest.raises(ValueError, match="fancy"):
        allocator_environment("fancy", shell, tuned)
