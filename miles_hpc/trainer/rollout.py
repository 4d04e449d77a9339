"""What a rollout engine is, whatever generates the tokens, and how a step's work is divided among engines.

Knows neither transformers nor SGLang nor Ray: the driver holds engines as actors, tests hold them as plain objects.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from miles_hpc.trainer.samples import Sample

PeftState = Mapping[str, np.ndarray]
"""Adapter tensors by their PEFT names, such as base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a step.

    Attributes:
        group: index of the prompt inside the step; with the sample's index it fixes the random draws.
        token_ids: the rendered chat template, never empty.
    """

    group: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How responses are drawn in one step.

    Attributes:
        samples_per_prompt: responses to each prompt.
        stop_token_ids: tokens that end a response and belong to it.
        seed: seed of the run; together with `step`, group and sample it fixes every draw.
    """

    samples_per_prompt: int
    max_response_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The shape of a LoRA adapter."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]

    @property
    def scale(self) -> float:
        """Factor of the adapter's output."""
        return self.alpha / self.rank

    def to_peft(self) -> dict[str, object]:
        """Return the JSON values of PEFT's adapter_config.json."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "target_modules": list(self.target_modules),
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "inference_mode": True,
        }


class RolloutEngine(Protocol):
    """Generates responses with the newest adapter; asleep while the trainer works on the same device.

    Every method may take minutes; the caller sets the deadline.
    """

    def load(self) -> dict[str, int | float]:
        """Load the base model, without adapter; return {seconds, bytes}."""
        ...

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
        """Return the samples of every prompt, prompts in their order and the samples of one prompt together."""
        ...

    def load_adapter(self, state: PeftState, config: AdapterConfig, version: int) -> str:
        """Replace the adapter; return `digest_adapter` of what is now in use."""
        ...

    def sleep(self) -> dict[str, int | float]:
        """Give back device memory; return {seconds, bytes} with the bytes that the process really shrank by."""
        ...

    def wake(self) -> dict[str, int | float]:
        """Be ready for `load_adapter` and then `generate`; return {seconds, bytes}."""
        ...

    def version(self) -> int:
        """Return the version of the adapter in use; 0 is the base model without adapter."""
        ...

    def close(self) -> None:
        """End every process and free every resource of the engine."""
        ...


def split_prompts(prompts: Sequence[Prompt], num_engines: int) -> list[tuple[Prompt, ...]]:
    """Divide prompts among engines in contiguous runs whose lengths differ by at most one.

    A group is never split, so that its samples share one prefill of the prompt.
    """
    base, extra = divmod(len(prompts), num_engines)
    shares, start = [], 0
    for index in range(num_engines):
        end = start + base + (index < extra)
        shares.append(tuple(prompts[start:end]))
        start = end
    return shares


def draw_uniforms(sampling: Sampling, group: int) -> np.ndarray:
    """Return the uniform draws in [0, 1) of one group, shape [samples_per_prompt, max_response_tokens], float64.

    A draw depends on (seed, step, group, sample, position) alone, hence not on how prompts are batched or divided.
    """
    rows = [
        np.random.Generator(
            np.random.Philox(np.random.SeedSequence([sampling.seed, sampling.step, group, sample]))
        ).random(sampling.max_response_tokens)
        for sample in range(sampling.samples_per_prompt)
    ]
    return np.stack(rows)


def digest_adapter(state: PeftState) -> str:
    """Return a SHA-256 over names, shapes and float32 bytes, by which both ends of a weight sync are compared."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = np.ascontiguousarray(state[name], dtype=np.float32)
        digest.update(f"{name} {tensor.shape}\n".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()
