"""Rollout engine on transformers, for nodes without GPU.

One forward pass prefills each prompt once; its samples share that key/value cache by a copy. Tokens are drawn by our own loop,
because draws must not depend on batching and the logprobs must be those of the distribution that was sampled.

Shapes: B rows (prompt x sample), S positions, V vocabulary.
"""

import ctypes
import gc
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from miles_hpc.spec.job import JobSpec, NativeTable
from miles_hpc.trainer.lora_hooks import AdapterHooks
from miles_hpc.trainer.rollout import AdapterConfig, PeftState, Prompt, Sampling, draw_uniforms
from miles_hpc.trainer.samples import Sample

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TransformersEngine:
    """A `RolloutEngine` on CPU threads of this process.

    On CPU the weights already are in host memory, so `offload.rollout = "host"` moves nothing: sleeping frees the key/value
    cache and returns freed heap pages to the system, and `sleep` reports the bytes by which the process really shrank.
    """

    def __init__(self, model_dir: Path, dtype: str, num_threads: int) -> None:
        self._model_dir = model_dir
        self._dtype = _DTYPES[dtype]
        self._num_threads = num_threads
        self._model: PreTrainedModel | None = None
        self._adapter: AdapterHooks | None = None
        self._version = 0

    def load(self) -> dict[str, int | float]:
        """Load the base model; the tensors stay mapped to the safetensors file where the types agree."""
        started = time.monotonic()
        torch.set_num_threads(self._num_threads)
        torch.set_grad_enabled(False)
        model = AutoModelForCausalLM.from_pretrained(
            self._model_dir, dtype=self._dtype, local_files_only=True
        )
        self._model = model.eval()
        self._adapter = AdapterHooks(model)
        size_bytes = sum(tensor.nbytes for tensor in model.parameters())
        return {"seconds": time.monotonic() - started, "bytes": size_bytes}

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Sample]:
        """Return `samples_per_prompt` samples of every prompt."""
        if not prompts:
            return []
        assert self._model is not None, "load comes first"
        uniforms_BS = np.concatenate([draw_uniforms(sampling, prompt.group) for prompt in prompts])
        with torch.inference_mode():
            tokens_BS, logprobs_BS = _decode(self._model, prompts, sampling, uniforms_BS)
        rows = zip(tokens_BS.tolist(), logprobs_BS.tolist(), strict=True)
        owners = [prompt for prompt in prompts for _ in range(sampling.samples_per_prompt)]
        return [
            _make_sample(prompt, tokens, logprobs, sampling)
            for prompt, (tokens, logprobs) in zip(owners, rows, strict=True)
        ]

    def load_adapter(self, state: PeftState, config: AdapterConfig, version: int) -> str:
        """Replace the adapter's hooks."""
        assert self._adapter is not None, "load comes first"
        digest = self._adapter.replace(state, config)
        self._version = version
        return digest

    def sleep(self) -> dict[str, int | float]:
        """Return freed memory to the system; see the class for why the weights stay."""
        started = time.monotonic()
        before = psutil.Process().memory_info().rss
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        shrunk = before - psutil.Process().memory_info().rss
        return {"seconds": time.monotonic() - started, "bytes": max(shrunk, 0)}

    def wake(self) -> dict[str, int | float]:
        """Nothing was moved, so nothing comes back."""
        return {"seconds": 0.0, "bytes": 0}

    def version(self) -> int:
        """Return the version of the adapter in use."""
        return self._version

    def close(self) -> None:
        """Drop the model."""
        self._model = None
        self._adapter = None


def make_engine(spec_json: str, model_dir: str, dtype: str) -> TransformersEngine:
    """Return the engine that a job spec asks for, not loaded yet."""
    spec = JobSpec.model_validate_json(spec_json)
    threads = (spec.engine.native or NativeTable()).threads_per_engine
    return TransformersEngine(Path(model_dir), dtype, threads)


def _decode(
    model: PreTrainedModel, prompts: Sequence[Prompt], sampling: Sampling, uniforms_BS: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Sample until every row has stopped or the limit is reached.

    Returns:
        tokens [B, S] int64 and their logprobs [B, S] float32; positions after a row's stop token are meaningless.
    """
    cache = DynamicCache(config=model.config)
    mask_BS, logits_BV = _prefill(model, prompts, cache)
    cache.batch_repeat_interleave(sampling.samples_per_prompt)
    mask_BS = mask_BS.repeat_interleave(sampling.samples_per_prompt, dim=0)
    logits_BV = logits_BV.repeat_interleave(sampling.samples_per_prompt, dim=0)
    position_B = mask_BS.sum(dim=1)
    stops = torch.tensor(sampling.stop_token_ids)
    stopped_B = torch.zeros(len(mask_BS), dtype=torch.bool)
    tokens, logprobs = [], []
    for index in range(sampling.max_response_tokens):
        token_B, logprob_B = sample_tokens(
            logits_BV, torch.from_numpy(uniforms_BS[:, index]), sampling.temperature
        )
        tokens.append(token_B)
        logprobs.append(logprob_B)
        stopped_B |= torch.isin(token_B, stops)
        if bool(stopped_B.all()) or index + 1 == sampling.max_response_tokens:
            break
        mask_BS = torch.cat([mask_BS, mask_BS.new_ones(len(mask_BS), 1)], dim=1)
        output = model(
            input_ids=token_B[:, None],
            attention_mask=mask_BS,
            position_ids=position_B[:, None],
            cache=cache,
            use_cache=True,
        )
        logits_BV = output.logits[:, -1]
        position_B = position_B + 1
    return torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1)


def _prefill(
    model: PreTrainedModel, prompts: Sequence[Prompt], cache: DynamicCache
) -> tuple[Tensor, Tensor]:
    """Run the prompts, padded on the left so that all end at the same place; return mask and next-token logits."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    tokens_BS = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask_BS = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens_BS[row, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
        mask_BS[row, longest - len(prompt.token_ids) :] = 1
    positions_BS = (mask_BS.cumsum(dim=1) - 1).clamp(min=0)
    output = model(
        input_ids=tokens_BS,
        attention_mask=mask_BS,
        position_ids=positions_BS,
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return mask_BS, output.logits[:, -1]


def sample_tokens(
    logits_BV: Tensor, uniforms_B: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Draw one token a row from softmax(logits / temperature) by inverting its cumulative distribution.

    Args:
        logits_BV: any float type; computed in float32, summed in float64.
        uniforms_B: draws in [0, 1), float64.
        temperature: divides the logits; the logprobs are those at this temperature.

    Returns:
        tokens [B] int64 and their logprobs [B] float32 under that same distribution.
    """
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    cumulative_BV = logprobs_BV.double().exp().cumsum(dim=-1)
    thresholds_B1 = (uniforms_B * cumulative_BV[:, -1])[:, None]
    tokens_B = torch.searchsorted(cumulative_BV, thresholds_B1, right=True).squeeze(-1)
    tokens_B = tokens_B.clamp(max=logits_BV.shape[-1] - 1)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None]).squeeze(-1)


def _make_sample(
    prompt: Prompt, tokens: list[int], logprobs: list[float], sampling: Sampling
) -> Sample:
    stop = next((i for i, token in enumerate(tokens) if token in sampling.stop_token_ids), None)
    length = len(tokens) if stop is None else stop + 1
    return Sample(
        group=prompt.group,
        prompt_ids=prompt.token_ids,
        response_ids=tuple(tokens[:length]),
        rollout_logprobs=tuple(logprobs[:length]),
        finished=stop is not None,
    )
