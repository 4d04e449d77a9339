"""SGLang's logprobs against transformers' for the same tokens: base model, then two adapters one after the other.

SGLANG_USE_CPU_ENGINE=1 python tests/unit/trainer/sglang_parity.py
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

LIMIT = 1e-5
TEMPERATURE = 0.7
SHAPES = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}


def adapter(seed: int) -> dict[str, np.ndarray]:
    """Return an adapter of rank 8 for the tiny model."""
    random = np.random.default_rng(seed)
    return {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight": random.normal(
            0, 0.2, (8, columns) if side == "A" else (rows, 8)
        ).astype(np.float32)
        for layer in range(4)
        for name, (rows, columns) in SHAPES.items()
        for side in "AB"
    }


def main() -> int:
    """Print the differences; 0 when all are within the limit."""
    from transformers import AutoModelForCausalLM

    from miles_hpc.paths import RunDir, packaged
    from miles_hpc.spec.load import load_spec
    from miles_hpc.trainer.demo_model import prepare_model
    from miles_hpc.trainer.lora_hooks import AdapterHooks
    from miles_hpc.trainer.rollout import AdapterConfig, Prompt, Sampling
    from miles_hpc.trainer.rollout_sglang import SglangEngine, engine_options

    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    spec = load_spec(packaged("jobs") / "demo_tiny.toml", local=True).spec
    scratch = tempfile.TemporaryDirectory()
    folder = prepare_model(RunDir(Path(scratch.name)), spec)
    options = {**engine_options(spec, folder, "fp32"), "max_total_tokens": 4096}
    engine = SglangEngine({**options, "mem_fraction_static": 0.1})
    engine.load()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    hooks = AdapterHooks(model)
    config = AdapterConfig(rank=8, alpha=16.0, target_modules=tuple(SHAPES))
    prompts = [Prompt(group=0, token_ids=(1, 40, 41, 42)), Prompt(group=1, token_ids=(1, 60))]
    sampling = Sampling(
        samples_per_prompt=4,
        max_response_tokens=12,
        temperature=TEMPERATURE,
        stop_token_ids=tuple(range(2, 512, 9)),
        seed=7,
        step=1,
    )
    worst = []
    for version in range(3):
        if version:
            state = adapter(version)
            assert engine.load_adapter(state, config, version) == hooks.replace(state, config)
        samples = engine.generate(prompts, sampling)
        worst.append(max(difference(model, sample) for sample in samples))
        assert all((s.response_ids[-1] in sampling.stop_token_ids) == s.finished for s in samples)
    engine.close()
    scratch.cleanup()
    sys.stdout.write(f"base and two adapters: {worst}\n")
    return 0 if max(worst) < LIMIT else 1


def difference(model: torch.nn.Module, sample: object) -> float:
    """Return the largest difference of a sample's logprobs from a plain forward pass."""
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0] / TEMPERATURE, dim=-1)
    first = len(sample.prompt_ids) - 1
    expected = [float(logprobs[first + i, token]) for i, token in enumerate(sample.response_ids)]
    return max(abs(a - b) for a, b in zip(expected, sample.rollout_logprobs, strict=True))


if __name__ == "__main__":
    sys.exit(main())
