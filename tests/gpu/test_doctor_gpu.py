"""`miles-hpc doctor --cluster local` on a machine with GPUs: the driver is asked, and what it says makes sense."""

import json

import pytest

from miles_hpc.probe.gpus import inspect
from miles_hpc.run.gpu_state import gpu_report_from
from tests.fakes.submission import miles_hpc

hopper = pytest.mark.gpu(generation="hopper", count=1)


@hopper
def test_the_driver_says_what_the_checks_judge():
    report = gpu_report_from(inspect())
    assert report.error == ""
    assert report.driver is not None
    assert report.cuda is not None
    assert report.cuda >= 12000
    assert report.gpus
    for gpu in report.gpus:
        assert gpu.code == 0
        assert gpu.name is not None
        assert (gpu.uuid or "").startswith(("GPU-", "MIG-"))
        assert gpu.memory_bytes is not None
        assert gpu.memory_bytes > 1 << 30
        assert gpu.clock_mhz is not None
        assert 0 < gpu.clock_mhz <= (gpu.max_clock_mhz or 0)
        assert gpu.celsius is not None
        assert 0 < gpu.celsius < 110
        assert gpu.ecc_uncorrected is not None
        assert gpu.remap_failed is False
        assert gpu.throttle is not None


@hopper
@pytest.mark.timeout(300)
def test_doctor_counts_the_gpus_and_asks_for_their_health(tmp_path):
    runs = f"job.run_root={json.dumps(str(tmp_path))}"
    # An H200 machine may have no scratch disk but memory; its GPUs are the matter here.
    done = miles_hpc(
        *("doctor", "--cluster", "local", "--json", "--set", runs),
        *("--set", "offload.allow_memory_scratch=true", "--set", "offload.scratch_min_free=0"),
        timeout_s=240,
    )
    assert done.returncode in (0, 10), done.stderr
    findings = json.loads(done.stdout)["findings"]
    gpus = [finding for finding in findings if finding["check"] == "GPUs"]
    assert [finding["level"] for finding in gpus] == ["ok"], gpus
    assert [finding for finding in findings if finding["check"] == "GPU health"]
    assert [finding for finding in findings if finding["check"] == "driver"]
