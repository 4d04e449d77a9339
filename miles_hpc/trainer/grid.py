"""The process groups of one trainer rank and its place in the Megatron grid.

Starts torch.distributed and megatron's `parallel_state`; knows no model. Rank order is Megatron's: tp fastest, then cp,
dp, and pp slowest.
"""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch._C._distributed_c10d import Store, TCPStore

from miles_hpc.spec.job import JobSpec
from miles_hpc.trainer import cpu_megatron


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Where one rank stands.

    Attributes:
        device: the device of weights and activations.
        control: a gloo group of all ranks, for Python objects.
    """

    rank: int
    world_size: int
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    dp: int
    dp_rank: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        """This rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """This rank holds the output layer."""
        return self.pp_rank == self.pp - 1

    @property
    def result_rank(self) -> int:
        """The one rank that returns logprobs and losses: last stage, tp rank 0, dp rank 0."""
        return self.world_size - self.world_size // self.pp

    @property
    def has_result(self) -> bool:
        """This rank is `result_rank`."""
        return self.rank == self.result_rank


def open_rendezvous(address: str, num_ranks: int, deadline_s: float) -> TCPStore:
    """Return the store by which ranks find each other, served by this process at `address` alone; its `port` is known now.

    The socket is bound before anybody is told of its port, so no other process can have it. Torch alone would bind every
    address of the node to a port that was free a while ago.
    """
    with socket.create_server((address, 0), backlog=num_ranks) as listener:
        port = int(listener.getsockname()[1])
        return TCPStore(
            address,
            port,
            num_ranks,
            is_master=True,
            timeout=timedelta(seconds=deadline_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def join_rendezvous(address: str, port: int, num_ranks: int, deadline_s: float) -> TCPStore:
    """Return the store that the first rank serves at address:port.

    Raises:
        torch.distributed.DistError: when it does not answer within `deadline_s` seconds.
    """
    return TCPStore(
        address,
        port,
        num_ranks,
        is_master=False,
        timeout=timedelta(seconds=deadline_s),
        wait_for_workers=False,
    )


def start_grid(spec: JobSpec, *, rank: int, world_size: int, store: Store) -> Grid:
    """Join the process group and lay the Megatron grid over it; returns when every rank has joined.

    The `store` is that of `open_rendezvous` on the first rank and of `join_rendezvous` on the others.

    Raises:
        torch.distributed.DistError: when not every rank joined within `agent.placement_deadline`.
    """
    parallel = spec.parallel
    timeout = timedelta(seconds=spec.agent.placement_deadline)
    if spec.cluster.device == "gpu":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        cpu_megatron.install()
        device, backend = torch.device("cpu"), "gloo"
        native = spec.engine.native
        torch.set_num_threads(1 if native is None else native.threads_per_rank)
    # Only with one connection are kernels run in the order in which overlapped collectives need them.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        create_gloo_process_groups=True,
        distributed_timeout_minutes=max(1, round(timeout.total_seconds() / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(spec.train.seed)
    return Grid(
        rank=rank,
        world_size=world_size,
        tp=parallel.tp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel.pp,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        device=device,
        control=dist.new_group(backend="gloo", timeout=timeout),
    )


def stop_grid() -> None:
    """Leave the process groups; harmless when they were never started."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
