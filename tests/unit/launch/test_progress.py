"""What a waiting user sees: one line per change without a terminal, a live line with one."""

import errno
import io
import os
import pty

import pytest

from miles_hpc.launch.progress import describe, figures, make_display, wait_for_run
from miles_hpc.run.events import Kind
from miles_hpc.run.report import Progress, Status
from miles_hpc.units import format_duration
from tests.fakes.recipes import verdict


def state(name, reason="", attempt=1):
    return Status(
        run_dir="/r",
        job_id="1",
        state=name,
        attempt=attempt,
        exit_code=None,
        driver_exit_code=None,
        reason=reason,
    )


STEP = {"step": 3, "num_steps": 8, "reward": 0.25, "tokens_per_s": 119.6, "time_left_s": 95.0}
TRAINING = Progress(has_cluster=True, phase="train", phase_step=4, last_step=STEP)
NOTHING = Progress(has_cluster=False, phase="", phase_step=None, last_step={})


def test_a_running_line_has_phase_step_reward_speed_and_time_left():
    assert describe(state("RUNNING"), TRAINING) == (
        "attempt 1 RUNNING train of step 4  step 3/8  reward 0.250  120 tokens/s  1min 35s left"
    )


def test_a_line_is_one_line_whatever_the_reason_holds():
    assert (
        describe(state("FAILED", "it died\nand more"), TRAINING) == "attempt 1 FAILED: it died ..."
    )
    assert describe(state("PENDING", "Resources", attempt=0), NOTHING) == "PENDING: Resources"
    assert describe(state("RUNNING"), NOTHING) == "attempt 1 RUNNING"


def test_figures_that_an_engine_does_not_tell_are_left_out():
    assert figures(NOTHING) == ""
    bare = Progress(
        has_cluster=True, phase="", phase_step=None, last_step={"step": 1, "reward": None}
    )
    assert figures(bare) == "step 1"


def test_without_a_terminal_only_changes_are_written():
    stream = io.StringIO()
    display = make_display(stream)
    for name in ("PENDING", "PENDING", "STARTING", "RUNNING", "RUNNING"):
        display.show(state(name), NOTHING)
    display.close()
    assert [line.split()[-1] for line in stream.getvalue().splitlines()] == [
        "PENDING",
        "STARTING",
        "RUNNING",
    ]


def drain(terminal: int) -> str:
    """Return all that was written to a closed terminal; one read returns only a part of it."""
    output = b""
    try:
        while part := os.read(terminal, 65536):
            output += part
    except OSError as error:
        assert error.errno == errno.EIO
    finally:
        os.close(terminal)
    return output.decode()


def test_a_terminal_gets_a_live_line_with_the_same_figures(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    main, terminal = pty.openpty()
    with open(terminal, "w", closefd=True) as stream:  # noqa: PTH123
        display = make_display(stream)
        display.show(state("RUNNING"), TRAINING)
        display.close()
    output = drain(main)
    assert "attempt 1 RUNNING train" in output
    assert "step 3/8  reward 0.250  120 tokens/s  1min 35s left" in output


def test_waiting_ends_with_the_verdict_and_returns_it(fake_slurm, make_run):
    run = make_run(verdict("FAILED", 12, 1), events=((Kind.CLUSTER_READY, {}),))
    stream = io.StringIO()
    last = wait_for_run(run, stream)
    assert (last.state, last.exit_code, last.driver_exit_code) == ("FAILED", 12, 1)
    assert stream.getvalue() == "attempt 1 FAILED: why\n"


def test_waiting_outlasts_a_verdict_that_the_file_system_shows_late(
    fake_slurm, make_run, monkeypatch
):
    import threading

    from miles_hpc.run.resume import write_verdict

    run = make_run(None)
    fake_slurm.answer("squeue", stdout="COMPLETED None\n")
    fake_slurm.answer("scontrol", stdout="JobState=COMPLETED Reason=None ExitCode=0:0\n")
    (attempt,) = run.attempts()
    threading.Timer(1.5, write_verdict, args=(attempt, verdict("COMPLETED"))).start()
    assert wait_for_run(run, io.StringIO()).state == "COMPLETED"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-3, "0s"),
        (59.4, "59s"),
        (60, "1min"),
        (200, "3min 20s"),
        (7500, "2h 5min"),
        (100_000, "1d 3h"),
    ],
)
def test_durations_are_for_a_person(seconds, text):
    assert format_duration(seconds) == text
