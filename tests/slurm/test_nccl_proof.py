"""Which NCCL the processes of a real job use, though its actors do nothing for it: proved, rescued, refused or warned of.

The engine is a stub with compiled stand-ins of a CUDA build of torch; the pinned library is the real one.
"""

import pytest

from miles_hpc.handoff import NcclPin
from tests.fakes.nccl import make_nccl, make_torch
from tests.slurm.jobs import (
    assert_nothing_left,
    events_of,
    outputs,
    read_json,
    submit,
    verdict_of,
    write_run,
)

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(240)]

ENGINE = """
    import json, os, pathlib, subprocess, sys, time
    import ray
    ray.init(logging_level="ERROR")
    site, attempt = SITE, pathlib.Path(sys.argv[1])

    @ray.remote(num_cpus=0, resources={"miles_hpc_node_1": 0.01})
    class Engine:
        def train(self):
            sys.path.insert(0, site)
            import torch
            return {"pid": os.getpid(), "code": torch.used_nccl()}

        def spawn(self):
            source = f"import sys; sys.path.insert(0, {site!r}); import torch; print(torch.used_nccl())"
            return int(subprocess.run([sys.executable, "-c", source], stdout=-1, check=True).stdout)

    engine = Engine.options(runtime_env={"env_vars": ENVIRON}).remote()
    seen = ray.get(engine.train.remote())
    if WAIT:
        end = time.monotonic() + 90
        while time.monotonic() < end and 'NCCL of pid' not in (attempt / "events-g1-n02.jsonl").read_text():
            time.sleep(0.1)
    else:
        seen["child"] = ray.get(engine.spawn.remote())
    (attempt.parent.parent / "seen.json").write_text(json.dumps(seen))
"""


def write_engine(folder, *, environ, wait, on_mismatch="fail"):
    own = make_nccl(folder / "own", 22809)
    site = make_torch(folder / "site", own)
    source = ENGINE.replace("SITE", repr(str(site))).replace("ENVIRON", repr(environ))
    pin = NcclPin(path=None, version_code=23007, preload=True, on_mismatch=on_mismatch)
    run = write_run(folder / "run", source.replace("WAIT", repr(wait)), num_nodes=2, nccl=pin)
    return run, own


def test_an_engine_that_drops_the_preload_uses_the_pinned_nccl_all_the_same(slurm, tmp_path):
    run, _ = write_engine(tmp_path, environ={"LD_PRELOAD": ""}, wait=False)
    assert slurm.wait_for_job(submit(slurm, run))["JobState"] == "COMPLETED", outputs(run)
    seen = read_json(run.root / "seen.json")
    assert (seen["code"], seen["child"]) == (23007, 23007)
    proofs = [event for event in events_of(run) if event["kind"] == "nccl_proof"]
    assert len({event["pid"] for event in proofs}) == 2
    assert seen["pid"] in {event["pid"] for event in proofs}
    assert {(event["node"], event["version_code"]) for event in proofs} == {("g1-n02", 23007)}
    assert_nothing_left(run)


@pytest.mark.parametrize("on_mismatch", ["fail", "warn"])
def test_an_engine_that_loses_the_hook_too_ends_the_job_or_is_warned_of(
    slurm, tmp_path, on_mismatch
):
    run, own = write_engine(
        tmp_path,
        environ={"LD_PRELOAD": "", "PYTHONPATH": "/nonexistent"},
        wait=True,
        on_mismatch=on_mismatch,
    )
    record = slurm.wait_for_job(submit(slurm, run))
    if on_mismatch == "fail":
        verdict = verdict_of(run)
        assert (record["JobState"], record["ExitCode"]) == ("FAILED", "11:0"), outputs(run)
        assert verdict.state == "FAILED"
        text = verdict.reason
    else:
        assert record["JobState"] == "COMPLETED", outputs(run)
        warnings = [event["message"] for event in events_of(run) if event["kind"] == "warning"]
        (text,) = [message for message in warnings if "NCCL of pid" in message]
        assert f"pid {read_json(run.root / 'seen.json')['pid']} (" in text
    assert text.startswith("g1-n02: NCCL of pid ")
    assert "(ray::Engine" in text
    assert f"found 22809 (2.28.9) from {own}; expected 23007 (2.30.7) from /" in text
    assert_nothing_left(run)
