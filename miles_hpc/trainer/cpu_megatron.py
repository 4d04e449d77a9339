"""Lets megatron-core 0.16.1 run without CUDA, by giving some of its modules another `torch` name.

megatron-core writes `device="cuda"` and `torch.cuda.current_device()` into code that has nothing else to do with a GPU.
`install` replaces the global name `torch` inside the listed megatron modules alone, by an object that answers those
calls for the CPU and passes everything else on. torch itself, and so transformers in the same process, stays untouched:
wrapping `torch.tensor` globally makes transformers build rotary frequencies from uninitialised memory, without an error.

What each module needs it for:

    schedules, clip_grads, optimizer      torch.zeros / torch.tensor(..., device="cuda") for counters and scales
    p2p_communication                     current_device for receive buffers, synchronize after the shape exchange
    param_and_grad_buffer                 current_device for gradient buffers
    rotary_pos_embedding                  current_device: the frequencies are moved there in the first forward
    mappings, layers, utils               current_device for sequence parallel buffers
    random                                the generator states that sequence parallelism and recomputation save

Not needed here because of how `trainer.model` builds the model: `Tensor.cuda` (tied embeddings: no embedding group, both
copies are read from the checkpoint), `Tensor.type` (the trainer clips gradients itself), streams.

Knows nothing of models or specs. Does nothing where CUDA is available.
"""

import importlib
import types

import torch

_MODULES = (
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.models.common.embeddings.rotary_pos_embedding",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.tensor_parallel.random",
    "megatron.core.utils",
)
_FACTORIES = ("empty", "tensor", "zeros")


class _CpuRandom:
    @staticmethod
    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()


class _CpuCuda:
    """`torch.cuda` for the listed modules: one device, the CPU, with nothing to wait for."""

    random = _CpuRandom

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cuda, name)

    @staticmethod
    def current_device() -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def synchronize(device: object = None) -> None:
        return None

    @staticmethod
    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)


def _on_cpu(name: str) -> object:
    factory = getattr(torch, name)

    def make(*args: object, **kwargs: object) -> object:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


class _CpuTorch(types.ModuleType):
    """`torch` for the listed modules."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CpuCuda()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(name))

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def _set_rng_state(new_state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(new_state)


def install() -> tuple[str, ...]:
    """Give the listed megatron modules their CPU `torch`; repeated calls change nothing.

    Returns:
        The modules that were changed; empty where CUDA is available.
    """
    if torch.cuda.is_available():
        return ()
    proxy = _CpuTorch()
    changed = []
    for name in _MODULES:
        module = importlib.import_module(name)
        if module.torch is torch:
            module.torch = proxy  # type: ignore[attr-defined]
            changed.append(name)
    # This function calls the CUDA driver below `torch.cuda` and would only queue the call on a machine without one.
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._set_cuda_rng_state = _set_rng_state  # type: ignore[attr-defined]
    return tuple(changed)
