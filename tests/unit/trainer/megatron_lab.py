"""Tiny models, specs and batches for the trainer's tests, and trainer ranks in processes of their own."""

import json
import multiprocessing
import random
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from miles_hpc.trainer.actor import TrainActor
from miles_hpc.trainer.samples import TrainSample
from miles_hpc.trainer.weights import export_base

VOCAB = 512
LOOPBACK = "127.0.0.1"
FAMILIES = ("qwen3", "llama")  # untied with qk-norm; tied
_SHAPE = {"num_layers": 4, "hidden_size": 64, "head_dim": 16, "vocab_size": VOCAB}


def make_model(folder: Path, family: str) -> None:
    """Save a random Hugging Face model whose norms and distributions are far from trivial."""
    model_class, config_class = {
        "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    }[family]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=family == "llama",
        rms_norm_eps=1e-6,
        initializer_range=0.1,
    )
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def make_spec(family: str, **tables: dict[str, object]) -> str:
    """Return a spec as JSON; `tables` override single keys."""
    spec: dict[str, dict[str, object]] = {
        "job": {"name": "t", "engine": "native", "time_limit": "10min"},
        "model": {
            "name": "tiny",
            "family": family,
            "shape_source": "tests",
            "weights": "random",
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 128,
            "max_position_embeddings": 512,
            "tie_word_embeddings": family == "llama",
            "qk_layernorm": family == "qwen3",
            "train_dtype": "fp32",
            **_SHAPE,
        },
        "cluster": {"num_nodes": 1, "device": "cpu"},
        "rollout": {
            "engine": "transformers",
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "max_response_tokens": 8,
        },
        # A large epsilon keeps Adam's first steps smooth in the gradient, so that layouts can be compared.
        "train": {
            "num_steps": 2,
            "learning_rate": 1e-2,
            "micro_batch_size": 2,
            "adam_eps": 1e-2,
        },
        "lora": {
            "rank": 4,
            "alpha": 8.0,
            "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
        },
        "offload": {"train": "none"},
        "data": {"source": "reasoning_gym", "task": "chain_sum"},
    }
    for table, keys in tables.items():
        spec[table] = {**spec.get(table, {}), **keys}
    return json.dumps(spec)


def make_batch(count: int = 9) -> list[TrainSample]:
    """Return samples of unequal lengths, one of them without a response."""
    rng = random.Random(0)
    samples = []
    for index in range(count):
        prompt, response = rng.randrange(1, 12), 0 if index == 3 else rng.randrange(1, 9)
        samples.append(
            TrainSample(
                prompt_ids=tuple(rng.randrange(VOCAB) for _ in range(prompt)),
                response_ids=tuple(rng.randrange(VOCAB) for _ in range(response)),
                old_logprobs=(0.0,) * response,
                advantage=rng.gauss(0, 1),
            )
        )
    return samples


def with_old(samples: list[TrainSample], logprobs: list[tuple[float, ...]]) -> list[TrainSample]:
    """Return the samples with these old logprobs."""
    return [replace(s, old_logprobs=row) for s, row in zip(samples, logprobs, strict=True)]


def largest_gap(left: list[tuple[float, ...]], right: list[tuple[float, ...]]) -> float:
    """Return the largest difference of two lists of rows; rows must have equal lengths."""
    return max(
        abs(a - b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)
    )


def plain_logprobs(
    model: torch.nn.Module, samples: list[TrainSample], temperature: float = 1.0
) -> list[tuple[float, ...]]:
    """Return what transformers says, one sample at a time and without padding."""
    rows = []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        with torch.no_grad():
            logits = (model(ids).logits[0] / temperature).log_softmax(-1)
        first = len(sample.prompt_ids) - 1
        rows.append(
            tuple(logits[first + i, token].item() for i, token in enumerate(sample.response_ids))
        )
    return rows


def start_alone(actor: TrainActor) -> None:
    """Start a rank that is the only one."""
    actor.start(LOOPBACK, actor.listen(LOOPBACK))


def start_actor(spec: str, folder: Path) -> TrainActor:
    """Return one loaded rank in this process; close it."""
    actor = TrainActor(spec, 0, 1, str(folder))
    start_alone(actor)
    actor.load()
    return actor


def run_updates(actor: TrainActor, num_updates: int) -> dict[str, object]:
    """Score a batch, update on it and score it again; results stand where the actor returns them."""
    samples = make_batch()
    before = actor.logprobs(samples)
    box = [before]
    dist.broadcast_object_list(box, src=actor.grid.result_rank)
    samples = with_old(samples, box[0])
    reports = [actor.train_step(samples) for _ in range(num_updates)]
    found = {
        "before": before,
        "reports": None if reports[0] is None else reports,
        "adapter": actor.adapter(),
        "after": actor.logprobs(samples),
        "base": {
            k: v.numpy() for k, v in export_base(actor.policy.model, actor.spec.model, actor.grid)
        },
    }
    return {key: value for key, value in found.items() if value}


def _rank_main(
    rank: int, world_size: int, jobs: list[tuple[str, str]], ports: object, queue: object
) -> None:
    try:
        results = []
        for spec, folder in jobs:
            actor = TrainActor(spec, rank, world_size, folder)
            if rank == 0:
                port = actor.listen(LOOPBACK)
                for _ in range(1, world_size):
                    ports.put(port)
            else:
                port = ports.get(timeout=60)
            actor.start(LOOPBACK, port)
            actor.load()
            results.append(run_updates(actor, 2))
            actor.close()
        queue.put((rank, results))
    except BaseException:
        queue.put((rank, traceback.format_exc()))
        raise


def run_ranks(world_size: int, jobs: list[tuple[str, Path]]) -> list[dict[str, object]]:
    """Run each (spec, folder) on `world_size` ranks in processes; returns each job's results of all ranks merged."""
    context = multiprocessing.get_context("spawn")
    queue, ports = context.Queue(), context.Queue()
    work = [(spec, str(folder)) for spec, folder in jobs]
    ranks = [
        context.Process(target=_rank_main, args=(rank, world_size, work, ports, queue), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    merged: list[dict[str, object]] = [{} for _ in jobs]
    try:
        for _ in ranks:
            rank, results = queue.get(timeout=150)
            assert not isinstance(results, str), f"rank {rank}:\n{results}"
            for found, result in zip(merged, results, strict=True):
                assert not found.keys() & result.keys(), "two ranks returned the same result"
                found.update(result)
    finally:
        for process in ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
    return merged
