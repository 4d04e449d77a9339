"""TrainActor: one trainer rank as a plain class; the driver makes a Ray actor of it.

Every method is collective: the driver calls it on all ranks with the same arguments. `logprobs` and `train_step` return
their result on one rank alone (`grid.result_rank`: the first rank of the last pipeline stage), `adapter` on rank 0.

Knows no Ray, no rollout engine and no loop. While the trainer is offloaded only `onload` may be called.
"""

import dataclasses
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._distributed_c10d import TCPStore

from miles_hpc.errors import DriverError
from miles_hpc.spec.job import JobSpec
from miles_hpc.trainer.packing import TokenPair
from miles_hpc.trainer.samples import TrainSample

with warnings.catch_warnings():
    # megatron-core warns at import about each missing Transformer Engine or apex kernel.
    warnings.simplefilter("ignore")
    from miles_hpc.trainer.checkpoint import copy_parameters, load_checkpoint, save_checkpoint
    from miles_hpc.trainer.grid import (
        Grid,
        join_rendezvous,
        open_rendezvous,
        start_grid,
        stop_grid,
    )
    from miles_hpc.trainer.lora import adapter_pieces, add_lora
    from miles_hpc.trainer.model import build_model
    from miles_hpc.trainer.offload import NoShelf, Shelf, make_shelf, resident_bytes
    from miles_hpc.trainer.pieces import gather_whole
    from miles_hpc.trainer.policy import Policy
    from miles_hpc.trainer.streamed_state import StreamedState
    from miles_hpc.trainer.weights import load_base


class TrainActor:
    """One trainer rank: `listen` (the first alone), `start`, `load`, then any number of passes, then `close`."""

    def __init__(self, spec_json: str, rank: int, world_size: int, model_dir: str) -> None:
        """Remember what this rank is; nothing is started.

        Args:
            spec_json: the job spec, as `JobSpec.model_dump_json` writes it.
            rank: this rank, from 0.
            world_size: ranks of all nodes together.
            model_dir: the base in Hugging Face format, on this node.
        """
        self.spec = JobSpec.model_validate_json(spec_json)
        self.rank, self.world_size = rank, world_size
        self.model_dir = Path(model_dir)
        self._grid: Grid | None = None
        self._store: TCPStore | None = None
        self._policy: Policy | None = None
        self._shelf: Shelf | None = None
        self._streamed: StreamedState | None = None
        self._step = 0

    def listen(self, address: str) -> int:
        """Serve the ranks' rendezvous at `address`, the first rank's own; return the port, which is held from here on."""
        self._store = open_rendezvous(address, self.world_size, self.spec.agent.placement_deadline)
        return int(self._store.port)

    def start(self, rendezvous_address: str, rendezvous_port: int) -> None:
        """Join the process group; returns when all ranks have joined."""
        self._store = self._store or join_rendezvous(
            rendezvous_address,
            rendezvous_port,
            self.world_size,
            self.spec.agent.placement_deadline,
        )
        self._grid = start_grid(
            self.spec, rank=self.rank, world_size=self.world_size, store=self._store
        )

    @property
    def grid(self) -> Grid:
        """Where this rank stands; only after `start`."""
        assert self._grid is not None, "start comes first"
        return self._grid

    @property
    def policy(self) -> Policy:
        """The loaded policy; only after `load`."""
        assert self._policy is not None, "load comes first"
        return self._policy

    def load(self) -> dict[str, float]:
        """Build the model, read this rank's weights, add adapters; returns parameters, bytes and seconds."""
        started = time.monotonic()
        model = build_model(self.spec, self.grid)
        base_bytes = load_base(model, self.spec.model, self.grid, self.model_dir)
        add_lora(model, self.spec, self.grid)
        model.train()
        if self.spec.offload.stream_optimizer:
            self._streamed = StreamedState(model, self.spec, self.grid, os.environ)
        self._policy = Policy(model, self.spec, self.grid, self._streamed)
        parameters = list(model.parameters())
        return {
            "params": sum(p.numel() for p in parameters),
            "trainable_params": sum(p.numel() for p in parameters if p.requires_grad),
            "bytes": base_bytes,
            "seconds": time.monotonic() - started,
            "rss": resident_bytes(),
        }

    def logprobs(self, batch: Sequence[TokenPair]) -> list[tuple[float, ...]] | None:
        """Return each response token's log-probability at the rollout's temperature, in nats; see the module for which rank."""
        self._check_batch(len(batch))
        return self.policy.logprobs(batch)

    def train_step(
        self, samples: Sequence[TrainSample]
    ) -> dict[str, float | int | bool | None] | None:
        """Do one optimizer update over `samples` (one global batch); see the module for which rank reports.

        A gradient that is not finite changes nothing: `skipped` is true and the figures that are not finite are None.
        """
        self._check_batch(len(samples))
        started = time.monotonic()
        report = self.policy.update(samples)
        self._step += 1
        if report is None:
            return None
        return {**dataclasses.asdict(report), "seconds": time.monotonic() - started}

    def _check_batch(self, count: int) -> None:
        if count < self.grid.dp:
            raise DriverError(
                f"trainer: found {count} samples for {self.grid.dp} data parallel ranks; expected at least one each. "
                "Raise rollout.prompts_per_step or train.global_batch_size."
            )

    def _whole_adapter(self) -> dict[str, torch.Tensor]:
        model = self.spec.model
        pieces = adapter_pieces(self.policy.model, model, self.grid)
        return dict(gather_whole(pieces, self.grid, range(model.num_layers)))

    def adapter(self) -> dict[str, NDArray[np.float32]] | None:
        """Return the whole adapter under its PEFT names, fp32, on rank 0; None elsewhere."""
        whole = self._whole_adapter()
        if self.rank != 0:
            return None
        return {name: tensor.numpy() for name, tensor in whole.items()}

    def _all_tensors(self) -> list[torch.Tensor]:
        policy = self.policy
        tensors: list[torch.Tensor] = [*policy.model.parameters(), *policy.model.buffers()]
        tensors += [buffer.grad_data for buffer in policy.ddp.buffers]
        for _, state in policy.optimizer.state.items():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return tensors

    def offload(self) -> dict[str, float | int | str]:
        """Move weights, gradients and optimizer state out of memory, as `offload.train` says; streamed state is out already."""
        if self._shelf is None:
            self._shelf = make_shelf(self.spec.offload, self.grid.device, self.rank, os.environ)
        return dataclasses.asdict(self._shelf.offload(self._all_tensors()))

    def onload(self) -> dict[str, float | int | str]:
        """Bring back what `offload` moved out; nothing before the first `offload`."""
        shelf = NoShelf() if self._shelf is None else self._shelf
        return dataclasses.asdict(shelf.onload())

    def save(self, folder: str, step: int) -> None:
        """Write a checkpoint to `folder`, which appears only when it is whole."""
        policy = self.policy
        state: dict[str, object] = {
            "step": step,
            "adapter": [parameter.detach() for parameter in policy.trainable()],
            "optimizer": None if self._streamed else policy.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }
        whole = self._whole_adapter()
        save_checkpoint(
            Path(folder),
            state,
            whole if self.rank == 0 else None,
            self.spec,
            self.grid,
            write_more=self._streamed.save if self._streamed else None,
        )

    def restore(self, folder: str) -> int:
        """Continue from a checkpoint; returns the step it was written after."""
        state = load_checkpoint(Path(folder), self.spec, self.grid)
        if self._streamed:
            self._streamed.load(Path(folder))
        else:
            self.policy.optimizer.load_state_dict(state["optimizer"])
        copy_parameters(state["adapter"], self.policy.trainable())
        torch.set_rng_state(state["rng"])
        self._step = int(state["step"])
        return self._step

    def close(self) -> None:
        """Remove the files on scratch disk and leave the process group."""
        if self._streamed is not None:
            self._streamed.close()
        if self._shelf is not None:
            self._shelf.close()
        stop_grid()
