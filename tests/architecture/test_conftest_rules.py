"""The rules of tests/conftest.py are enforced: each is broken once in a small suite of its own."""

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    return pytester


def _run(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return suite.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


@pytest.mark.parametrize(
    ("decorator", "complaint"),
    [
        ("@pytest.mark.gpu", "gpu(generation=None)"),
        ("@pytest.mark.gpu(count=1)", "gpu(generation=None)"),
        ("@pytest.mark.gpu(generation='any', count=1)", "gpu(generation='any')"),
        ("@pytest.mark.gpu(generation='hopper')", "gpu(count=None)"),
        ("@pytest.mark.gpu(generation='hopper', count=0)", "gpu(count=0)"),
        ("@pytest.mark.gpu(generation='hopper', count=True)", "gpu(count=True)"),
        ("@pytest.mark.timeout(0)", "timeout(0)"),
    ],
)
def test_a_test_that_breaks_a_rule_fails_collection(suite, decorator, complaint):
    suite.makepyfile(f"import pytest\n{decorator}\ndef test_it():\n    pass\n")
    result = _run(suite)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert complaint in result.stderr.str()


def test_a_test_in_a_gpu_folder_without_declared_hardware_fails_collection(suite):
    folder = suite.mkdir("gpu")
    (folder / "test_it.py").write_text("def test_it():\n    pass\n", encoding="utf-8")
    result = _run(suite)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "without @pytest.mark.gpu" in result.stderr.str()


def _fake_nvidia_smi(suite: pytest.Pytester, lines: str) -> None:
    binary = suite.mkdir("bin") / "nvidia-smi"
    binary.write_text(f"#!/bin/sh\nprintf '{lines}'\n", encoding="utf-8")
    binary.chmod(0o755)


@pytest.mark.parametrize(
    ("gpus", "outcome"),
    [
        ("NVIDIA H200\\n", {"passed": 1, "skipped": 1}),
        ("NVIDIA H200\\nNVIDIA H100 80GB HBM3\\n", {"passed": 2}),
        ("NVIDIA GB200\\nNVIDIA GB200\\n", {"skipped": 2}),
    ],
)
def test_a_gpu_test_runs_only_on_the_hardware_it_declares(suite, monkeypatch, gpus, outcome):
    _fake_nvidia_smi(suite, gpus)
    monkeypatch.setenv("PATH", str(suite.path / "bin"), prepend=":")
    suite.makepyfile(
        """
        import pytest

        @pytest.mark.gpu(generation="hopper", count=1)
        def test_one():
            pass

        @pytest.mark.gpu(generation=("hopper", "ampere"), count=2)
        def test_two():
            pass
        """
    )
    _run(suite).assert_outcomes(**outcome)


def test_unit_tests_see_no_variable_of_the_surrounding_allocation(suite, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    folder = suite.mkdir("unit")
    (folder / "test_it.py").write_text(
        "import os\n\ndef test_it():\n"
        "    assert not {'SLURM_JOB_ID', 'PYTORCH_CUDA_ALLOC_CONF'} & set(os.environ)\n",
        encoding="utf-8",
    )
    _run(suite).assert_outcomes(passed=1)
