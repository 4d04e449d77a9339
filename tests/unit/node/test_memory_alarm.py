"""When the memory alarm is raised, what it names as the cause, and what the sampler then does."""

import os
from pathlib import Path

import pytest

from miles_hpc.errors import NodeError
from miles_hpc.handoff import MemoryAlarm
from miles_hpc.node.memory_alarm import AlarmJudge
from miles_hpc.node.sampling import SCRATCH_SHARE, Pace, add_pinned, disk_bytes, make_sampler
from miles_hpc.node.teardown import NodeResources
from miles_hpc.run.events import read_events
from miles_hpc.run.samples import HostMemory, read_samples

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20


def host(anon: int, file: int = 0, shmem: int = 0) -> HostMemory:
    return HostMemory(anon=anon, file=file, shmem=shmem, locked=0, source="cgroup")


def test_while_the_model_loads_the_page_cache_is_no_alarm():
    judge = AlarmJudge(limit=100)
    assert judge.judge(host(60, file=500), loaded=False) is None
    raised = judge.judge(host(101, file=500), loaded=False)
    assert raised is not None
    assert (raised.counted, raised.cause) == (101, "second_backup")


def test_files_that_grew_since_the_load_are_the_page_cache_come_back():
    judge = AlarmJudge(limit=100)
    assert judge.judge(host(50, file=5), loaded=True) is None
    raised = judge.judge(host(55, file=50), loaded=True)
    assert raised is not None
    assert raised.cause == "page_cache"
    assert (raised.grown_file, raised.grown_committed) == (45, 5)
    assert "found 105 B" in str(raised)
    assert "expected at most 100 B" in str(raised)
    assert "the page cache came back" in str(raised)


def test_private_or_shared_memory_that_grew_is_a_second_backup():
    judge = AlarmJudge(limit=100)
    judge.judge(host(20, file=40), loaded=True)
    raised = judge.judge(host(30, file=41, shmem=60), loaded=True)
    assert raised is not None
    assert raised.cause == "second_backup"
    assert (raised.grown_file, raised.grown_committed) == (1, 70)


def test_one_alarm_each_time_the_limit_is_passed():
    judge = AlarmJudge(limit=100)
    found = [judge.judge(host(size), loaded=True) for size in (50, 101, 110, 99, 101, 90, 101)]
    assert [alarm is not None for alarm in found] == [False, True, False, False, False, False, True]


def make(make_context, action, host_bytes, **changes):
    context = make_context(
        memory_alarm=MemoryAlarm(host_bytes=host_bytes, action=action), nccl=None, **changes
    )
    return context, make_sampler(context, NodeResources(on_change=lambda folders: None))


def test_a_low_limit_writes_the_event_with_its_numbers_and_goes_on(make_context):
    context, sampler = make(make_context, "warn", MIB)
    sampler.look()
    events = [e for e in read_events(context.events.path) if e["kind"] == "memory_alarm"]
    assert len(events) == 1
    assert events[0]["host_bytes"] > events[0]["limit_bytes"] == MIB
    assert events[0]["anon_bytes"] > MIB
    assert (events[0]["cause"], events[0]["action"]) == ("second_backup", "warn")
    context.stop.raise_if_requested()
    assert len(list(read_samples(context.attempt.node_samples("n1")))) == 1


def test_below_the_limit_there_is_a_sample_and_no_event(make_context):
    context, sampler = make(make_context, "stop", 1 << 50)
    sampler.look()
    assert list(read_events(context.events.path)) == []
    assert next(read_samples(context.attempt.node_samples("n1"))).host.anon > MIB
    context.stop.raise_if_requested()


def test_stop_ends_the_agent_with_an_error_that_names_the_alarm(make_context):
    context, sampler = make(make_context, "stop", MIB)
    sampler.look()
    with pytest.raises(NodeError, match=r"n1: memory alarm: found .* expected at most 1.0 MiB"):
        context.stop.raise_if_requested()


def test_the_page_cache_is_dropped_when_the_spec_says_so(make_context, tmp_path):
    file = tmp_path / "weights" / "model.safetensors"
    file.parent.mkdir()
    with file.open("wb") as stream:
        stream.write(os.urandom(4 * MIB))
        os.fsync(stream.fileno())
    context, sampler = make(
        make_context, "drop_page_cache", MIB, page_cache_roots=(str(file.parent),)
    )
    sampler.look()
    dropped = [e for e in read_events(context.events.path) if e["kind"] == "page_cache_dropped"]
    assert [event["num_files"] for event in dropped] == [1]
    context.stop.raise_if_requested()


def test_a_dear_source_is_read_as_seldom_as_its_share_allows():
    pace = Pace(SCRATCH_SHARE)
    assert pace.is_due(100.0)
    pace.charge(100.0, cpu_s=0.0005)
    assert pace.is_due(101.0)
    pace.charge(101.0, cpu_s=50 * SCRATCH_SHARE)
    assert not pace.is_due(150.9)
    assert pace.is_due(151.1)


def test_pinned_memory_that_the_cgroup_does_not_know_is_added():
    known = HostMemory(anon=5, file=6, shmem=30, locked=1, source="cgroup")
    mapped = HostMemory(anon=5, file=9, shmem=130, locked=0, source="processes")
    found = add_pinned(known, mapped)
    assert (found.anon, found.file, found.shmem, found.locked) == (5, 6, 130, 101)
    assert found.source == "cgroup"
    assert add_pinned(known, host(5, shmem=20)) == known


def test_scratch_counts_what_is_on_disk(tmp_path):
    (tmp_path / "a").mkdir()
    with Path(tmp_path / "a" / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    with Path(tmp_path / "full").open("wb") as file:
        file.write(os.urandom(MIB))
        os.fsync(file.fileno())
    assert MIB <= disk_bytes(tmp_path) < 2 * MIB
    assert disk_bytes(tmp_path / "missing") == 0
