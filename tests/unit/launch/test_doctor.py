"""`miles-hpc doctor` on the login node: the spec it checks for, what Slurm refuses, and the table."""

import json

import pytest

from miles_hpc.errors import SpecError
from miles_hpc.launch.doctor import has_silent_nodes, load_doctor_spec
from miles_hpc.launch.doctor_table import doctor_table
from miles_hpc.run.node_report import (
    DoctorReport,
    NodeFinding,
    read_doctor_report,
    write_doctor_report,
)
from tests.fakes.submission import SPEC, miles_hpc

LONG = "/shared/" + "a-very-long-folder-name/" * 8


def load(spec=None, *, site=None, overrides=(), num_nodes=None, local=False):
    loaded = load_doctor_spec(
        spec, site=site, overrides=overrides, num_nodes=num_nodes, local=local
    )
    return loaded.spec


def finding(node, check="scratch", level="ok", found="fine", fix=""):
    return NodeFinding(
        node=node, check=check, found=found, expected="all well", fix=fix, level=level
    )


def test_a_site_alone_says_which_nodes_are_asked_for():
    spec = load(site="example-h200", num_nodes=4)
    assert (spec.cluster.num_nodes, spec.cluster.gpus_per_node) == (4, 8)
    assert (spec.cluster.partition, str(spec.job.run_root)) == ("h200", "/shared/runs")
    assert (spec.job.name, spec.job.time_limit, spec.job.resume) == ("doctor", 600.0, "never")


def test_a_spec_keeps_its_nodes_and_gets_a_short_time_limit():
    spec = load(SPEC, overrides=("job.time_limit=5min",))
    assert (spec.job.name, spec.job.time_limit) == ("doctor-demo-tiny", 300.0)
    assert spec.cluster.num_nodes == 2
    assert load(SPEC, num_nodes=3).cluster.num_nodes == 3
    assert load(SPEC, overrides=("job.time_limit=4h",)).job.time_limit == 600.0


@pytest.mark.parametrize("count", [0, -2])
def test_no_nodes_is_a_fault_of_the_command_line(count):
    with pytest.raises(SpecError, match=r"cluster\.num_nodes"):
        load(site="example-h200", num_nodes=count)


def test_without_gpus_and_a_site_the_message_says_what_is_missing():
    with pytest.raises(SpecError, match=r"cluster\.gpus_per_node"):
        load()


def test_a_refused_job_ends_with_slurms_words_and_leaves_no_folder(fake_slurm, tmp_path):
    fake_slurm.answer(
        "sbatch", stderr="sbatch: error: invalid partition specified: x\n", exit_code=1
    )
    done = miles_hpc("doctor", str(SPEC), f"--set=job.run_root={tmp_path / 'runs'}")
    assert done.returncode == 4, done.stderr
    assert "invalid partition specified: x" in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.rglob("*.toml")) == []


def test_a_machine_without_slurm_is_told(no_slurm, tmp_path):
    done = miles_hpc("doctor", str(SPEC), f"--set=job.run_root={tmp_path / 'runs'}")
    assert done.returncode == 4, done.stderr
    assert "no sbatch" in done.stderr
    assert not list(tmp_path.glob("runs/*"))


def test_the_table_has_the_worst_first_and_fits():
    report = DoctorReport(
        nodes=("n1", "n2", "n3"),
        findings=(
            *(finding(node) for node in ("n1", "n2", "n3")),
            finding("n2", "open files", "warning", "1024", "Raise it."),
            finding("n3", "model and data", "fault", f"{LONG}: No such file", f"Mount {LONG}"),
        ),
    )
    text = doctor_table(report, width=250)
    assert max(len(line) for line in text.splitlines()) <= 100
    places = [text.index(word) for word in ("FAULT n3", "warning n2", "ok all 3")]
    assert places == sorted(places)
    assert LONG in "".join(line[27:52].strip() for line in text.splitlines())
    assert text.splitlines()[-1] == "1 of 3 nodes not fit: 1 faults, 1 warnings, 3 ok"


def test_nodes_with_the_same_fault_share_a_row_and_others_do_not():
    same = [finding(f"n{number}", level="fault", fix="Mend it.") for number in range(1, 20)]
    other = finding("n20", level="fault", found="tmpfs", fix="Mend it.")
    report = DoctorReport(
        nodes=tuple(f"n{number}" for number in range(1, 31)), findings=(*same, other)
    )
    text = doctor_table(report, width=100)
    assert text.count("FAULT") == 2
    assert "FAULT n20" in text
    assert "11 more" in " ".join(text.split())


def test_text_from_a_node_does_not_steer_the_terminal_or_the_table():
    report = DoctorReport(
        nodes=("n1",),
        findings=(finding("n1", level="fault", found="\x1b[2J[bold]x[/bold]", fix="f"),),
    )
    text = doctor_table(report, width=100)
    assert "\x1b" not in text
    assert "[bold]x[/bold]" in text


def test_the_report_survives_its_file(tmp_path):
    report = DoctorReport(nodes=("n1", "n2"), findings=(finding("n1", level="fault"),))
    path = tmp_path / "doctor.json"
    assert read_doctor_report(path) is None
    write_doctor_report(path, report)
    assert read_doctor_report(path) == report
    assert json.loads(path.read_text())["is_fit"] is False


def test_a_node_without_an_interpreter_line_has_said_nothing():
    said = (finding("n1", "interpreter"), finding("n2", "run folder", "fault"))
    assert has_silent_nodes(DoctorReport(nodes=("n1", "n2"), findings=said))
    assert not has_silent_nodes(DoctorReport(nodes=("n1",), findings=said))
