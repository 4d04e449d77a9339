"""The policy of one rank: model, adapters, gradient buffers and optimizer, and the two passes over a batch.

Both passes go through megatron-core's pipeline schedule. Only adapters have gradients and optimizer state. Knows no
process start-up, no files and no offload.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from miles_hpc.spec.job import JobSpec
from miles_hpc.trainer.grid import Grid
from miles_hpc.trainer.head import VocabularyShard, token_logprobs
from miles_hpc.trainer.lora import adapters_off
from miles_hpc.trainer.loss import LossInputs, batch_weight, grpo_loss, token_weights
from miles_hpc.trainer.model import PolicyModel
from miles_hpc.trainer.packing import MicroBatch, TokenPair, pack, split_micro_batches, unpack
from miles_hpc.trainer.samples import TrainSample
from miles_hpc.trainer.streamed_state import StreamedState

Logprobs = dict[int, tuple[float, ...]]
# What megatron's schedule calls for each micro-batch: the stage's output, and what the last stage makes of it.
Step = Callable[[Iterator[MicroBatch], nn.Module], tuple[Tensor, Callable[..., object]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One optimizer update, over the whole global batch; a figure that is not finite is None.

    Attributes:
        grad_norm: before clipping.
        skipped: the gradient was not finite and nothing was changed.
        clip_fraction: share of the tokens whose ratio was clipped.
        kl: mean KL estimate a token; 0 without a reference.
        ratio_drift: mean |ratio - 1| a token.
        tokens: response tokens.
    """

    loss: float | None
    grad_norm: float | None
    skipped: bool
    clip_fraction: float | None
    kl: float | None
    ratio_drift: float | None
    tokens: int


class Policy:
    """One rank's share of the policy; every method is collective over all ranks with the same arguments."""

    def __init__(
        self, model: PolicyModel, spec: JobSpec, grid: Grid, streamed: StreamedState | None = None
    ) -> None:
        """Wrap `model`; with `streamed`, megatron's optimizer gives the norm alone and never has state of its own."""
        self.model, self.spec, self.grid, self.streamed = model, spec, grid, streamed
        train = spec.train
        self.ddp = DistributedDataParallel(
            config=model.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                use_distributed_optimizer=False,
            ),
            module=model,
        )
        model.config.finalize_model_grads_func = finalize_model_grads
        # Clipping is ours (clip_grad=0): between the norm and the step we look for gradients that are not finite.
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=train.learning_rate,
                weight_decay=train.weight_decay,
                adam_beta1=train.adam_betas[0],
                adam_beta2=train.adam_betas[1],
                adam_eps=train.adam_eps,
                clip_grad=0.0,
                params_dtype=torch.float32,
            ),
            [self.ddp],
        )

    def trainable(self) -> list[torch.nn.Parameter]:
        """Return this rank's adapter parameters, in a fixed order."""
        return [p for p in self.model.parameters() if p.requires_grad]

    # -- batches ---------------------------------------------------------------------------------------------------

    def _share(self, pairs: Sequence[TokenPair]) -> list[MicroBatch]:
        """Return this dp rank's micro-batches, equal on all ranks of one model replica; at least one."""
        lengths = [len(pair.prompt_ids) + len(pair.response_ids) for pair in pairs]
        order = sorted(range(len(pairs)), key=lambda index: (-lengths[index], index))
        mine = order[self.grid.dp_rank :: self.grid.dp]
        groups = split_micro_batches(
            [lengths[index] for index in mine],
            micro_batch_size=self.spec.train.micro_batch_size,
            max_tokens=self.spec.train.max_tokens_per_gpu,
        )
        multiple = self.grid.tp if self.model.config.sequence_parallel else 1
        return [
            pack(pairs, [mine[place] for place in group], multiple=multiple) for group in groups
        ]

    def _shard(self) -> VocabularyShard:
        weight = self.model.output_weight()
        start = self.grid.tp_rank * weight.shape[0]
        rows = min(weight.shape[0], self.spec.model.vocab_size - start)
        group = parallel_state.get_tensor_model_parallel_group() if self.grid.tp > 1 else None
        return VocabularyShard(weight=weight[:rows], start=start, group=group)

    def _forward(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """Return hidden states to send on, or on the last stage the log-probability of each response token."""
        tokens = batch.tokens_BS.to(self.grid.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden_SBH: Tensor = model(tokens, positions, None)
        if not self.grid.is_last_stage:
            return hidden_SBH
        if self.model.config.sequence_parallel:
            # What follows is the same on every tp rank, so the gradient needs a split, not a sum.
            hidden_SBH = gather_from_sequence_parallel_region(
                hidden_SBH, tensor_parallel_output_grad=False
            )
        device = tokens.device
        hidden_TH = hidden_SBH[batch.columns_T.to(device), batch.rows_T.to(device)]
        temperature = self.spec.rollout.temperature
        return token_logprobs(hidden_TH, batch.targets_T.to(device), self._shard(), temperature)

    def _run(self, batches: list[MicroBatch], step: Step, **options: bool) -> list[Any]:
        """Run megatron's schedule over `batches`; returns what `step`'s second function gave, last stage only."""
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=[self.ddp],
            num_microbatches=len(batches),
            # Unused: shapes travel with the tensors (variable_seq_lengths).
            seq_length=batches[0].tokens_BS.shape[1],
            micro_batch_size=batches[0].tokens_BS.shape[0],
            **options,
        )
        return results

    # -- passes ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _share_logprobs(self, batches: list[MicroBatch]) -> Logprobs:
        def step(
            data: Iterator[MicroBatch], model: nn.Module
        ) -> tuple[Tensor, Callable[..., object]]:
            batch = next(data)
            output = self._forward(model, batch)
            return output, lambda logprobs, non_loss_data: unpack(batch, logprobs)

        found: Logprobs = {}
        for part in self._run(batches, step, forward_only=True, collect_non_loss_data=True):
            found.update(part)
        return found

    def logprobs(self, pairs: Sequence[TokenPair]) -> list[tuple[float, ...]] | None:
        """Return the log-probability of every response token, in nats, on `grid.result_rank`; None elsewhere."""
        share = self._share_logprobs(self._share(pairs))
        grid = self.grid
        parts: list[Any] | None = [None] * grid.world_size if grid.has_result else None
        mine = share if grid.is_last_stage and grid.tp_rank == 0 else {}
        dist.gather_object(mine, parts, dst=grid.result_rank, group=grid.control)
        if parts is None:
            return None
        whole: Logprobs = {}
        for part in parts:
            whole.update(part)
        return [whole[index] for index in range(len(pairs))]

    def _loss_inputs(
        self,
        batch: MicroBatch,
        samples: Sequence[TrainSample],
        logprobs_T: Tensor,
        reference: Logprobs | None,
    ) -> LossInputs:
        device = logprobs_T.device
        rows = [samples[index] for index in batch.indices]
        lengths = batch.lengths_B
        per_sample = self.spec.train.loss_aggregation == "sample"
        known = None
        if reference is not None:
            values = [value for index in batch.indices for value in reference[index]]
            known = torch.tensor(values, dtype=torch.float32, device=device)
        old = [value for sample in rows for value in sample.old_logprobs]
        advantages = torch.tensor([sample.advantage for sample in rows], dtype=torch.float32)
        return LossInputs(
            logprobs=logprobs_T,
            old_logprobs=torch.tensor(old, dtype=torch.float32, device=device),
            advantages=advantages.repeat_interleave(lengths).to(device),
            token_weights=token_weights(lengths, per_sample=per_sample).to(device),
            reference_logprobs=known,
        )

    def update(self, samples: Sequence[TrainSample]) -> UpdateReport | None:
        """Do one optimizer update over `samples`; the report is on `grid.result_rank`, None elsewhere."""
        train = self.spec.train
        per_sample = train.loss_aggregation == "sample"
        batches = self._share(samples)
        reference: Logprobs | None = None
        if train.kl_coef > 0:
            with adapters_off(self.model):
                reference = self._share_logprobs(batches)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

        def step(
            data: Iterator[MicroBatch], model: nn.Module
        ) -> tuple[Tensor, Callable[..., object]]:
            batch = next(data)

            def loss(logprobs_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                inputs = self._loss_inputs(batch, samples, logprobs_T, reference)
                sums = grpo_loss(inputs, train)
                weight = torch.tensor(
                    batch_weight(batch.lengths_B, per_sample=per_sample),
                    dtype=torch.int,
                    device=logprobs_T.device,
                )
                tokens = torch.tensor(float(batch.lengths_B.sum()), device=logprobs_T.device)
                parts = (sums.loss.detach(), weight, sums.clipped, sums.kl, sums.drift, tokens)
                return sums.loss, weight, torch.stack([part.double() for part in parts])

            return self._forward(model, batch), loss

        sums = self._run(batches, step)
        grad_norm = self._apply_gradients()
        return self._report(sums, grad_norm)

    @torch.no_grad()
    def _apply_gradients(self) -> float:
        """Clip and step; return the norm before clipping. A norm that is not finite changes nothing."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if math.isfinite(norm):
            scale = self.spec.train.clip_grad / (norm + 1e-6)
            if scale < 1:
                for parameter in self.optimizer.get_parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(scale)
            if self.streamed is None:
                self.optimizer.step_with_ready_grads()
            else:
                self.streamed.step()
        return norm

    def _report(self, sums: list[Tensor], grad_norm: float) -> UpdateReport | None:
        if not self.grid.is_last_stage:
            return None
        total = torch.stack(sums).sum(0).cpu()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group_gloo())
        if not self.grid.has_result:
            return None
        loss, weight, clipped, kl, drift, tokens = total.tolist()
        count = max(tokens, 1)
        return UpdateReport(
            loss=_finite(loss / max(weight, 1)),
            grad_norm=_finite(grad_norm),
            skipped=not math.isfinite(grad_norm),
            clip_fraction=_finite(clipped / count),
            kl=_finite(kl / count),
            ratio_drift=_finite(drift / count),
            tokens=int(tokens),
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
