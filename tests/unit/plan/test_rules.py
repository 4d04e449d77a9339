"""Every rule beside the grid: what breaks it, what it says, and what would fit."""

import pytest

from miles_hpc.errors import PlanError
from miles_hpc.plan.batch import global_batch_size, updates_per_step
from miles_hpc.plan.findings import errors_of, locate, refuse, run_checks
from miles_hpc.plan.rules import CHECKS, nearest_fits, value_at, with_value
from tests.unit.plan.specs import GLM52, NATIVE, QWEN38, spec_of

CPU = {
    "cluster.device": "cpu",
    "cluster.gpus_per_node": 0,
    "model.train_dtype": "fp32",
    "model.rollout_quantisation": "fp32",
}
OWN = {
    "rollout.own_gpus": 8,
    "cluster.num_nodes": 2,
    "offload.train": "none",
    "offload.rollout": "none",
}
LORA = {"lora": {"rank": 8, "alpha": 16.0}}

BROKEN = [
    ("MH231", "error", {"train.global_batch_size": 100}, "256 % global_batch_size(100) = 56"),
    ("MH233", "error", {"train.max_tokens_per_gpu": None, "train.micro_batch_size": 5}, "global_batch_size(256) % (dp(8) * micro_batch_size(5) = 40) = 16"),
    ("MH234", "error", {"train.global_batch_size": 4}, "global_batch_size(4) below dp(8)"),
    ("MH234", "warning", {"train.max_tokens_per_gpu": 512}, "2048 above max_tokens_per_gpu(512) * cp(1)"),
    ("MH235", "error", {"rollout.samples_per_prompt": 1}, "samples_per_prompt = 1"),
    ("MH236", "error", {"rollout.max_response_tokens": 4000}, "5024, above max_position_embeddings(4096)"),
    ("MH236", "error", {"rollout.context_length": 2000}, "2048, above context_length(2000)"),
    ("MH241", "error", {"lora": {"rank": 8, "alpha": 1.0, "target_modules": ["wq"]}}, "wq"),
    ("MH242", "error", {**QWEN38, "rollout.lora_backend": None}, "engine default"),
    ("MH243", "warning", LORA, "without base_cpu_backup"),
    ("MH244", "warning", {"train.kl_coef": 0.1}, "kl_coef = 0.1"),
    ("MH246", "warning", {"offload.rollout": "none"}, 'offload.rollout = "none"'),
    ("MH211", "error", {"rollout.own_gpus": 8}, "own_gpus(8) of num_nodes(1) * gpus_per_node(8) = 8 GPUs; expected GPUs left for the trainer. Set cluster.num_nodes = 2"),
    ("MH211", "error", {"rollout.own_gpus": 4, "cluster.num_nodes": 2}, "4 % 8 = 4; expected whole nodes for rollout"),
    ("MH247", "error", {**OWN, "offload.rollout": "host"}, 'offload.rollout = "host" with rollout.own_gpus(8)'),
    ("MH261", "error", {"cluster.cpus_per_node": 4}, "8 ranks a node * 1 CPUs each = 8 CPUs, above cpus_per_node(4)"),
    ("MH261", "error", {**NATIVE, **CPU, "engine.native.threads_per_rank": 60, "cluster.cpus_per_node": 2}, "1 ranks a node * 60 CPUs each = 60 CPUs"),
    ("MH262", "error", {"cluster.segment": 18}, "segment(18) above num_nodes(1)"),
    ("MH263", "error", {**QWEN38, "nccl.version": "2.28.9"}, "NCCL 2.28.9"),
    ("MH263", "error", {**GLM52, "nccl.preload": False}, "nccl.preload = false"),
    ("MH264", "warning", {"cluster.num_nodes": 2, "parallel.tp": 16, "cluster.segment": 1}, "tp(16) over 2 nodes of 8 GPUs with segment = 1"),
    ("MH265", "error", {"offload.train": "disk", "offload.scratch_root": "/dev/shm/x"}, "scratch_root /dev/shm/x, below /dev/shm, with 2.0 TiB to write"),
    ("MH265", "error", {"offload.train": "disk", "job.run_root": "/nfs/runs", "offload.scratch_root": "/nfs/runs/scratch"}, "below job.run_root /nfs/runs"),
    ("MH265", "warning", {"offload.train": "disk", "offload.allow_memory_scratch": True}, "allow_memory_scratch = true"),
    ("MH266", "warning", {"train.num_steps": 200}, 'save_interval = (none) with num_steps(200), resume = "auto" and 3 attempts'),
    ("MH266", "warning", {"train.num_steps": 20, "checkpoint.save_interval": 20}, "save_interval = 20 with num_steps(20)"),
    ("MH267", "error", {"agent.save_before_limit": "1h", "job.time_limit": "1h"}, "save_before_limit(3600 s) with time_limit(3600 s)"),
    ("MH404", "error", {"env": {"SCRATCH": "/tmp"}}, "SCRATCH"),
    ("MH404", "error", {"env": {"MILES_SCRIPT_NUM_NODES": "4"}}, "MILES_SCRIPT_NUM_NODES in [env]"),
    ("MH402", "error", {"env": {"HF_HUB_OFFLINE": "0"}}, "HF_HUB_OFFLINE"),
    ("MH404", "error", {"env": {"MILES_TRAIN_MEMORY_FRACTION": "0.4"}}, "MILES_TRAIN_MEMORY_FRACTION"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "level", "changes", "text"), BROKEN)
def test_a_broken_rule_is_named_with_what_was_found(rule, level, changes, text):
    findings = run_checks(CHECKS, spec_of(changes))
    assert any(f.id == rule and f.level == level and text in f.message for f in findings), findings


GOOD = [
    {},
    LORA | {"offload.base_cpu_backup": True},
    {"env": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:False"}},
    {"env": {"WANDB_MODE": "offline", "NVTE_USE_FAST_MATH": "0"}},
    {"train.max_tokens_per_gpu": None, "train.micro_batch_size": 4, "train.global_batch_size": 64},
    {"cluster.cpus_per_node": 8},
    OWN,
    {"cluster.num_nodes": 2, "parallel.tp": 16, "cluster.segment": 2},
    {"offload.train": "disk", "offload.scratch_root": "/scratch", "job.run_root": "/nfs/runs"},
    {"offload.train": "host", "offload.scratch_root": "/dev/shm"},
    {
        "offload.train": "disk",
        "offload.scratch_root": "/dev/shm",
        "offload.allow_memory_scratch": True,
        "cluster.device": "cpu",
        "cluster.gpus_per_node": 0,
    },
    {"train.num_steps": 200, "checkpoint.save_interval": 10},
    {"train.num_steps": 200, "job.resume": "never", "job.max_attempts": 1},
    {"train.max_tokens_per_gpu": None},
    {**NATIVE, **CPU, "engine.native.threads_per_rank": 2, "cluster.cpus_per_node": 2},
]


@pytest.mark.parametrize("changes", GOOD)
def test_a_sound_spec_has_no_finding(changes):
    assert run_checks(CHECKS, spec_of(changes)) == ()


def test_updates_follow_from_the_batch():
    spec = spec_of(train__global_batch_size=64)
    assert (global_batch_size(spec), updates_per_step(spec)) == (64, 4)
    assert updates_per_step(spec_of()) == 1


def test_a_refusal_lists_every_error_and_what_would_fit():
    spec = spec_of(rollout__samples_per_prompt=1, cluster__segment=9)
    findings = run_checks(CHECKS, spec)
    with pytest.raises(PlanError) as caught:
        refuse(findings, ["set cluster.num_nodes = 9"])
    lines = str(caught.value).splitlines()
    assert [line[:5] for line in lines] == ["MH235", "MH262", "What "]
    assert lines[-1] == "What would fit: set cluster.num_nodes = 9."


def test_warnings_alone_refuse_nothing():
    findings = run_checks(CHECKS, spec_of(train__kl_coef=0.1))
    assert findings and not errors_of(findings)
    refuse(findings)


def test_findings_lead_with_the_line_of_their_first_written_key():
    findings = run_checks(CHECKS, spec_of(cluster__segment=9))
    placed = locate(findings, {"cluster.num_nodes": "job.toml:7"}.get)
    assert placed[0].where == "job.toml:7: cluster.segment, cluster.num_nodes"
    assert locate(findings, lambda _: None)[0].where == "cluster.segment, cluster.num_nodes"


def test_with_value_changes_one_key_and_nothing_else():
    spec = spec_of()
    changed = with_value(spec, "parallel.tp", 4)
    assert value_at(changed, "parallel.tp") == 4
    assert value_at(spec, "parallel.tp") == 1
    assert with_value(changed, "parallel.tp", 1) == spec


def apply(spec, phrase):
    for part in phrase.split(" and "):
        key, _, value = part.removeprefix("set ").partition(" = ")
        spec = with_value(spec, key, int(value))
    return spec


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel.pp": 3, "model.num_layers": 60},
        {"rollout.gpus_per_engine": 6},
        {"train.global_batch_size": 100},
        {**QWEN38, "cluster.num_nodes": 13},
        {**QWEN38, "parallel.ep": 24},
        {**GLM52, "parallel.pp": 3},
        {"cluster.num_nodes": 8, "cluster.gpus_per_node": 4, "parallel.tp": 4, "parallel.pp": 8, "parallel.cp": 2},
    ],
)  # fmt: skip
def test_what_would_fit_really_fits(changes):
    spec = spec_of(changes)

    def find(candidate):
        return run_checks(CHECKS, candidate)

    assert errors_of(find(spec))
    phrases = nearest_fits(spec, find)
    assert phrases
    for phrase in phrases:
        assert not errors_of(find(apply(spec, phrase))), phrase


def test_the_smallest_number_of_nodes_is_named():
    spec = spec_of(QWEN38, {"cluster.num_nodes": 5})
    assert "set cluster.num_nodes = 16" in nearest_fits(spec, lambda s: run_checks(CHECKS, s))
