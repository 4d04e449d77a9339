"""The files by which nodes meet, and the merged events."""

import json
import stat
from dataclasses import replace

from miles_hpc.node.merge import EventMerge
from miles_hpc.node.rendezvous import HeadAddress, NodeFailure, Rendezvous
from miles_hpc.run.events import EventLog, Kind, read_events


def test_a_head_of_another_attempt_is_none(tmp_path):
    rendezvous = Rendezvous(tmp_path / "rendezvous", "7-1")
    rendezvous.open()
    assert rendezvous.head() is None
    here = HeadAddress(
        attempt="7-0", node="n1", host="10.0.0.1", gcs_port=2, reach_port=3, host_identity="boot/1"
    )
    rendezvous.publish_head(here)
    assert rendezvous.head() is None
    rendezvous.publish_head(replace(here, attempt="7-1"))
    assert rendezvous.head() == replace(here, attempt="7-1")
    assert rendezvous.head().ray_address == "10.0.0.1:2"


def test_the_token_is_secret_new_each_time_and_gone_at_the_end(tmp_path):
    rendezvous = Rendezvous(tmp_path / "rendezvous", "7-0")
    rendezvous.open()
    first = rendezvous.token.read_text()
    assert stat.S_IMODE(rendezvous.token.stat().st_mode) == 0o600
    rendezvous.open()
    assert rendezvous.token.read_text() != first
    rendezvous.close()
    assert not rendezvous.token.exists()


def test_what_nodes_say_comes_back(tmp_path):
    rendezvous = Rendezvous(tmp_path / "rendezvous", "7-0")
    rendezvous.open()
    failure = NodeFailure(node="n2", kind="PreflightError", message="no disk", exit_code=10)
    assert (rendezvous.failures(), rendezvous.gone()) == ((), frozenset())
    assert not rendezvous.is_stopped()
    assert not rendezvous.is_loaded()
    rendezvous.report_failure(failure)
    rendezvous.announce_gone("n2")
    rendezvous.announce_stop("FAILED", "no disk")
    rendezvous.announce_loaded()
    assert rendezvous.failures() == (failure,)
    assert rendezvous.gone() == {"n2"}
    assert rendezvous.is_stopped()
    assert rendezvous.is_loaded()


def test_merging_takes_each_whole_line_once_in_order_of_time(tmp_path):
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    merge = EventMerge(attempt, tmp_path / "events.jsonl")
    merge.run_once()
    assert not merge.target.exists()
    lines = [{"time_s": time_s, "node": "n", "kind": "warning"} for time_s in (3.0, 1.0, 2.0)]
    (attempt / "events-a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    (attempt / "events-b.jsonl").write_text(json.dumps(lines[2]) + '\n{"time_s": 4.0, "no')
    merge.run_once()
    merge.run_once()
    assert [event["time_s"] for event in read_events(merge.target)] == [1.0, 2.0, 3.0]
    with (attempt / "events-b.jsonl").open("a") as file:
        file.write('de": "n", "kind": "step"}\nnot json\n')
    merge.run_once()
    assert [event["time_s"] for event in read_events(merge.target)] == [1.0, 2.0, 3.0, 4.0]


def test_the_driver_having_loaded_is_noticed(tmp_path):
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    merge = EventMerge(attempt, tmp_path / "events.jsonl")
    log = EventLog(attempt / "events-n1.jsonl", "n1")
    log.append(Kind.PHASE, phase="load")
    merge.run_once()
    assert not merge.pace.is_loaded
    log.append(Kind.MODEL_LOADED, seconds=1.0)
    merge.run_once()
    assert merge.pace.is_loaded
