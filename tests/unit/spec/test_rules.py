"""The rules of the spec alone: keys without effect, required or excluded keys, and names with another owner."""

import json
from pathlib import Path

import pytest

from miles_hpc.spec.checks import SPEC_RULES
from miles_hpc.spec.effects import EFFECTS, REFUSALS, REQUIREMENTS
from miles_hpc.spec.schema import spec_keys
from tests.unit.spec.written import MILES, NATIVE, faults, load, only_fault, write

WITHOUT_EFFECT = [
    ("native", ["engine.miles.root=/m"], "engine.miles", "MH101"),
    ("miles", ["engine.native.threads_per_rank=1"], "engine.native", "MH101"),
    ("native", ["train.optimizer_cpu_offload=true"], "train.optimizer_cpu_offload", "MH102"),
    ("native", ["rollout.mem_fraction_static=0.5"], "rollout.mem_fraction_static", "MH103"),
    ("native", ["rollout.attention_backend=triton"], "rollout.attention_backend", "MH103"),
    ("native", ["cluster.gpus_per_node=4"], "cluster.gpus_per_node", "MH104"),
    ("native", ["cluster.gpu_request=gres"], "cluster.gpu_request", "MH104"),
    ("native", ["cluster.gpu_memory=80GiB"], "cluster.gpu_memory", "MH104"),
    ("miles", ["cluster.cpu_ranks_per_node=2"], "cluster.cpu_ranks_per_node", "MH104"),
    ("miles", ["cluster.gpu_request=none", "cluster.gpu_type=h200"], "cluster.gpu_type", "MH104"),
    ("native", ["model.hf_checkpoint=/m"], "model.hf_checkpoint", "MH105"),
    ("miles", ["model.gguf_file=x.gguf"], "model.gguf_file", "MH105"),
    ("miles", ["model.initializer_range=0.1"], "model.initializer_range", "MH105"),
    ("native", ["model.num_dense_layers=1"], "model.num_dense_layers", "MH106"),
    ("miles", ["rollout.moe_runner_backend=triton"], "rollout.moe_runner_backend", "MH106"),
    ("miles", ["data.task=chain_sum"], "data.task", "MH107"),
    ("native", ["data.shuffle=false"], "data.shuffle", "MH107"),
    ("native", ["parallel.first_stage_layers=1"], "parallel.first_stage_layers", "MH109"),
    ("native", ["parallel.sequence_parallel=true"], "parallel.sequence_parallel", "MH109"),
    ("native", ["job.resume=never", "job.max_attempts=3"], "job.max_attempts", "MH110"),
    ("native", ["offload.train=host", "offload.chunk=1MiB"], "offload.chunk", "MH111"),
    ("native", ["offload.optimizer_bucket=1MiB"], "offload.optimizer_bucket", "MH111"),
    (
        "miles",
        ["offload.stream_optimizer=true", "offload.optimizer_bucket=1MiB"],
        "offload.optimizer_bucket",
        "MH111",
    ),
    ("native", ["offload.peak_device=gpu"], "offload.peak_device", "MH111"),
    ("miles", ["offload.peak_device=gpu", "offload.rollout=none"], "offload.peak_device", "MH111"),
    ("miles", ["offload.base_cpu_backup=true"], "offload.base_cpu_backup", "MH111"),
    ("native", ["model.dsa_topk_layers=[0, 1]"], "model.dsa_topk_layers", "MH115"),
    ("native", ["model.full_attention_interval=4"], "model.full_attention_interval", "MH115"),
    ("native", ["nccl.preload=false", "nccl.path=/x"], "nccl.path", "MH116"),
]


@pytest.mark.parametrize(("kind", "overrides", "key", "rule"), WITHOUT_EFFECT)
def test_a_key_without_effect_is_an_error_with_its_rule(
    request: pytest.FixtureRequest, kind: str, overrides: list[str], key: str, rule: str
):
    lines = faults(request.getfixturevalue(kind), *overrides)
    told = [line for line in lines if f" {key}: found a " in line]
    assert len(told) == 1
    assert "without effect here" in told[0]
    assert told[0].endswith(f"; {rule}")


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("native", ["train.optimizer_cpu_offload=false", "parallel.sequence_parallel=false"]),
        ("native", ["cluster.gpu_request=none", "cluster.gpus_per_node=0"]),
        ("native", ["job.resume=never", "job.max_attempts=1"]),
        ("native", ["offload.peak_device=cpu", "parallel.ep=1"]),
        ("miles", ["offload.stream_optimizer=false"]),
        ("native", ["offload.train=none", "offload.stream_optimizer=true", "offload.chunk=1MiB"]),
    ],
)
def test_a_value_that_asks_for_nothing_may_stand_anywhere(
    request: pytest.FixtureRequest, kind: str, overrides: list[str]
):
    assert load(request.getfixturevalue(kind), *overrides).spec.job.engine == kind


@pytest.mark.parametrize(
    ("base", "line", "key", "rule"),
    [
        (MILES, 'hf_checkpoint = "/models/big"\n', "model.hf_checkpoint", "MH105"),
        (MILES, "gpus_per_node = 8\n", "cluster.gpus_per_node", "MH104"),
        (MILES, 'path = "/data/prompts.jsonl"\n', "data.path", "MH107"),
        (MILES, MILES[MILES.index("[engine.miles]") :], "engine.miles", "MH101"),
        (NATIVE, 'task = "chain_sum"\n', "data.task", "MH107"),
    ],
)
def test_a_key_that_the_mode_demands_is_told_when_it_is_missing(
    tmp_path: Path, base: str, line: str, key: str, rule: str
):
    fault = only_fault(write(tmp_path, "a.toml", base.replace(line, "")))
    assert f" {key}: found nothing; expected a value, which " in fault
    assert fault.endswith(rule)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["model.weights=package_gguf"], {"model.gguf_package", "model.gguf_file"}),
        (
            ["model.family=qwen3_moe", "model.num_experts=8"],
            {"model.experts_per_token", "model.moe_ffn_hidden_size"},
        ),
        (
            ["model.family=glm_dsa", "model.num_experts=8", "model.experts_per_token=2",
             "model.moe_ffn_hidden_size=8", "model.q_lora_rank=8"],
            {"model.kv_lora_rank", "model.qk_rope_head_dim", "model.v_head_dim"},
        ),
    ],
)  # fmt: skip
def test_keys_that_belong_together_are_all_or_none(
    miles: Path, overrides: list[str], keys: set[str]
):
    lines = faults(miles, *overrides)
    assert {line.split(": ")[1] for line in lines if "found nothing" in line} == keys


@pytest.mark.parametrize(
    ("kind", "overrides", "key", "rule"),
    [
        ("native", ["train.micro_batch_size=1", "train.max_tokens_per_gpu=9"], "train.micro_batch_size", "MH108"),
        ("miles", ["rollout.engine=transformers"], "rollout.engine", "MH114"),
        ("native", ["cluster.device=gpu", "cluster.gpus_per_node=1"], "rollout.engine", "MH114"),
        ("native", ["offload.drop_page_cache=false", "agent.on_memory_alarm=drop_page_cache"], "agent.on_memory_alarm", "MH111"),
        ("native", ["rollout.top_p=0.9"], "rollout.top_p", "MH113"),
        ("native", ["lora={rank = 1, alpha = 1, dropout = 0.1}"], "lora.dropout", "MH113"),
        ("native", ["data={source = 'jsonl', path = 'x'}"], "data.source", "MH107"),
        ("miles", ["model.num_experts=8", "model.experts_per_token=2", "model.moe_ffn_hidden_size=8"],
         "model.num_experts", "MH106"),
    ],
)  # fmt: skip
def test_values_that_exclude_each_other_are_refused(
    request: pytest.FixtureRequest, kind: str, overrides: list[str], key: str, rule: str
):
    lines = faults(request.getfixturevalue(kind), *overrides)
    assert any(f" {key}: found " in line and line.endswith(rule) for line in lines)


def test_what_follows_from_a_wrong_value_is_not_told_beside_it(native: Path):
    assert only_fault(native, ["job.engine=nativ"]).startswith("--set:1: job.engine: ")


def test_slurms_keys_stand_in_a_file_but_not_on_the_command_line_of_a_local_job(tmp_path: Path):
    spec = write(
        tmp_path, "a.toml", NATIVE.replace("num_nodes = 2", "num_nodes = 2\npartition = 'p'")
    )
    assert load(spec, local=True).spec.cluster.partition == "p"
    assert load(spec, "cluster.partition=q").spec.cluster.partition == "q"
    lines = faults(spec, "cluster.partition=q", local=True)
    assert lines[0].startswith("--set:1: cluster.partition: found a key of Slurm")
    assert lines[0].endswith("MH112")


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_with_offload_under_both_names(miles: Path, name: str):
    value = "max_split_size_mb:512,expandable_segments:"
    fault = only_fault(miles, [f"env.{name}={value}True"])
    assert "expandable_segments:True" in fault
    assert fault.endswith("MH121")
    assert load(miles, f"env.{name}={value}False").spec.env == {name: f"{value}False"}
    kept = load(miles, f"env.{name}={value}True", "offload.train=none", "offload.rollout=none")
    assert kept.spec.env[name] == f"{value}True"


def test_a_job_wide_memory_fraction_is_refused_always(miles: Path):
    overrides = [
        "env.PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.5",
        "offload.train=none",
        "offload.rollout=none",
    ]
    assert only_fault(miles, overrides).endswith("MH121")


def test_variables_inside_the_json_of_a_flag_are_seen_too(miles: Path):
    inner = json.dumps(
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "LD_PRELOAD": "x", "HF_TOKEN": "canary"}
    )
    lines = faults(miles, f"engine.miles.extra_args.train-env-vars='{inner}'")
    assert {line.rpartition("; ")[2] for line in lines} == {"MH121", "MH122", "MH123"}
    assert "canary" not in "\n".join(lines)


@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "MASTER_PORT", "NCCL_SOCKET_IFNAME", "RAY_ADDRESS",
     "SLURM_JOB_ID", "MILES_HPC_RUN_DIR", "TMS_INIT_ENABLE_CPU_BACKUP", "TMS_INIT_ENABLE_DISK_BACKUP", "TMPDIR"],
)  # fmt: skip
def test_a_variable_with_an_owner_is_refused(native: Path, name: str):
    assert only_fault(native, [f"env.{name}=x"]).endswith("remove it; MH122")


@pytest.mark.parametrize(
    "key",
    ["env.WANDB_API_KEY", "env.HF_TOKEN", "env.DB_PASSWORD", "env.MY_SECRET", "env.AWS_SECRET_ACCESS_KEY", "env.api_key",
     "engine.miles.extra_args.wandb-key", "engine.miles.extra_args.sglang-api-key", "engine.miles.extra_args.hf-token"],
)  # fmt: skip
@pytest.mark.parametrize("value", ["canary-0815", "[1, 'canary-0815']"])
def test_a_secret_is_refused_and_never_printed(miles: Path, key: str, value: str):
    text = "\n".join(faults(miles, f"{key}={value}"))
    assert "MH123" in text
    assert "secrets.names" in text
    assert "canary" not in text


@pytest.mark.parametrize(
    "override",
    ["env.TOKENIZERS_PARALLELISM='false'", "env.WANDB_API_KEY_FILE=/home/me/key", "env.MONKEY=x", "env.KEYS_PER_NODE='3'",
     "engine.miles.extra_args.reward-key=score", "engine.miles.extra_args.max-tokens=3"],
)  # fmt: skip
def test_a_name_that_only_sounds_like_a_secret_passes(miles: Path, override: str):
    assert load(miles, override).overrides == (override,)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("cluster.sbatch_options={mem = '0'}", "use cluster.memory_per_node"),
        ("cluster.sbatch_options={partition = 'x'}", "use cluster.partition"),
        ("cluster.sbatch_options={export = 'ALL'}", "use [env]"),
        ("cluster.sbatch_options={array = '1-3'}", "the package decides it"),
        ("cluster.srun_options=['--ntasks=4']", "the package decides it"),
        ("cluster.srun_options=['--mpi=none', '--export=A=b']", "use [env]"),
    ],
)
def test_a_slurm_option_with_an_owner_is_refused_with_the_key_to_use(
    native: Path, override: str, fix: str
):
    assert only_fault(native, [override]).endswith(f"{fix}; MH124")


def test_other_slurm_options_pass(native: Path):
    spec = load(
        native,
        "cluster.sbatch_options={licenses = 'scratch:1', exclude = 'n[1-2]', spread-job = true}",
        "cluster.srun_options=['--mpi=none', '--container-image=/a b.sqsh']",
    ).spec
    assert spec.cluster.srun_options == ("--mpi=none", "--container-image=/a b.sqsh")


def test_rule_ids_are_unique_ordered_and_in_their_range():
    ids = [rule.id for rule in SPEC_RULES]
    assert ids == sorted(set(ids))
    assert all(rule.id.startswith("MH1") and len(rule.id) == 5 for rule in SPEC_RULES)
    assert all(rule.title and rule.reason.endswith(".") and rule.source for rule in SPEC_RULES)


def test_every_key_that_a_rule_names_exists():
    named = {key for effect in EFFECTS for key in (*effect.keys, *effect.when.keys)}
    named |= {key for row in REQUIREMENTS for key in (*row.keys, *row.when.keys)}
    named |= {key for row in REFUSALS for key in (row.key, *row.when.keys)}
    assert {key for key in named if tuple(key.split(".")) not in spec_keys()} == set()


@pytest.mark.parametrize(
    ("name", "found"),
    [("RAY_AUTH_TOKEN", "the variable RAY_AUTH_TOKEN"), ("MINE", "MINE, which [env] sets too")],
)
def test_a_secret_may_not_be_an_owned_variable_nor_stand_in_env_too(
    native: Path, name: str, found: str
):
    line = only_fault(native, [f"secrets.names=['{name}']", "env.MINE=x"])
    assert found in line
    assert line.endswith("MH122")
