"""Planned against measured: samples find their phase by time, and the text fits a terminal."""

import json

import pytest

from miles_hpc.paths import RunDir
from miles_hpc.run.memory_lines import memory_report_lines
from miles_hpc.run.memory_report import START, report_memory
from miles_hpc.run.samples import HostMemory, Sample, SampleLog, read_samples

pytestmark = pytest.mark.timeout(30)

GIB = 1 << 30
PLAN = {
    "memory": {
        "limits": {
            "host_bytes_per_node": 100 * GIB,
            "gpu_bytes_per_gpu": None,
            "scratch_bytes_per_node": GIB,
        },
        "phases": [
            {
                "name": name,
                "host_bytes_per_node": 50 * GIB,
                "gpu_bytes_per_gpu": 10 * GIB,
                "scratch_bytes_per_node": 0,
                "parts": {"host.page_cache": 10 * GIB},
            }
            for name in ("load", "rollout", "train")
        ],
        "alarm_host_bytes_per_node": 78 * GIB,
    }
}


@pytest.fixture
def run(tmp_path):
    folder = RunDir(tmp_path)
    folder.plan.write_text(json.dumps(PLAN))
    folder.handoff.write_text("{}")
    return folder


def begin(run, phases=(), node="n1"):
    attempt = run.attempt(1)
    attempt.root.mkdir(parents=True)
    identity = {
        "job_id": "7",
        "restart_count": 0,
        "cluster": "slurm",
        "head_node": node,
        "started_s": 0.0,
    }
    attempt.identity.write_text(json.dumps(identity))
    lines = [
        json.dumps({"time_s": time_s, "node": node, "kind": "phase", "phase": phase, "step": 1})
        for time_s, phase in phases
    ]
    attempt.node_events(node).write_text("".join(f"{line}\n" for line in lines))
    return attempt


def sample(time_s, anon_gib, *, file_gib=0, gpu=()):
    host = HostMemory(anon=anon_gib * GIB, file=file_gib * GIB, shmem=0, locked=0, source="cgroup")
    return Sample(time_s=time_s, host=host, gpu=gpu, scratch=0, scratch_free=GIB)


def write(attempt, node, *samples):
    written = SampleLog(attempt.node_samples(node))
    for entry in samples:
        written.append(entry, always=True)


def peaks(run):
    return {
        phase.name: {entry.node: entry.host_bytes // GIB for entry in phase.measured}
        for phase in report_memory(run).phases
    }


def test_each_sample_counts_for_the_phase_that_had_begun(run):
    attempt = begin(run, [(10.0, "load"), (20.0, "rollout"), (30.0, "train"), (40.0, "rollout")])
    moments = ((5, 1), (10.5, 9), (15, 7), (20, 4), (30, 6), (40, 5))
    write(attempt, "n1", *(sample(time_s, anon_gib) for time_s, anon_gib in moments))
    write(attempt, "n2", sample(12, 3))
    assert peaks(run) == {
        START: {"n1": 1},
        "load": {"n1": 9, "n2": 3},
        "rollout": {"n1": 5},
        "train": {"n1": 6},
    }


def test_what_has_not_moved_since_counts_for_a_later_phase_too(run):
    attempt = begin(run, [(10.0, "load"), (20.0, "rollout"), (30.0, "train")])
    write(attempt, "n1", sample(12, 9), sample(35, 4))
    report = report_memory(run)
    found = {phase.name: phase.measured for phase in report.phases}
    assert [(entry.host_bytes, entry.num_lines) for entry in found["rollout"]] == [(9 * GIB, 0)]


def test_a_phase_too_short_for_a_sample_is_not_measured(run):
    attempt = begin(run, [(10.0, "load"), (12.2, "rollout"), (12.8, "train")])
    write(attempt, "n1", sample(12, 9), sample(13, 4))
    assert peaks(run) == {"load": {"n1": 9}, "rollout": {}, "train": {"n1": 4}}


@pytest.mark.parametrize("has_attempt", [False, True])
def test_a_run_without_samples_shows_its_plan(run, has_attempt):
    if has_attempt:
        begin(run)
    report = report_memory(run)
    assert not report.has_samples
    text = "\n".join(memory_report_lines(report))
    assert "50.0 GiB" in text
    assert "No node has measured anything" in text
    assert json.loads(report.to_json())["phases"][0]["planned"]["host_bytes_per_node"] == 50 * GIB


def test_a_folder_without_a_plan_is_reported_too(tmp_path):
    report = report_memory(RunDir(tmp_path))
    assert (report.attempt, report.phases) == (0, ())
    assert "no attempt yet" in memory_report_lines(report)[0]


def test_bars_show_files_the_alarm_and_what_is_above_it_within_100_columns(run):
    attempt = begin(run, [(10.0, "load"), (20.0, "train")])
    name = "a-node-with-a-very-long-name"
    write(attempt, name, sample(12, 40, file_gib=20, gpu=(GIB, 3 * GIB)), sample(21, 90))
    for index in range(9):
        write(attempt, f"n{index}", sample(12, index))
    alarm = {"time_s": 21.0, "node": name, "kind": "memory_alarm", "message": "long words " * 30}
    with attempt.node_events(name).open("a") as file:
        file.write(json.dumps(alarm) + "\n")
    lines = memory_report_lines(report_memory(run))
    assert max(len(line) for line in lines) <= 100
    plans = [line for line in lines if line[14:18] == "plan"]
    assert len(plans) == 3
    assert all("[########..     |    ]" in line for line in plans)
    top = [line for line in lines if "a-node-with-a..." in line]
    assert "[########....   |    ]  20.0 GiB    3.0 GiB" in top[0]
    assert "[###############!!!  ]" in top[1]
    assert any("and 2 nodes below 1.0 GiB" in line for line in lines)
    assert any(line.startswith(f"  alarm on {name}:") for line in lines)


def test_the_alarm_of_the_handoff_is_the_one_that_counts(run):
    run.handoff.write_text(json.dumps({"memory_alarm": {"host_bytes": GIB, "action": "warn"}}))
    assert report_memory(run).alarm_host_bytes_per_node == GIB


def test_only_what_moved_notably_or_is_old_becomes_a_line(tmp_path):
    written = SampleLog(tmp_path / "samples.jsonl")
    given = [sample(0.0, 10), sample(1.0, 10), sample(2.0, 11), sample(3.0, 11), sample(33.0, 11)]
    assert [written.append(entry) for entry in given] == [True, False, True, False, True]
    with written.path.open("a") as file:
        file.write('{"time_s": 1}\nnot json\n{"half')
    assert list(read_samples(written.path)) == [given[0], given[2], given[4]]
    assert list(read_samples(tmp_path / "none")) == []


def test_the_plan_of_nodes_with_rollout_alone_is_shown_beside_the_trainers(run):
    phase = PLAN["memory"]["phases"][0]
    theirs = [{**phase, "host_bytes_per_node": 20 * GIB}]
    run.plan.write_text(json.dumps({"memory": {**PLAN["memory"], "rollout_phases": theirs}}))
    report = report_memory(run)
    assert report.phases[0].planned_rollout.host_bytes_per_node == 20 * GIB
    assert report.phases[1].planned_rollout is None
    lines = memory_report_lines(report)
    assert [line[14:31].strip() for line in lines[2:4]] == ["plan, trainer", "plan, rollout"]
    assert "20.0 GiB" in lines[3]
