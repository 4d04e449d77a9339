"""`logs`: through all attempts, with node names, as it stands and as it grows."""

import threading
import time

import pytest

from miles_hpc.errors import QueueError
from miles_hpc.run.logs import follow_logs, read_logs
from tests.fakes.recipes import verdict


def attempts_of(run):
    return tuple(run.attempts())


def test_the_drivers_lines_carry_the_head_nodes_name(make_run):
    run = make_run(None)
    attempts_of(run)[0].driver_log.write_bytes(b"one\n\xff two\nno newline")
    assert list(read_logs(run, node=None)) == ["[n1] one", "[n1] \ufffd two", "[n1] no newline"]


def test_all_attempts_are_told_apart(make_run):
    run = make_run(verdict("REQUEUED"), None)
    for attempt in run.attempts():
        attempt.driver_log.write_text(f"from {attempt.number}\n")
    assert list(read_logs(run, node=None)) == [
        "--- attempt 1 ---",
        "[n1] from 1",
        "--- attempt 2 ---",
        "[n1] from 2",
    ]


def test_one_nodes_log_can_be_chosen_and_a_wrong_name_lists_the_right_ones(make_run):
    run = make_run(None)
    attempts_of(run)[0].node_log("n2").write_text("ray\n")
    assert list(read_logs(run, node="n2")) == ["[n2] ray"]
    with pytest.raises(QueueError, match="expected one of: n2"):
        list(read_logs(run, node="n3"))


def test_without_any_log_the_message_says_where_to_look(make_run):
    with pytest.raises(QueueError, match="submission"):
        list(read_logs(make_run(), node=None))
    with pytest.raises(QueueError, match="submission"):
        list(follow_logs(make_run(), node=None, has_ended=lambda: True))


def test_following_sees_lines_as_they_come_goes_on_to_the_next_attempt_and_ends_with_the_run(
    make_run,
):
    run = make_run(verdict("REQUEUED"), None)
    first, second = attempts_of(run)
    hidden = second.root.rename(run.root / "later")
    first.driver_log.write_text("a\nb")
    over = threading.Event()
    seen = []

    def write():
        wait_for(lambda: "[n1] a" in seen)
        hidden.rename(second.root)
        second.driver_log.write_text("c\nd")
        wait_for(lambda: "[n1] c" in seen)
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    for line in follow_logs(run, node=None, has_ended=over.is_set):
        seen.append(line)
    writer.join()
    assert seen == ["[n1] a", "[n1] b", "--- attempt 2 ---", "[n1] c", "[n1] d"]


def wait_for(condition):
    end_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)
