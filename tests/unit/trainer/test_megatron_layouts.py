"""Every layout trains the same adapter as one process does."""

import numpy as np
import pytest

from tests.unit.trainer.megatron_lab import (
    FAMILIES,
    largest_gap,
    make_model,
    make_spec,
    run_ranks,
    run_updates,
    start_actor,
)

pytestmark = pytest.mark.trainer

LAYOUTS = {
    "pp2": {"pp": 2},
    "pp2-uneven": {"pp": 2, "first_stage_layers": 3},
    "tp2": {"tp": 2},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "dp2": {},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family_runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_model(folder, request.param)
    actor = start_actor(make_spec(request.param), folder)
    alone = run_updates(actor, 2)
    actor.close()
    jobs = [(make_spec(request.param, parallel=layout), folder) for layout in LAYOUTS.values()]
    return alone, dict(zip(LAYOUTS, run_ranks(2, jobs), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.timeout(300)
def test_a_layout_equals_one_process(family_runs, layout):
    alone, split = family_runs[0], family_runs[1][layout]
    assert largest_gap(alone["before"], split["before"]) < 1e-5
    assert alone["adapter"].keys() == split["adapter"].keys()
    for name, value in alone["adapter"].items():
        np.testing.assert_allclose(split["adapter"][name], value, atol=2e-6, err_msg=name)
    for left, right in zip(alone["reports"], split["reports"], strict=True):
        assert left["tokens"] == right["tokens"]
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-6)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-5)
    assert largest_gap(alone["after"], split["after"]) < 1e-5
    # The updates moved something, or the comparison would say nothing.
    assert largest_gap(alone["before"], alone["after"]) > 1e-2
    assert any(np.abs(v).max() > 1e-3 for n, v in alone["adapter"].items() if "lora_B" in n)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.timeout(300)
def test_a_layout_exports_the_same_base(family_runs, layout):
    alone, split = family_runs[0]["base"], family_runs[1][layout]["base"]
    assert alone.keys() == split.keys()
    assert all(np.array_equal(alone[name], split[name]) for name in alone)
