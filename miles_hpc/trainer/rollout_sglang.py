"""Rollout engine on SGLang's in-process `Engine`, one per group of GPUs; on CPU as an optional tier.

SGLang is imported on `load`, never before. Knows the engine's Python interface as of 0.5.16 to 0.5.23, not its HTTP server.
"""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from miles_hpc.errors import DriverError
from miles_hpc.spec.job import JobSpec
from miles_hpc.trainer.rollout import (
    AdapterConfig,
    PeftState,
    Prompt,
    Sampling,
    digest_adapter,
)
from miles_hpc.trainer.samples import Sample

SLEEP_ORDER = ("kv_cache", "weights")
"""The cache goes first, so that host memory has room for the weights' backup."""

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def engine_options(spec: JobSpec, model_dir: Path, dtype: str) -> dict[str, object]:
    """Return the keyword arguments of SGLang's `Engine`; keys that the spec leaves out keep SGLang's default."""
    rollout, lora = spec.rollout, spec.lora
    on_cpu = spec.cluster.device == "cpu"
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    options: dict[str, object | None] = {
        "model_path": str(spec.model.rollout_checkpoint or model_dir),
        "dtype": _DTYPES[dtype],
        "tp_size": rollout.gpus_per_engine,
        "ep_size": rollout.expert_parallel,
        # One token more than the longest sample, which SGLang keeps for itself.
        "context_length": rollout.context_length or longest + 1,
        "random_seed": spec.train.seed,
        "mem_fraction_static": rollout.mem_fraction_static,
        "max_running_requests": rollout.max_running_requests,
        "attention_backend": rollout.attention_backend,
        "moe_runner_backend": rollout.moe_runner_backend,
        "log_level": "warning",
    }
    if lora is not None:
        options |= {
            "enable_lora": True,
            "max_lora_rank": lora.rank,
            "lora_target_modules": list(lora.target_modules),
            # The old adapter stays until the new one is in.
            "max_loras_per_batch": 2,
            "lora_backend": rollout.lora_backend,
        }
    if on_cpu:
        # The default attention on x86 needs a kernel package that is not published for CPUs.
        options |= {"device": "cpu", "disable_overlap_schedule": True}
        options["attention_backend"] = rollout.attention_backend or "torch_native"
        options["lora_backend"] = rollout.lora_backend or "torch_native"
    elif spec.offload.rollout == "host":
        # Without the backup, weights are garbage after a resume: only adapters are sent again.
        options |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return {name: value for name, value in options.items() if value is not None}


def make_engine(spec_json: str, model_dir: str, dtype: str) -> "SglangEngine":
    """Return the engine that a job spec asks for, not loaded yet."""
    spec = JobSpec.model_validate_json(spec_json)
    return SglangEngine(engine_options(spec, Path(model_dir), dtype))


class SglangEngine:
    """A `RolloutEngine` that runs SGLang's scheduler processes below this one."""

    def __init__(self, options: dict[str, object]) -> None:
        self._options = options
        self._engine: Any = None
        self._adapter_name: str | None = None
        self._version = 0
        self._num_loads = 0

    def load(self) -> dict[str, int | float]:
        """Start the engine; `bytes` is the checkpoint's size, since the weights live in other processes."""
        started = time.monotonic()
        from sglang.srt.entrypoints.engine import Engine

        self._engine = Engine(**self._options)
        folder = Path(str(self._options["model_path"]))
        size_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return {"seconds": time.monotonic() - started, "bytes": size_bytes}

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
        """Return the samples of every prompt; SGLang batches the requests as its memory allows.

        Each request carries its own seed, which SGLang honours in its deterministic mode alone; elsewhere a repeated run
        draws the same only as far as it is scheduled the same.
        """
        if not prompts:
            return []
        requests = [
            (prompt, _request(sampling, prompt.group, index))
            for prompt in prompts
            for index in range(sampling.samples_per_prompt)
        ]
        adapters = (
            {}
            if self._adapter_name is None
            else {"lora_path": [self._adapter_name] * len(requests)}
        )
        outputs = self._engine.generate(
            input_ids=[list(prompt.token_ids) for prompt, _ in requests],
            sampling_params=[params for _, params in requests],
            return_logprob=True,
            **adapters,
        )
        return [
            _make_sample(prompt, output)
            for (prompt, _), output in zip(requests, outputs, strict=True)
        ]

    def load_adapter(self, state: PeftState, config: AdapterConfig, version: int) -> str:
        """Load the adapter beside the old one, then unload that; the digest is of the tensors handed to SGLang.

        Raises:
            DriverError: if SGLang refuses; it returns its refusal and does not raise.
        """
        self._num_loads += 1
        # A name is never used twice: SGLang's prefix cache is kept by adapter.
        name = f"policy-{version}-{self._num_loads}"
        tensors = {key: torch.from_numpy(array.copy()) for key, array in state.items()}
        loaded = self._engine.load_lora_adapter_from_tensors(name, tensors, config.to_peft())
        _raise_unless_done(f"load_lora_adapter_from_tensors({name})", loaded)
        if self._adapter_name is not None:
            unloaded = self._engine.unload_lora_adapter(self._adapter_name)
            _raise_unless_done(f"unload_lora_adapter({self._adapter_name})", unloaded)
        self._adapter_name, self._version = name, version
        return digest_adapter({key: tensor.numpy() for key, tensor in tensors.items()})

    def sleep(self) -> dict[str, int | float]:
        """Give back GPU memory; does nothing when the engine was started without its memory saver, as on CPU."""
        started = time.monotonic()
        before = _gpu_used_bytes()
        if self._options.get("enable_memory_saver"):
            self._engine.flush_cache()
            for tag in SLEEP_ORDER:
                self._engine.release_memory_occupation(tags=[tag])
        freed = before - _gpu_used_bytes()
        return {"seconds": time.monotonic() - started, "bytes": max(freed, 0)}

    def wake(self) -> dict[str, int | float]:
        """Take the memory back: weights first, as their copy comes from the host, then an empty cache."""
        started = time.monotonic()
        before = _gpu_used_bytes()
        if self._options.get("enable_memory_saver"):
            for tag in reversed(SLEEP_ORDER):
                self._engine.resume_memory_occupation(tags=[tag])
        taken = _gpu_used_bytes() - before
        return {"seconds": time.monotonic() - started, "bytes": max(taken, 0)}

    def version(self) -> int:
        """Return the version of the adapter in use."""
        return self._version

    def close(self) -> None:
        """End SGLang's processes."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


def _request(sampling: Sampling, group: int, sample: int) -> dict[str, object]:
    key = f"{sampling.seed} {sampling.step} {group} {sample}"
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") >> 1
    return {
        "max_new_tokens": sampling.max_response_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.stop_token_ids),
        "sampling_seed": seed,
    }


def _make_sample(prompt: Prompt, output: dict[str, Any]) -> Sample:
    meta = output["meta_info"]
    drawn = [(float(logprob), int(token)) for logprob, token, *_ in meta["output_token_logprobs"]]
    return Sample(
        group=prompt.group,
        prompt_ids=prompt.token_ids,
        response_ids=tuple(token for _, token in drawn),
        rollout_logprobs=tuple(logprob for logprob, _ in drawn),
        finished=meta["finish_reason"]["type"] == "stop",
    )


def _raise_unless_done(what: str, output: Any) -> None:  # noqa: ANN401 - SGLang has no types to import
    if not output.success:
        raise DriverError(
            f"rollout engine, {what}: found {output.error_message}; expected SGLang to accept it. "
            "Compare lora.rank and lora.target_modules with what the engine was started for."
        )


def _gpu_used_bytes() -> int:
    """Return the used memory of this process's GPU, all processes together; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes
