"""LoRA on a transformers model by forward hooks: y = W x + scale * B (A x), weights given in PEFT format.

The base weights are never touched, so they may stay memory-mapped from the checkpoint. Knows nothing of rollouts.
"""

import re
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from miles_hpc.errors import DriverError
from miles_hpc.trainer.rollout import AdapterConfig, PeftState, digest_adapter

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")

Hook = Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]


class AdapterHooks:
    """The adapter of one model; replacing it is atomic, since all of it is checked first."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def replace(self, state: PeftState, config: AdapterConfig) -> str:
        """Put `state` in place of the adapter in use and return its digest.

        Raises:
            DriverError: if a name is unknown, half of a pair is missing, or a shape does not fit its module.
        """
        modules = dict(self._model.named_modules())
        checked = {
            name: _checked(name, modules.get(name), pair, config)
            for name, pair in _pair_up(state).items()
        }
        self.remove()
        in_use: dict[str, np.ndarray] = {}
        for name, (a_RI, b_OR) in checked.items():
            hook = _make_hook(a_RI, b_OR, config.scale)
            self._handles.append(modules[name].register_forward_hook(hook))
            in_use[f"base_model.model.{name}.lora_A.weight"] = a_RI.float().numpy()
            in_use[f"base_model.model.{name}.lora_B.weight"] = b_OR.float().numpy()
        return digest_adapter(in_use)

    def remove(self) -> None:
        """Return to the base model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _pair_up(state: PeftState) -> dict[str, dict[str, np.ndarray]]:
    pairs: dict[str, dict[str, np.ndarray]] = {}
    unknown = []
    for name, tensor in state.items():
        match = _NAME.fullmatch(name)
        if match is None:
            unknown.append(name)
        else:
            pairs.setdefault(match["module"], {})[match["side"]] = tensor
    halves = [name for name, pair in pairs.items() if len(pair) != 2]
    if unknown or halves or not pairs:
        raise DriverError(
            f"adapter: found names {sorted(unknown)[:3]} and incomplete pairs {sorted(halves)[:3]} in {len(state)} tensors; "
            "expected PEFT names base_model.model.MODULE.lora_A.weight and lora_B.weight. This is a fault of the weight export."
        )
    return pairs


def _checked(
    name: str, module: nn.Module | None, pair: dict[str, np.ndarray], config: AdapterConfig
) -> tuple[Tensor, Tensor]:
    if not isinstance(module, nn.Linear):
        raise DriverError(
            f"adapter: found tensors for {name}; expected a linear layer of the model. This is a fault of the weight export."
        )
    dtype = module.weight.dtype
    a_RI = torch.tensor(pair["A"], dtype=dtype)
    b_OR = torch.tensor(pair["B"], dtype=dtype)
    expected = ((config.rank, module.in_features), (module.out_features, config.rank))
    if (tuple(a_RI.shape), tuple(b_OR.shape)) != expected:
        raise DriverError(
            f"adapter: found shapes {tuple(a_RI.shape)} and {tuple(b_OR.shape)} for {name}; expected {expected[0]} and "
            f"{expected[1]}. This is a fault of the weight export."
        )
    return a_RI, b_OR


def _make_hook(a_RI: Tensor, b_OR: Tensor, scale: float) -> Hook:
    def add_adapter(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + scale * nn.functional.linear(nn.functional.linear(inputs[0], a_RI), b_OR)

    return add_adapter
