"""Specs as dictionaries for the planner's tests: a dense base and the published shapes, with dotted overrides."""

import copy
import json
from typing import Any

from miles_hpc.spec.job import JobSpec

DENSE: dict[str, Any] = {
    "job": {"name": "t", "engine": "miles", "time_limit": "1h"},
    "model": {
        "name": "toy",
        "family": "qwen3",
        "shape_source": "made up for tests",
        "hf_checkpoint": "/models/toy",
        "num_layers": 64,
        "hidden_size": 1024,
        "num_attention_heads": 64,
        "num_query_groups": 64,
        "head_dim": 64,
        "ffn_hidden_size": 4096,
        "vocab_size": 32000,
    },
    "cluster": {"num_nodes": 1, "gpus_per_node": 8},
    "rollout": {"prompts_per_step": 32, "samples_per_prompt": 8, "max_response_tokens": 1024},
    "train": {"num_steps": 1, "learning_rate": 1e-5, "max_tokens_per_gpu": 4096},
    "offload": {"scratch_min_free": "2TiB"},
    "data": {"source": "jsonl", "path": "/data/p.jsonl"},
    "engine": {
        "miles": {"root": "/m", "revision": "31f1ca961", "megatron_path": "/g", "model_type": "t"}
    },
}

NATIVE: dict[str, Any] = {
    "job.engine": "native",
    "engine": {"native": {}},
    "data": {"source": "reasoning_gym", "task": "chain_sum"},
    "lora": {"rank": 8, "alpha": 16.0},
    "model.train_dtype": "bf16",
}

QWEN38: dict[str, Any] = {
    "model.family": "qwen3_5_moe",
    "model.num_layers": 92,
    "model.hidden_size": 8192,
    "model.num_attention_heads": 64,
    "model.num_query_groups": 4,
    "model.head_dim": 256,
    "model.ffn_hidden_size": 2048,
    "model.vocab_size": 248320,
    "model.num_experts": 512,
    "model.experts_per_token": 10,
    "model.moe_ffn_hidden_size": 2048,
    "model.shared_expert_ffn_hidden_size": 2048,
    "model.full_attention_interval": 4,
    "model.num_mtp_layers": 1,
    "model.total_params": 2_417_000_000_000,
    "model.max_position_embeddings": 262144,
    "model.rollout_quantisation": "nvfp4",
    "model.megatron_checkpoint": "/models/q_torch_dist",
    "cluster.num_nodes": 16,
    "cluster.gpus_per_node": 4,
    "cluster.gpu_memory": "276GB",
    "cluster.node_memory": "956GB",
    "parallel.pp": 4,
    "parallel.ep": 16,
    "rollout.gpus_per_engine": 16,
    "rollout.max_response_tokens": 4096,
    "rollout.context_length": 8192,
    "rollout.lora_backend": "triton",
    "rollout.mem_fraction_static": 0.7,
    "rollout.max_running_requests": 8,
    "train.max_tokens_per_gpu": 8192,
    "train.recompute": "full",
    "lora": {"rank": 32, "alpha": 64.0},
    "offload.train": "host",
    "offload.rollout": "host",
    "offload.peak_device": "gpu",
    "offload.base_cpu_backup": True,
    "engine.miles.revision": "57b381de5",
}

GLM52: dict[str, Any] = {
    "model.family": "glm_dsa",
    "model.num_layers": 78,
    "model.hidden_size": 6144,
    "model.num_attention_heads": 64,
    "model.num_query_groups": 64,
    "model.head_dim": 192,
    "model.q_lora_rank": 2048,
    "model.kv_lora_rank": 512,
    "model.qk_rope_head_dim": 64,
    "model.v_head_dim": 256,
    "model.ffn_hidden_size": 12288,
    "model.vocab_size": 154880,
    "model.num_experts": 256,
    "model.experts_per_token": 8,
    "model.moe_ffn_hidden_size": 2048,
    "model.shared_expert_ffn_hidden_size": 2048,
    "model.num_dense_layers": 3,
    "model.dsa_topk_layers": [0, 1, 2, *range(6, 78, 4)],
    "model.total_params": 753_000_000_000,
    "model.max_position_embeddings": 202752,
    "model.rollout_quantisation": "fp8",
    "model.rollout_checkpoint": "/models/glm_fp8",
    "cluster.num_nodes": 4,
    "cluster.gpus_per_node": 8,
    "cluster.gpu_memory": "140GiB",
    "cluster.node_memory": "2TiB",
    "parallel.tp": 8,
    "parallel.ep": 32,
    "parallel.sequence_parallel": True,
    "rollout.gpus_per_engine": 16,
    "rollout.prompts_per_step": 4,
    "rollout.max_response_tokens": 8192,
    "rollout.lora_backend": "triton",
    "rollout.mem_fraction_static": 0.85,
    "train.max_tokens_per_gpu": 16384,
    "train.recompute": "full",
    "lora": {"rank": 16, "alpha": 32.0, "target_modules": ["q_a_proj", "q_b_proj", "o_proj"]},
    "offload.train": "disk",
    "offload.rollout": "host",
    "offload.base_cpu_backup": True,
}

GLM52_FULL: dict[str, Any] = {
    **GLM52,
    "cluster.num_nodes": 8,
    "cluster.gpus_per_node": 4,
    "cluster.gpu_memory": "276.6GB",
    "parallel.tp": 2,
    "parallel.pp": 4,
    "parallel.cp": 4,
    "parallel.ep": 8,
    "parallel.first_stage_layers": 18,
    "lora": None,
    "offload.base_cpu_backup": False,
}


def spec_of(*changes: dict[str, Any], **more: Any) -> JobSpec:
    """Return the dense base with dotted `changes` in order; in keyword names a double underscore is the dot.

    A value of None removes the key.
    """
    raw = copy.deepcopy(DENSE)
    flat = {key: value for change in changes for key, value in change.items()}
    flat |= {key.replace("__", "."): value for key, value in more.items()}
    for path, value in flat.items():
        *tables, name = path.split(".")
        table = raw
        for part in tables:
            table = table.setdefault(part, {})
        if value is None:
            table.pop(name, None)
        else:
            table[name] = copy.deepcopy(value)
    return JobSpec.model_validate_json(json.dumps(raw))
