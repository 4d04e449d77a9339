"""Rules and fixtures that every test shares: markers, declared GPU hardware, a clean environment, run folders.

Knows nothing of Slurm, Ray or a trainer; those fixtures stand in the conftest.py of their own folder.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

GPU_GENERATIONS = ("ampere", "hopper", "blackwell")
"""What a GPU test may declare; `any` is refused on purpose: a result belongs to the hardware it was seen on."""

SCRUBBED_PREFIXES = (
    "CUDA_",
    "MILES_HPC_",
    "NCCL_",
    "PYTORCH_",
    "RAY_",
    "SBATCH_",
    "SLURM_",
    "SLURMD_",
    "SUBMITIT_",
)
SCRUBBED_NAMES = ("LD_PRELOAD", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")

_MARKERS = (
    "slurm: starts its own slurmctld and slurmd; needs Debian's slurm-wlm and munge",
    "trainer: runs megatron-core or a model on the CPU",
    "sglang: needs an installed sglang",
    "slow: takes more than about 20 seconds",
    "gpu(generation, count): needs `count` GPUs of one `generation` (or of one in a tuple of generations)",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        default=False,
        help="write the golden files instead of comparing with them",
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    faults = [fault for item in items for fault in _collection_faults(item)]
    if faults:
        raise pytest.UsageError(
            "tests that break a rule of tests/conftest.py:\n" + "\n".join(faults)
        )
    gpus = None
    for item in items:
        mark = item.get_closest_marker("gpu")
        if mark is None:
            continue
        gpus = _visible_gpus() if gpus is None else gpus
        generations = _as_tuple(mark.kwargs["generation"])
        fitting = [name for name in gpus if _generation_of(name) in generations]
        if len(fitting) < mark.kwargs["count"]:
            reason = (
                f"needs {mark.kwargs['count']} GPU(s) of {' or '.join(generations)}; "
                f"this machine has {gpus or 'none'}"
            )
            item.add_marker(pytest.mark.skip(reason=reason))


def _collection_faults(item: pytest.Item) -> Iterator[str]:
    """Yield what is wrong with how a test declares its hardware and its time-out."""
    mark = item.get_closest_marker("gpu")
    in_gpu_folder = "gpu" in item.path.relative_to(item.config.rootpath).parts[:-1]
    if mark is None and in_gpu_folder:
        yield f"{item.nodeid}: stands in a gpu/ folder without @pytest.mark.gpu(generation=..., count=...)"
    if mark is not None:
        generations = _as_tuple(mark.kwargs.get("generation"))
        count = mark.kwargs.get("count")
        if not generations or not set(generations) <= set(GPU_GENERATIONS):
            yield (
                f"{item.nodeid}: gpu(generation={mark.kwargs.get('generation')!r}); "
                f"expected one or a tuple of {GPU_GENERATIONS}"
            )
        if type(count) is not int or count < 1:
            yield f"{item.nodeid}: gpu(count={count!r}); expected a whole number from 1"
    timeout = item.get_closest_marker("timeout")
    if timeout is not None:
        seconds = timeout.args[0] if timeout.args else timeout.kwargs.get("timeout")
        if not isinstance(seconds, int | float) or not 0 < seconds <= 1800:
            yield f"{item.nodeid}: timeout({seconds!r}); every test has a time-out of 1 to 1800 s"


def _as_tuple(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, tuple | list) else ()


def _visible_gpus() -> list[str]:
    """Return the product names of this machine's GPUs, as nvidia-smi prints them."""
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def _generation_of(gpu_name: str) -> str | None:
    """Return the generation of a product name such as "NVIDIA H200"; None when it is not one we know."""
    products = {"A100": "ampere", "H100": "hopper", "H200": "hopper", "GH200": "hopper"}
    products |= {
        "B200": "blackwell",
        "B300": "blackwell",
        "GB200": "blackwell",
        "GB300": "blackwell",
    }
    return next(
        (products[word] for word in gpu_name.replace("-", " ").split() if word in products), None
    )


@pytest.fixture
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove what a surrounding allocation, Ray or shell may have set, so that a test sees only what it sets."""
    for name in list(os.environ):
        if name.startswith(SCRUBBED_PREFIXES) or name in SCRUBBED_NAMES:
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture(autouse=True)
def _clean_environ_for_pure_tests(request: pytest.FixtureRequest) -> None:
    """Give every test of unit/ and flow/ the clean environment; slurm/ and gpu/ set theirs up themselves."""
    folders = request.node.path.relative_to(request.config.rootpath).parts[:-1]
    if {"unit", "flow"} & set(folders):
        request.getfixturevalue("clean_environ")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """True when `--update-golden` was given; a missing golden file fails a test without it."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def weird_tmp_path(tmp_path: Path) -> Path:
    """A folder whose name holds what breaks careless quoting: spaces, a quote, a dollar, a comma, non-ASCII."""
    folder = tmp_path / "a b's $HOME, ü%j"
    folder.mkdir()
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The path of a run folder that does not exist yet, below a folder that does."""
    return tmp_path / "runs" / "demo-0001"
