"""The streamed optimizer of one trainer rank: where its file lies on the node, and its part of a checkpoint.

Every data parallel rank streams its own copy; the first replica's are saved, one file for each model-parallel rank, and
all replicas continue from them. Knows no gradients and no passes; the arithmetic is `trainer.streamed_adam`.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from miles_hpc.errors import MilesHpcError
from miles_hpc.spec.job import JobSpec
from miles_hpc.trainer.grid import Grid
from miles_hpc.trainer.rank_dir import rank_dir_from_environ
from miles_hpc.trainer.streamed_adam import AdamSettings, StepTraffic, StreamedAdam


class StreamedState:
    """AdamW over the trainable parameters of `model`, its state in this rank's folder of the node's scratch disk.

    Raises:
        DiskOffloadError: if the folder cannot be made, is not on a local disk, or has no room for the state twice.
    """

    def __init__(
        self, model: torch.nn.Module, spec: JobSpec, grid: Grid, environ: Mapping[str, str]
    ) -> None:
        self._grid = grid
        train, offload = spec.train, spec.offload
        self._folder = rank_dir_from_environ(
            environ, grid.rank, allow_memory=offload.allow_memory_scratch, purpose="optimizer"
        )
        try:
            self.adam = StreamedAdam(
                [(name, value) for name, value in model.named_parameters() if value.requires_grad],
                AdamSettings(
                    learning_rate=train.learning_rate,
                    betas=train.adam_betas,
                    eps=train.adam_eps,
                    weight_decay=train.weight_decay,
                ),
                path=self._folder.path / "optimizer.bin",
                device=grid.device,
                bucket_bytes=offload.optimizer_bucket,
                chunk_bytes=offload.chunk,
            )
        except MilesHpcError:
            self._folder.close()
            raise

    def step(self) -> StepTraffic:
        """Update the parameters from their gradients; on an error weights and state are as they were."""
        return self.adam.step()

    def save(self, folder: Path) -> None:
        """Write this rank's state to `folder`, if it is of the first replica."""
        if self._grid.dp_rank == 0:
            self.adam.save(folder, rank=self._place, topology=self._topology)

    def load(self, folder: Path) -> None:
        """Continue from the state in `folder`.

        Raises:
            ResumeError: if it was saved by another topology, for other parameters or with other buckets, or is not whole.
        """
        self.adam.load(folder, rank=self._place, topology=self._topology)

    @property
    def _place(self) -> int:
        """Number of this rank in its replica."""
        return self._grid.pp_rank * self._grid.tp + self._grid.tp_rank

    @property
    def _topology(self) -> dict[str, int]:
        return {"tp": self._grid.tp, "pp": self._grid.pp}

    def close(self) -> None:
        """Remove the file and its folder."""
        self.adam.close()
        self._folder.close()
