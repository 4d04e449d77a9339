"""The command of Miles' script: goldens of the flagship recipes, and what no recipe's command may contain."""

import json
from collections import Counter
from pathlib import Path

import pytest

from miles_hpc.engine.miles_command import engine_files, train_flags
from miles_hpc.engine.miles_flags import OWNED
from miles_hpc.spec.load import load_spec
from tests.fakes.recipes import ROOT
from tests.unit.plan.specs import GLM52, QWEN38, spec_of

ROLLOUT_ONLY = 'engine.miles.mode="debug_rollout_only"'
DENSE_DSA = (
    "rollout.max_prompt_tokens=2048",
    "rollout.max_response_tokens=1024",
    "train.recompute=none",
    "engine.miles.extra_args.dsa-attention-backend=megatron",
    "engine.miles.extra_args.qkv-format=bshd",
    "engine.miles.extra_args.max-seq-len=4096",
)
COMMANDS = {
    "qwen38_full": ("qwen38_full", ()),
    "qwen38_4layer": ("qwen38_4layer", ()),
    "glm52_lora_tb2": ("glm52_lora_tb2", ()),
    "glm52_lora_tb2_megatron_dsa": ("glm52_lora_tb2", DENSE_DSA),
    "qwen38_full_rollout_only": ("qwen38_full", (ROLLOUT_ONLY,)),
    "qwen38_4layer_rollout_only": ("qwen38_4layer", (ROLLOUT_ONLY,)),
    "glm52_lora_tb2_rollout_only": ("glm52_lora_tb2", (ROLLOUT_ONLY,)),
}
MILES_JOBS = [
    path
    for path in sorted((ROOT / "jobs").glob("*.toml"))
    if load_spec(path).spec.job.engine == "miles"
]


def spec(recipe: str | Path, *overrides: str):
    path = recipe if isinstance(recipe, Path) else ROOT / "jobs" / f"{recipe}.toml"
    return load_spec(path, overrides=overrides).spec


def lines(words) -> str:
    """Return the flags one a line, each with its values."""
    rows: list[str] = []
    for word in words:
        if word.startswith("--"):
            rows.append(word)
        else:
            rows[-1] += f" {word}"
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_is_the_golden_one(name, update_golden):
    recipe, overrides = COMMANDS[name]
    golden = ROOT / "tests" / "golden" / "miles_command" / f"{name}.txt"
    text = lines(train_flags(spec(recipe, *overrides)))
    if update_golden:
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert golden.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("path", MILES_JOBS, ids=lambda path: path.stem)
def test_the_command_of_every_recipe_has_each_flag_once_and_saves(path):
    flags = [
        word.removeprefix("--no-").removeprefix("--")
        for word in train_flags(spec(path))
        if word.startswith("--")
    ]
    assert {name: number for name, number in Counter(flags).items() if number > 1} == {}
    assert {"save", "save-interval", "save-trigger-sentinel", "num-gpus-per-node"} <= set(flags)
    assert "wandb-key" not in flags
    assert "None" not in train_flags(spec(path))


def value_of(words, flag):
    return words[words.index(flag) + 1]


def test_flags_of_the_spec_stand_before_the_raw_ones_and_defaults_yield_to_them():
    words = train_flags(
        spec_of(
            {
                "engine.miles.extra_args": {
                    "attention-backend": "unfused",
                    "attention-softmax-in-fp32": False,
                    "rollout-stop": ["a", "b"],
                    "balance-data": True,
                    "tis-clip": 2.5,
                }
            }
        )
    )
    assert words.count("--attention-backend") == 1
    assert "--attention-softmax-in-fp32" not in words
    assert words[-7:] == (
        *("unfused", "--rollout-stop", "a", "b", "--balance-data"),
        *("--tis-clip", "2.5"),
    )


def test_without_an_interval_the_last_step_saves():
    words = train_flags(spec_of(train__num_steps=40))
    assert value_of(words, "--save-interval") == "40"


def test_whole_numbers_are_written_as_such():
    words = train_flags(spec_of(QWEN38))
    assert value_of(words, "--lora-alpha") == "64"
    assert value_of(words, "--lr") == "1e-05"


def test_a_sleeping_trainer_has_its_folder_on_each_ranks_own_node_and_a_stream_one_for_all():
    disk = train_flags(spec_of(GLM52, {"offload.chunk": "100MB"}))
    assert value_of(disk, "--offload-train-disk-dir") == "${MILES_HPC_SCRATCH}/miles"
    assert value_of(disk, "--offload-train-disk-chunk-mb") == "96"
    stream = train_flags(
        spec_of({"offload.stream_optimizer": True, "offload.scratch_root": "/scratch"})
    )
    assert "--stream-optimizer-state-to-disk" in stream
    assert value_of(stream, "--offload-train-disk-dir") == "{scratch_dir}/miles"


def test_nothing_sleeps_when_the_spec_says_none():
    words = train_flags(spec_of({"offload.train": "none", "offload.rollout": "none"}))
    assert {"--no-offload-train", "--no-offload-rollout"} <= set(words)


def test_engines_alone_come_without_the_flags_that_miles_asserts_against_there():
    words = train_flags(spec_of(GLM52, {"engine.miles.mode": "debug_rollout_only"}))
    assert "--debug-rollout-only" in words
    assert not [word for word in words if "offload-train" in word or "peak-device" in word]


def test_a_kl_term_is_that_of_the_loss():
    words = train_flags(spec_of(train__kl_coef=0.01))
    assert value_of(words, "--kl-loss-coef") == "0.01"
    assert "--use-kl-loss" in words
    assert "--use-kl-loss" not in train_flags(spec_of())


def test_engines_of_a_folder_of_their_own_get_their_updates():
    served = json.loads(engine_files(spec_of(GLM52))["sglang.yaml"])["sglang"]
    assert served == [
        {
            "name": "default",
            "model_path": "/models/glm_fp8",
            "update_weights": True,
            "server_groups": [{"worker_type": "regular", "num_gpus": 32}],
        }
    ]
    assert engine_files(spec_of(QWEN38)) == {}


def test_every_flag_that_the_spec_decides_is_owned():
    """Else a raw flag of the same name would override it unseen."""
    broad = spec_of(
        GLM52,
        {
            "offload.peak_device": "gpu", "train.kl_coef": 0.1, "parallel.pp": 2, "parallel.tp": 4,
            "parallel.ep": 16, "parallel.first_stage_layers": 38, "train.normalise_advantages": False,
            "rollout.expert_parallel": 16,
            "data.label_key": "l", "data.metadata_key": "m", "data.reward": "r",
            "rollout.attention_backend": "nsa", "rollout.moe_runner_backend": "triton",
            "rollout.max_running_requests": 8, "model.megatron_checkpoint": "/b",
        },
    )  # fmt: skip
    defaults = {
        "optimizer", "lr-decay-style", "advantage-estimator", "attention-dropout", "hidden-dropout",
        "accumulate-allreduce-grads-in-fp32", "attention-softmax-in-fp32", "attention-backend",
        "kl-loss-type", "gradient-accumulation-fusion",
    }  # fmt: skip
    others = ({"offload.train": "none"}, {"engine.miles.mode": "debug_rollout_only"})
    for words in (train_flags(broad), *(train_flags(spec_of(change)) for change in others)):
        names = {
            word.removeprefix("--no-").removeprefix("--") for word in words if word.startswith("--")
        }
        assert names - defaults <= OWNED.keys() | {"sglang-config"}


@pytest.mark.parametrize(
    ("recipe", "actor", "own"),
    [("qwen3_235b", ("8", "8"), "64"), ("qwen3_next_80b_1x8", ("1", "6"), "2")],
)
def test_rollout_on_gpus_of_its_own_leaves_the_trainer_the_others(recipe, actor, own):
    words = train_flags(spec(recipe))
    nodes = (value_of(words, "--actor-num-nodes"), value_of(words, "--actor-num-gpus-per-node"))
    assert nodes == actor
    assert value_of(words, "--rollout-num-gpus") == own
    assert value_of(words, "--num-gpus-per-node") == "8"
    assert not {"--colocate", "--no-offload-train", "--no-offload-rollout"} & set(words)


def test_gradients_in_bf16_are_not_accumulated_in_fp32():
    words = train_flags(spec("inkling_async_12x4"))
    assert "--grad-reduce-in-bf16" in words
    assert "--accumulate-allreduce-grads-in-fp32" not in words


def test_a_quantised_folder_is_served_on_the_gpus_of_rollout():
    own = {"rollout.own_gpus": 16, "offload.train": "none", "offload.rollout": "none", "lora": None}
    (text,) = engine_files(spec_of(GLM52, own, {"offload.base_cpu_backup": False})).values()
    assert json.loads(text)["sglang"][0]["server_groups"][0]["num_gpus"] == 16
