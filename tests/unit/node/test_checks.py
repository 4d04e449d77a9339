"""Each check of a node: what it sees in, what it finds out."""

import dataclasses
import re
from pathlib import Path

import pytest

from miles_hpc.errors import Fault
from miles_hpc.node.checks import across, gpu, host, observation
from miles_hpc.node.checks.all_checks import check_all
from miles_hpc.node.checks.observation import Observation, code_digest, count_visible_gpus, look_at
from miles_hpc.run.gpu_state import GpuReport, GpuState
from miles_hpc.run.node_report import NodeReport, faults_of

GIB = 1 << 30
SOUND = GpuState(
    index=0, name="H200", uuid="GPU-aa", memory_bytes=141 * GIB, used_bytes=GIB, ecc_on=True, ecc_uncorrected=0,
    remapped_rows=0, remap_pending=False, remap_failed=False, throttle=0x1, clock_mhz=345, max_clock_mhz=1980, celsius=30,
    links_up=18, fabric_state=3, fabric_status=0, mig_on=False, recovery_action=0,
)  # fmt: skip


@pytest.fixture
def seen():
    return Observation(
        node="n1",
        interpreter={
            "python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "cuda": {"torch": "13.0"},
            "nccl_path": "/lib/libnccl.so.2", "nccl_code": 23007, "nccl_error": "",
        },
        interpreter_error="",
        gpus=None,
        visible_gpus=(0, "readable /dev/nvidia*"),
        memory_bytes=64 * GIB,
        memory_source="MemTotal of the machine",
        memory_left_bytes=48 * GIB,
        memory_left_source="MemAvailable of the machine",
        scratch_root=Path("/local"),
        scratch_look="/local: ext4 on /dev/nvme0n1, 900.0 GiB free",
        scratch_faults=(),
        secret_faults=(),
        run_folder_error="",
        shm_free_bytes=8 * GIB,
        memlock_bytes=None,
        open_files=1 << 20,
        rdma_devices=(),
        paths={},
        code="abc",
    )  # fmt: skip


@pytest.fixture
def handoff(make_context):
    return make_context().handoff


@pytest.fixture
def gpu_handoff(handoff):
    return dataclasses.replace(handoff, gpus_per_node=1)


def with_gpus(seen, *gpus, **changes):
    report = GpuReport(error="", driver="580.82", cuda=13000, gpus=gpus)
    return dataclasses.replace(
        seen,
        gpus=dataclasses.replace(report, **changes),
        visible_gpus=(len(gpus), "readable /dev/nvidia*"),
    )


def levels(findings):
    return [(finding.check, finding.level) for finding in findings]


def test_a_sound_node_has_only_ok(seen, handoff):
    found = check_all(seen, handoff)
    assert {finding.level for finding in found} == {"ok"}
    assert {"interpreter", "Ray", "NCCL", "memory", "/dev/shm", "open files", "scratch"} <= {f.check for f in found}  # fmt: skip


def test_a_sound_gpu_node_has_only_ok(seen, gpu_handoff):
    found = check_all(with_gpus(seen, SOUND), gpu_handoff)
    assert [str(finding) for finding in found if finding.level != "ok"] == []
    assert {"GPUs", "GPU health", "driver"} <= {finding.check for finding in found}


@pytest.mark.parametrize(
    ("changes", "check", "words", "level"),
    [
        ({"interpreter": None, "interpreter_error": "exit 1: no such file"}, "interpreter", "no such file", "fault"),
        ({"interpreter": {"python": "3.11.7", "ray": None, "nccl_code": 23007}}, "Ray", "no package ray", "fault"),
        ({"interpreter": {"ray": "2", "nccl_path": "/x", "nccl_code": 22809}}, "NCCL", "22809 (2.28.9)", "fault"),
        ({"memory_bytes": GIB}, "memory", "1.0 GiB (MemTotal", "fault"),
        ({"memory_left_bytes": 100 << 20}, "memory left", "100.0 MiB (MemAvailable", "fault"),
        ({"shm_free_bytes": 1 << 20}, "/dev/shm", "1.0 MiB free", "fault"),
        ({"open_files": 1024}, "open files", "1024", "warning"),
        ({"memlock_bytes": 64 << 10, "rdma_devices": ("mlx5_0",)}, "locked memory", "64.0 KiB", "warning"),
        ({"run_folder_error": "Read-only file system"}, "run folder", "Read-only", "fault"),
        ({"paths": {"/m": (None, "No such file or directory")}}, "model and data", "/m: No such file", "fault"),
        ({"scratch_faults": (Fault(where="n1: scratch", found="tmpfs", expected="e", fix="f"),), "scratch_root": None},
         "scratch", "tmpfs", "fault"),
        ({"secret_faults": (Fault(where="n1: secrets", found="mode 0644", expected="e", fix="f"),)},
         "secrets", "mode 0644", "fault"),
    ],
)  # fmt: skip
def test_each_fault_has_its_check_and_its_words(seen, handoff, changes, check, words, level):
    handoff = dataclasses.replace(handoff, memory_bytes=8 * GIB)
    found = check_all(dataclasses.replace(seen, **changes), handoff)
    bad = [finding for finding in found if finding.level != "ok"]
    assert levels(bad) == [(check, level)], [str(finding) for finding in bad]
    assert words in bad[0].found
    assert bad[0].fix


def test_locked_memory_matters_only_with_rdma(seen, handoff):
    found = host.check_limits(dataclasses.replace(seen, memlock_bytes=65536), handoff)
    assert levels(found) == [("open files", "ok")]


@pytest.mark.parametrize(
    ("changes", "words", "level"),
    [
        ({"code": 15}, "fallen off the bus", "fault"),
        ({"code": 16}, "needs a reset", "fault"),
        ({"remap_failed": True}, "no spare row", "fault"),
        ({"ecc_uncorrected": 3}, "3 uncorrected ECC errors", "fault"),
        ({"recovery_action": 2}, "a reboot of the node", "fault"),
        ({"fabric_state": 2}, "NVSwitch registration in progress", "fault"),
        ({"fabric_status": 999}, "NVML error 999", "fault"),
        ({"remap_pending": True}, "waits for a reset", "warning"),
        ({"retired_pending": 1}, "waits for a reset", "warning"),
        ({"ecc_on": False}, "ECC is off", "warning"),
        ({"used_bytes": 30 * GIB}, "30.0 GiB of its memory are in use", "warning"),
        ({"mig_on": True}, "MIG", "warning"),
        ({"links_up": 16, "links_down": 2}, "2 of 18 NVLinks are down", "warning"),
        ({"throttle": 0x40 | 0x4}, "too hot (hardware) (345 of 1980 MHz, 30 C)", "warning"),
    ],
)
def test_a_sick_gpu_is_told_by_its_index(seen, gpu_handoff, changes, words, level):
    sick = dataclasses.replace(SOUND, index=1, **changes)
    found = list(gpu.check_gpu_health(with_gpus(seen, SOUND, sick), gpu_handoff))
    assert levels(found) == [("GPU health", level)]
    assert found[0].found.startswith("GPU 1: ")
    assert words in found[0].found


def test_what_a_gpu_does_not_tell_is_no_fault(seen, gpu_handoff):
    found = list(gpu.check_gpu_health(with_gpus(seen, GpuState(index=0)), gpu_handoff))
    assert levels(found) == [("GPU health", "ok")]


def test_idle_clocks_and_links_of_a_gpu_without_nvlink_are_no_fault(seen, gpu_handoff):
    pcie = dataclasses.replace(SOUND, links_up=0, links_down=0, fabric_state=0, throttle=0x1)
    assert levels(gpu.check_gpu_health(with_gpus(seen, pcie), gpu_handoff)) == [
        ("GPU health", "ok")
    ]


def test_too_few_gpus_by_the_scheduler_and_by_the_driver(seen, gpu_handoff):
    wants_two = dataclasses.replace(gpu_handoff, gpus_per_node=2)
    found = list(gpu.check_gpus(with_gpus(seen, SOUND), wants_two))
    assert levels(found) == [("GPUs", "fault"), ("GPUs", "fault")]
    assert "1 that the driver 580.82 shows" in found[1].found


def test_a_missing_management_library_is_a_warning(seen, gpu_handoff):
    found = list(gpu.check_gpus(with_gpus(seen, SOUND, error="libnvidia-ml.so.1: no"), gpu_handoff))
    assert levels(found) == [("GPUs", "ok"), ("GPU health", "warning")]


def test_only_the_gpus_of_the_job_are_judged():
    gpus = tuple(dataclasses.replace(SOUND, index=n, uuid=f"GPU-{n}{n}") for n in range(4))
    assert [g.index for g in gpu.chosen_gpus(gpus, "CUDA_VISIBLE_DEVICES=1,3")] == [1, 3]
    assert [g.index for g in gpu.chosen_gpus(gpus, "CUDA_VISIBLE_DEVICES=GPU-22")] == [2]
    assert len(gpu.chosen_gpus(gpus, "CUDA_VISIBLE_DEVICES=MIG-1/2")) == 4
    assert len(gpu.chosen_gpus(gpus, "readable /dev/nvidia*")) == 4


@pytest.mark.parametrize(
    ("cuda", "level"), [(12080, "fault"), (13000, "ok"), (13020, "ok"), (14000, "ok")]
)
def test_the_driver_must_run_the_cuda_of_torch_and_nccl(seen, gpu_handoff, cuda, level):
    found = list(gpu.check_driver(with_gpus(seen, SOUND, cuda=cuda), gpu_handoff))
    assert levels(found) == [("driver", level)]
    assert f"CUDA up to {cuda // 1000}.{cuda % 1000 // 10}" in found[0].found


def test_visible_gpus_are_counted_by_the_schedulers_variable():
    def count(text):
        return count_visible_gpus({"CUDA_VISIBLE_DEVICES": text}, is_local=False)

    assert count("0, 3,") == (2, "CUDA_VISIBLE_DEVICES=0, 3,")
    assert count("")[0] == 0


def test_a_local_job_counts_the_devices_that_are_there():
    told = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16"}
    count, source = count_visible_gpus(told, is_local=True)
    assert count < 17
    assert source == "readable /dev/nvidia*"


def test_a_path_is_told_by_what_is_there(tmp_path):
    (tmp_path / "model").mkdir()
    assert look_at(tmp_path / "model") == (None, "an empty folder")
    (tmp_path / "model" / "config.json").write_text("{}")
    assert look_at(tmp_path / "model") == ("1 entries, 2 bytes in its files", "")
    assert look_at(tmp_path / "model" / "config.json") == ("a file of 2 bytes", "")
    assert look_at(tmp_path / "gone") == (None, "No such file or directory")


def test_other_code_has_another_digest(tmp_path):
    package = tmp_path / "miles_hpc"
    package.mkdir()
    (package / "a.py").write_text("x = 1\n")
    first = code_digest(tmp_path)
    (package / "__pycache__").mkdir()
    assert code_digest(tmp_path) == first
    (package / "a.py").write_text("x = 10\n")
    assert code_digest(tmp_path) != first


def test_observing_this_machine_leaves_nothing_and_finds_it_fit(make_context, tmp_path):
    context = make_context(nccl=None, code_dir=str(Path(observation.__file__).parents[3]))
    context.rendezvous.open()
    before = sorted(tmp_path.rglob("*"))
    found = observation.observe(context, {"PATH": "/usr/bin:/bin"})
    assert sorted(tmp_path.rglob("*")) == before
    assert found.interpreter is not None, found.interpreter_error
    assert found.gpus is None
    assert re.fullmatch(r"/\S+: \w+ on \S+, \S+ \w+ free", found.scratch_look)
    assert faults_of(check_all(found, context.handoff)) == ()


def report(node, clock_s=100.0, ahead=None, **facts):
    return NodeReport(
        attempt="7-0", node=node, findings=(), facts=facts, clock_s=clock_s, clock_ahead_s=ahead
    )


def test_the_node_that_differs_from_most_is_named():
    reports = [report("n1", Ray="2.60.0"), report("n2", Ray="2.59.0"), report("n3", Ray="2.60.0")]
    bad = faults_of(across.compare_facts(reports))
    assert [(f.node, f.check, f.found) for f in bad] == [("n2", "same Ray", "2.59.0")]
    assert bad[0].expected == "2.60.0, as on 2 of 3 nodes"


def test_other_drivers_and_other_copies_of_a_file_are_warnings():
    reports = [
        report("n1", driver="580.82", **{"path /m": "3 entries"}),
        report("n2", driver="570.1", **{"path /m": "2 entries"}),
    ]
    bad = [f for f in across.compare_facts(reports) if f.level != "ok"]
    assert [(f.node, f.check, f.level) for f in bad] == [
        ("n2", "same driver", "warning"),
        ("n2", "same files", "warning"),
    ]
    assert bad[1].found == "/m: 2 entries"


def test_one_node_has_nothing_to_compare():
    assert list(across.compare_facts([report("n1", Ray="2.60.0")])) == []


def clock_of(node_clock_s, before_s=100.0, read_s=102.0, ahead=None):
    bounds = across.clock_bounds(report("n2", node_clock_s, ahead), before_s, read_s)
    (finding,) = across.compare_clocks({"n2": bounds})
    return finding.level, finding.found


def test_a_clock_ahead_or_behind_is_told_as_far_as_it_is_proven():
    assert clock_of(101.0) == ("ok", "within 1.000 s")
    assert clock_of(162.0) == ("warning", "at least 60.0 s ahead of the head's")
    assert clock_of(41.0) == ("warning", "at least 59.0 s behind the head's")
    # Stamped between the head's two times as far as anyone can tell.
    assert clock_of(106.5) == ("ok", "no difference that shows")


def test_an_exchange_with_the_head_is_believed_before_the_stamps():
    assert clock_of(101.0, ahead=(7.0, 7.1)) == ("warning", "at least 7.0 s ahead of the head's")
