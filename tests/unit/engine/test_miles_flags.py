"""Raw flags of Miles: what rules see of them, and what each rule of theirs refuses and lets pass."""

import pytest

from miles_hpc.engine.compose import ENGINE_CHECKS, all_rules, find
from miles_hpc.engine.miles_flag_rules import FLAG_RULE_CHECKS
from miles_hpc.engine.miles_flags import FLAG_CHECKS, OWNED, Flags
from miles_hpc.engine.miles_sharing_rules import SHARING_CHECKS
from miles_hpc.plan.findings import run_checks
from miles_hpc.spec.schema import spec_keys
from tests.unit.plan.specs import GLM52, NATIVE, QWEN38, spec_of

FLAG_RULES = (*FLAG_CHECKS, *FLAG_RULE_CHECKS, *SHARING_CHECKS)
LORA = {"lora": {"rank": 8, "alpha": 16.0}, "offload.base_cpu_backup": True}


def extra(**flags):
    return {
        "engine.miles.extra_args": {name.replace("_", "-"): value for name, value in flags.items()}
    }


def found(*changes):
    return run_checks(ENGINE_CHECKS["miles"], spec_of(*changes))


ADAPTERS = {"lora": {"rank": 8, "alpha": 16.0}}
OWN = {
    "rollout.own_gpus": 8,
    "cluster.num_nodes": 2,
    "offload.train": "none",
    "offload.rollout": "none",
}
STREAM = {"offload.stream_optimizer": True}
MASTERS = {"rematerialize_param_from_master_weight": True}
BROKEN = [
    ("MH561", "error", {}, {"lr": 1e-4}, "--lr among the raw flags; expected a flag that does not follow from the spec: this one is set by train.learning_rate"),
    ("MH561", "error", {}, {"no_offload_train": True}, "set by offload.train"),
    ("MH561", "error", {}, {"rollout_num_gpus_per_eng": 16}, "which argparse reads as --rollout-num-gpus-per-engine"),
    ("MH561", "error", {}, {"sglang_expert_parallel_size": 8}, "rollout.expert_parallel"),
    ("MH561", "error", {}, {"rollout_stop": ["</s>", "--global-batch-size", "8"]}, "--global-batch-size"),
    ("MH561", "error", {}, {"rollout_stop": ["</s>", "--lr=1"]}, "--lr among"),
    ("MH562", "warning", {}, {"balance_data": True, "no_balance_data": True}, "2 of one flag: --balance-data, --no-balance-data; expected each flag once: argparse takes the last, --no-balance-data = True"),
    ("MH562", "warning", {}, {"use_tis": True, "rollout_stop": ["a", "--use-tis"]}, "2 of one flag"),
    ("MH563", "error", {}, {"disable_weights_backuper": True}, "--disable-weights-backuper with Miles 31f1ca961"),
    ("MH563", "error", {}, {"sglang_random_seed": 1}, "--sglang-random-seed"),
    ("MH561", "error", {}, {"stream_optimizer_state_to_disk": True}, "set by offload.stream_optimizer"),
    ("MH563", "error", {"engine.miles.revision": "e13758d9b", **STREAM}, {}, "--stream-optimizer-state-to-disk with Miles e13758d9b"),
    ("MH563", "error", {"engine.miles.revision": "e13758d9b", "offload.train": "disk"}, {}, "--offload-train-target"),
    ("MH563", "error", {**QWEN38, "engine.miles.revision": "31f1ca961a94"}, {}, "--colocate-memory-peak-device"),
    ("MH564", "error", {"engine.miles.script": "train_async.py"}, {}, "script train_async.py on GPUs that trainer and rollout share"),
    ("MH564", "error", {}, {"fully_async": True}, "--fully-async"),
    ("MH564", "error", {}, {"update_weight_transfer_mode": "p2p"}, "weight transfer mode p2p"),
    ("MH575", "error", {}, {"eval_num_gpus": 8}, "--eval-num-gpus 8"),
    ("MH575", "error", {**OWN, "engine.miles.script": "train_async.py"}, {"fully_async": True, "partial_rollout": True, "pause_generation_mode": "abort"}, "--fully-async with --partial-rollout, --pause-generation-mode abort"),
    ("MH575", "error", OWN, {"fully_async": True}, "--fully-async with script train.py"),
    ("MH575", "error", OWN, {"update_weight_transfer_mode": "disk-delta", "update_weight_disk_dir": "/d"}, "disk-delta with no --update-weight-local-checkpoint-dir"),
    ("MH575", "error", OWN | ADAPTERS, {"update_weight_transfer_mode": "p2p", "megatron_to_hf_mode": "bridge"}, "p2p with [lora]"),
    ("MH575", "error", OWN | ADAPTERS, {}, "megatron-to-hf-mode (default) with [lora] and rollout.own_gpus(8)"),
    ("MH575", "error", OWN | ADAPTERS | {"parallel.pp": 2}, {"megatron_to_hf_mode": "bridge"}, "pp(2) with [lora] and rollout.own_gpus(8)"),
    ("MH564", "error", {}, {"multi_lora_n_adapters": 4}, "--multi-lora-n-adapters 4"),
    ("MH565", "error", LORA | STREAM, {}, "with [lora]"),
    ("MH565", "error", {"train.optimizer_cpu_offload": True, **STREAM}, {"enable_witness": True}, "with enable-witness, train.optimizer_cpu_offload"),
    ("MH565", "error", {"offload.train": "host", **STREAM}, {}, 'offload.train = "host"'),
    ("MH565", "error", STREAM, {"optimizer": "muon"}, "optimizer muon"),
    ("MH566", "error", {"offload.train": "disk"}, MASTERS, 'offload.train = "disk"'),
    ("MH566", "error", {"offload.train": "host"}, MASTERS | {"keep_old_actor": True, "num_critic_only_steps": 2}, "with keep-old-actor, num-critic-only-steps 2"),
    ("MH567", "error", {}, {"over_sampling_batch_size": 16}, "over-sampling-batch-size(16) below rollout.prompts_per_step(32)"),
    ("MH567", "error", {}, {"async_max_concurrent_samples": 4}, "async-max-concurrent-samples(4) below rollout.samples_per_prompt(8)"),
    ("MH567", "error", {"train.max_tokens_per_gpu": None, "train.micro_batch_size": 1}, {"balance_by_flops": True}, "--balance-by-flops without a token budget"),
    ("MH567", "error", {"train.global_batch_size": 64}, {"skip_actor_forward_only": True}, "with 4 updates a step"),
    ("MH568", "error", LORA, {"sglang_experts_shared_outer_loras": True}, "--sglang-experts-shared-outer-loras True, --experts-shared-outer-loras False"),
    ("MH568", "error", {}, {"lora_adapter_path": "/a"}, "--lora-adapter-path without [lora]"),
    ("MH568", "error", LORA | {"engine.miles.revision": "e13758d9b"}, {"reload_rollout_weights_from_disk": True}, "base_cpu_backup = true"),
    ("MH569", "error", GLM52, {"sglang_config": "/c.yaml"}, "beside model.rollout_checkpoint (fp8)"),
    ("MH569", "warning", QWEN38, {"sglang_config": "/c.yaml"}, 'rollout_quantisation "nvfp4"'),
    ("MH570", "error", {"rollout.gpus_per_engine": 8}, {"sglang_dp_size": 4}, "sglang-dp-size(4) without sglang-enable-dp-attention"),
    ("MH570", "error", {"rollout.gpus_per_engine": 8}, {"sglang_data_parallel_size": 3, "sglang_enable_dp_attention": True}, "gpus_per_engine(8) % sglang-dp-size(3) = 2"),
    ("MH571", "error", {}, {"eval_interval": 5}, "--eval-interval 5 with no evaluation set"),
    ("MH571", "error", {}, {"eval_prompt_data": ["a", "/a", "b"]}, "with 3 words"),
    ("MH571", "error", {}, {"tito_model": "glm47"}, "no session server"),
    ("MH571", "error", {}, {"use_session_server": True, "pause_generation_mode": "abort"}, "a session server"),
    ("MH571", "error", {"engine.miles.mode": "debug_rollout_only"}, {"debug_train_only": True}, "--debug-train-only"),
    ("MH561", "error", {"train.kl_coef": 0.1}, {"kl_loss_coef": 0.1}, "set by train.kl_coef"),
    ("MH571", "error", {"train.kl_coef": 0.1}, {"advantage_estimator": "ppo"}, "train.kl_coef = 0.1"),
    ("MH571", "error", {"parallel.cp": 2}, {"use_rollout_indexer_replay": True}, "cp(2)"),
    ("MH571", "error", {}, {"advantage_estimator": "ppo", "megatron_to_hf_mode": "bridge"}, "bridge"),
    ("MH571", "error", {}, {"use_session_server": "v2", "group_rm": True}, "--use-session-server v2 with --group-rm"),
    ("MH553", "error", {}, {"rollout_stop": ["x", "--use-rollout-indexer-replay"]}, "indexer replay buffers"),
    ("MH561", "error", {}, {"custom_config_path": "/x.yaml"}, "the package, which continues from the last checkpoint"),
    ("MH554", "error", GLM52, {"rollout_stop": ["x", "--dsa-attention-backend", "megatron"]}, "dsa-attention-backend megatron: 78 layers"),
    ("MH555", "error", GLM52, {"rollout_stop": ["x", "--qkv-format=bshd"], "dsa_attention_backend": "tilelang"}, 'tilelang with qkv-format "bshd"'),
    ("MH556", "error", GLM52, {"rollout_stop": ["x", "--sglang-enable-dp-attention"]}, "sglang-enable-dp-attention with LoRA"),
    ("MH573", "warning", {}, {"sglang_cuda_graph_backend_prefill": "full"}, "full on shared GPUs"),
    ("MH574", "error", {"env": {"MILES_ROUTER_EXTERNAL_HOST": "head.cluster"}}, {}, 'MILES_ROUTER_EXTERNAL_HOST = "head.cluster"'),
    ("MH553", "error", {}, {"use_rollout_indexer_replay": True}, "use-rollout-indexer-replay; expected routing replay: indexer replay buffers 78 to 128 GB"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "level", "changes", "flags", "text"), BROKEN)
def test_a_broken_rule_is_named_with_what_was_found(rule, level, changes, flags, text):
    findings = found(changes, extra(**flags))
    assert any(f.id == rule and f.level == level and text in f.message for f in findings), findings


GOOD = [
    ({}, {"rollout_stop": ["</s>", "<|end|>"], "balance_data": True, "optimizer": "adam"}),
    ({}, {"balance_data": False, "lr_decay_style": "constant", "use_tis": True}),
    ({"engine.miles.revision": "e13758d9b", "offload.train": "host"}, {"disable_weights_backuper": True}),
    ({"engine.miles.revision": "0123456789"}, {"disable_weights_backuper": True}),
    ({}, {"update_weight_transfer_mode": "broadcast", "eval_num_gpus": 0}),
    (OWN | {"engine.miles.script": "train_async.py"}, {"fully_async": True, "pause_generation_mode": "in_place"}),
    (OWN, {"update_weight_transfer_mode": "p2p", "sglang_cuda_graph_backend_prefill": "full"}),
    (OWN | ADAPTERS, {"megatron_to_hf_mode": "bridge", "sglang_enable_dp_attention": True}),
    (STREAM, {"optimizer": "adam"}),
    ({"offload.train": "host"}, MASTERS),
    ({}, {"over_sampling_batch_size": 64, "balance_by_flops": True, "skip_actor_forward_only": True}),
    (LORA, {"experts_shared_outer_loras": True, "sglang_experts_shared_outer_loras": True}),
    ({**LORA, "offload.base_cpu_backup": False, "engine.miles.revision": "e13758d9b", "offload.train": "host"}, {"reload_rollout_weights_from_disk": True}),
    ({}, {"sglang_config": "/c.yaml"}),
    ({"rollout.gpus_per_engine": 8}, {"sglang_dp_size": 4, "sglang_enable_dp_attention": True}),
    ({}, {"eval_interval": 5, "eval_prompt_data": ["aime", "/aime"]}),
    ({}, {"tito_model": "glm47", "use_session_server": True, "pause_generation_mode": "retract"}),
    ({}, {"use_session_server": True, "group_rm": True, "partial_rollout": True}),
    ({"train.kl_coef": 0.1}, {"kl_loss_type": "k3"}),
    ({}, {"advantage_estimator": "ppo", "megatron_to_hf_mode": "raw"}),
    ({}, {"sglang_cuda_graph_backend_prefill": "disabled"}),
    ({"env": {"MILES_ROUTER_EXTERNAL_HOST": "10.0.0.7"}}, {"use_rollout_routing_replay": True}),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "flags"), GOOD)
def test_a_sound_set_of_flags_has_no_finding(changes, flags):
    spoken = list(run_checks(FLAG_RULES, spec_of(changes, extra(**flags))))
    assert spoken == []


def test_every_rule_about_flags_has_a_spec_that_breaks_it():
    ids = {check.rule.id for check in FLAG_RULES}
    assert ids <= {case[0] for case in BROKEN}
    assert ids <= {rule.id for rule in all_rules()}


def test_an_owned_flag_names_a_key_that_exists():
    keys = {".".join(path) for path in spec_keys()}
    for owner in OWNED.values():
        assert owner.startswith("the package") or set(owner.split(" and ")) <= keys, owner


def test_the_native_engine_has_no_raw_flags_and_no_such_finding():
    spec = spec_of(NATIVE)
    assert Flags(spec).all == ()
    assert not [f for f in find(spec) if f.id.startswith("MH56")]


def test_the_last_of_two_flags_is_what_rules_see():
    flags = Flags(
        spec_of(extra(a=["x", "--tito-model", "one"], tito_model="two", b=["--tito-model=three"]))
    )
    assert flags.value("tito-model") == "three"
    assert flags.value("a") == ("x",)
    assert flags.value("b") == ()
    assert flags.key("tito-model") == "engine.miles.extra_args.b"
