import json

import pytest

from miles_hpc.errors import DriverError
from miles_hpc.paths import RunDir
from miles_hpc.trainer.inputs import read_environ, read_plan

AGENT = {
    "RAY_ADDRESS": "10.0.0.1:6379",
    "MILES_HPC_ATTEMPT_DIR": "/runs/a/attempts/1",
    "MILES_HPC_NODE": "n01",
    "MILES_HPC_EVENTS": "/runs/a/attempts/1/events-n01.jsonl",
}


def test_the_agents_variables_are_read():
    environ = read_environ({**AGENT, "MILES_HPC_NCCL": "/lib/libnccl.so.2"})
    assert (environ.ray_address, environ.node) == ("10.0.0.1:6379", "n01")
    assert str(environ.nccl) == "/lib/libnccl.so.2"


@pytest.mark.parametrize("nccl", [{}, {"MILES_HPC_NCCL": ""}])
def test_no_nccl_or_an_empty_one_means_no_preload(nccl):
    assert read_environ({**AGENT, **nccl}).nccl is None


def test_every_missing_variable_is_named():
    with pytest.raises(DriverError) as caught:
        read_environ({"RAY_ADDRESS": "", "MILES_HPC_NODE": "n01"})
    for name in ("RAY_ADDRESS", "MILES_HPC_ATTEMPT_DIR", "MILES_HPC_EVENTS"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "text", [None, "{", "[]", "{}", json.dumps({"version": 99}), json.dumps({"version": 1})]
)
def test_a_missing_or_foreign_plan_is_one_message(tmp_path, text):
    run = RunDir(tmp_path)
    if text is not None:
        run.plan.write_text(text)
    with pytest.raises(DriverError, match=r"plan\.json"):
        read_plan(run)
