"""A spec becomes one plan with its engine's part, or a refusal that still shows what there is."""

import json
from pathlib import Path

import pytest

from miles_hpc.engine.compose import (
    all_rules,
    compose_plan,
    draft_plan,
    page_cache_roots,
    require_drivable,
)
from miles_hpc.engine.miles import MILES_CHECKS
from miles_hpc.engine.native import NATIVE_CHECKS
from miles_hpc.errors import PlanError
from miles_hpc.plan.findings import errors_of, run_checks
from miles_hpc.spec.job import JobSpec
from tests.unit.plan.specs import GLM52, NATIVE, QWEN38, spec_of

CPU = {
    "cluster.device": "cpu",
    "cluster.gpus_per_node": 0,
    "model.train_dtype": "fp32",
    "model.rollout_quantisation": "fp32",
    "rollout.engine": "transformers",
}


def compose(spec):
    return compose_plan(spec, python="/opt/python", package_version="0")


def test_the_native_driver_runs_the_trainer_with_the_specs_python():
    assert compose(spec_of(NATIVE, CPU)).driver_argv == (
        "/opt/python",
        "-m",
        "miles_hpc.trainer",
        "{run_dir}",
    )
    spec = spec_of(NATIVE, CPU, {"cluster.python": "/env/bin/python"})
    assert compose(spec).driver_argv[0] == "/env/bin/python"


def test_the_json_holds_the_contract_and_gives_the_spec_back():
    spec = spec_of(NATIVE, CPU, {"env": {"X": "1"}})
    plan = json.loads(compose(spec).to_json())
    assert set(plan["layout"]) >= {
        "world_size", "tp", "pp", "cp", "ep", "etp", "dp", "edp", "num_nodes", "gpus_per_node",
    }  # fmt: skip
    assert set(plan["rollout"]) == {"num_engines", "gpus_per_engine", "nodes_per_engine"}
    assert {"name", "value", "why", "source"} <= set(plan["environment"][0])
    assert JobSpec.model_validate_json(json.dumps(plan["spec"])) == spec


def test_equal_specs_give_equal_bytes():
    assert compose(spec_of(QWEN38)).to_json() == compose(spec_of(QWEN38)).to_json()


@pytest.mark.parametrize("recipe", [QWEN38, GLM52])
def test_a_miles_plan_is_shown_but_not_drivable(recipe):
    plan = compose(spec_of(recipe))
    assert plan.driver_argv[:3] == ("/opt/python", "-m", "miles_hpc.probe.miles_driver")
    assert plan.driver_argv[3:13] == (
        *("--root", "/m", "--revision", plan.spec["engine"]["miles"]["revision"]),
        *("--megatron", "/g", "--model-type", "t", "--script", "train.py"),
    )
    assert plan.driver_argv[13] == "--"
    assert len(plan.notes) == 1
    with pytest.raises(PlanError, match=r"job\.engine: found engine miles"):
        require_drivable(plan)
    require_drivable(compose(spec_of(NATIVE, CPU)))


def test_glm_models_get_their_variables_before_the_users():
    plan = compose(spec_of(GLM52, {"env": {"X": "1"}}))
    names = [variable.name for variable in plan.environment]
    assert names[-3:] == ["INDEXER_ROPE_NEOX_STYLE", "SGLANG_NSA_FORCE_MLA", "X"]


def test_an_impossible_layout_has_findings_and_no_plan():
    draft = draft_plan(spec_of(parallel__ep=3), python="p", package_version="0")
    assert draft.plan is None
    assert errors_of(draft.findings)
    with pytest.raises(PlanError, match="MH207"):
        compose(spec_of(parallel__ep=3))


def test_a_refused_plan_with_a_sound_layout_still_has_its_json():
    spec = spec_of(cluster__segment=9)
    draft = draft_plan(
        spec, python="p", package_version="0", position={"cluster.segment": "a.toml:3"}.get
    )
    assert draft.plan is not None
    findings = json.loads(draft.plan.to_json())["findings"]
    assert [(f["id"], f["level"]) for f in findings] == [("MH262", "error")]
    assert findings[0]["where"].startswith("a.toml:3: ")


LIMITS = [
    ("MH501", {"model.num_mtp_layers": 1}, "num_mtp_layers = 1"),
    ("MH501", {"model.attention_bias": True}, "attention_bias"),
    (
        "MH501",
        {"model.num_query_groups": 24},
        "num_attention_heads(64) % num_query_groups(24) = 16",
    ),
    ("MH502", {"parallel.cp": 2}, "cp(2)"),
    ("MH502", {"rollout.gpus_per_engine": 2, "cluster.num_nodes": 2}, "one process"),
    ("MH503", {"lora": None}, "no [lora] table"),
    ("MH504", {"model.train_dtype": "bf16"}, "cpu_dtype"),
    ("MH504", {"model.rollout_quantisation": "fp8"}, "fp8"),
]


@pytest.mark.parametrize(("rule", "changes", "text"), LIMITS)
def test_the_native_engine_refuses_what_it_cannot_do(rule, changes, text):
    findings = run_checks(NATIVE_CHECKS, spec_of(NATIVE, CPU, changes))
    assert any(f.id == rule and text in f.message for f in findings), findings


def test_the_native_engine_has_nothing_against_the_demo_shape():
    assert run_checks(NATIVE_CHECKS, spec_of(NATIVE, CPU)) == ()


MILES_LIMITS = [
    ("MH551", {"model.weights": "random"}, "random"),
    ("MH552", {"model.rollout_quantisation": "fp8"}, "fp8"),
    ("MH553", {"engine.miles.extra_args": {"use-rollout-indexer-replay": True}}, "indexer"),
    ("MH555", {**GLM52, "engine.miles.extra_args": {"dsa-attention-backend": "tilelang", "qkv-format": "bshd"}}, 'qkv-format "bshd"'),
    ("MH555", {"engine.miles.extra_args": {"qkv-format": "bshd"}}, "max_tokens_per_gpu(4096)"),
    ("MH555", {**GLM52, "train.max_tokens_per_gpu": None, "train.micro_batch_size": 1, "engine.miles.extra_args": {"qkv-format": "bshd"}}, 'recompute = "full"'),
    ("MH556", {**GLM52, "engine.miles.extra_args": {"sglang-enable-dp-attention": True}}, "dp-attention"),
    ("MH553", {**QWEN38, "engine.miles.extra_args": {"check-weight-update-equal": True}}, "check-weight-update-equal"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "changes", "text"), MILES_LIMITS)
def test_the_miles_engine_refuses_what_it_cannot_do(rule, changes, text):
    findings = run_checks(MILES_CHECKS, spec_of(changes))
    assert any(f.id == rule and text in f.message for f in findings), findings


def test_rule_ids_are_unique_and_their_pages_complete():
    rules = all_rules()
    assert len({rule.id for rule in rules}) == len(rules)
    for rule in rules:
        assert rule.title and rule.reason and rule.source, rule.id


def test_every_rule_can_be_broken_by_some_test():
    """A rule that no test breaks may be one that cannot speak."""
    tests = Path(__file__).resolve().parents[1]
    text = "".join(path.read_text(encoding="utf-8") for path in tests.rglob("test_*.py"))
    ours = [rule.id for rule in all_rules() if not rule.id.startswith("MH1")]
    assert [name for name in ours if f'"{name}"' not in text] == []


def test_the_json_of_an_impossible_layout_says_why_and_what_would_fit():
    draft = draft_plan(spec_of(parallel__pp=3), python="p", package_version="0")
    shown = json.loads(draft.to_json())
    assert shown["layout"] is None
    assert {"id", "level", "message", "where"} <= set(shown["findings"][0])
    assert shown["would_fit"] == list(draft.would_fit) != []


def test_the_json_of_a_plan_is_the_plan_with_what_would_fit():
    draft = draft_plan(spec_of(NATIVE, CPU), python="p", package_version="0")
    assert draft.plan is not None
    shown = json.loads(draft.to_json())
    assert shown.pop("would_fit") == []
    assert shown == json.loads(draft.plan.to_json())


def test_page_cache_roots_are_the_checkpoints_once_each_or_the_runs_cache():
    glm = spec_of(GLM52)
    assert page_cache_roots(glm, Path("/run")) == ("/models/toy", "/models/glm_fp8")
    same = spec_of(GLM52, {"model.rollout_checkpoint": "/models/toy"})
    assert page_cache_roots(same, Path("/run")) == ("/models/toy",)
    random = spec_of(NATIVE, CPU, {"model.weights": "random", "model.hf_checkpoint": None})
    assert page_cache_roots(random, Path("/run")) == ("/run/cache",)
    assert page_cache_roots(spec_of(GLM52, {"offload.drop_page_cache": False}), Path("/run")) == ()
