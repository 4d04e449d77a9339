"""The Ray actor around a trainer rank or a rollout engine: builds it inside its own process and passes calls on.

The driver therefore imports neither torch nor megatron-core to start them. Knows nothing of what is hosted.
"""

import importlib
import os
import socket
from typing import Any

import ray


class Host:
    """One hosted object; its class is imported on `build`, not before."""

    def __init__(self) -> None:
        self._hosted: Any = None

    def build(self, module: str, name: str, *args: object) -> str:
        """Import class `name` of `module`, make one with `args`, and return this node's name."""
        self._hosted = getattr(importlib.import_module(module), name)(*args)
        return os.environ.get("MILES_HPC_NODE", socket.gethostname())

    def call(self, method: str, *args: object) -> object:
        """Return what `method` of the hosted object returns."""
        return getattr(self._hosted, method)(*args)

    def node_address(self) -> str:
        """Return this node's address in Ray, which the other nodes reach."""
        return str(ray.util.get_node_ip_address())

    def gpu_ids(self) -> list[str]:
        """Return the GPUs that Ray gave this actor, as CUDA_VISIBLE_DEVICES names them."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def see_gpus(self, gpu_ids: list[str]) -> None:
        """Let this process see `gpu_ids`; only before anything in it used CUDA."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)


class TrainerHost(Host):
    """A `Host` under a name that tells process lists what it is."""


class RolloutHost(Host):
    """A `Host` under a name that tells process lists what it is."""
