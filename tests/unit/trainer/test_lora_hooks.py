import numpy as np
import pytest
import torch
from torch import nn

from miles_hpc.errors import DriverError
from miles_hpc.trainer.lora_hooks import AdapterHooks
from miles_hpc.trainer.rollout import AdapterConfig, digest_adapter

pytestmark = pytest.mark.trainer

CONFIG = AdapterConfig(rank=2, alpha=6.0, target_modules=("up",))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(3)

    def forward(self, x):
        return self.up(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Block()


def state(**changes):
    random = np.random.default_rng(0)
    tensors = {
        "base_model.model.up.lora_A.weight": random.normal(size=(2, 3)).astype(np.float32),
        "base_model.model.up.lora_B.weight": random.normal(size=(5, 2)).astype(np.float32),
    }
    return {**tensors, **changes}


def test_the_output_gains_scale_times_b_a_x(model):
    x = torch.randn(4, 3)
    before = model(x)
    hooks = AdapterHooks(model)
    assert hooks.replace(state(), CONFIG) == digest_adapter(state())
    a, b = (torch.from_numpy(tensor) for tensor in state().values())
    assert torch.allclose(model(x), before + 3.0 * (x @ a.T @ b.T), atol=1e-6)
    hooks.remove()
    assert torch.equal(model(x), before)


@pytest.mark.parametrize(
    "wrong",
    [
        state(**{"base_model.model.up.bias": np.zeros(5, np.float32)}),
        {"base_model.model.up.lora_A.weight": np.zeros((2, 3), np.float32)},
        state(**{"base_model.model.down.lora_A.weight": np.zeros((2, 3), np.float32)}),
        {
            "base_model.model.norm.lora_A.weight": np.zeros((2, 3), np.float32),
            "base_model.model.norm.lora_B.weight": np.zeros((3, 2), np.float32),
        },
        {
            "base_model.model.down.lora_A.weight": np.zeros((2, 3), np.float32),
            "base_model.model.down.lora_B.weight": np.zeros((5, 2), np.float32),
        },
        state(**{"base_model.model.up.lora_A.weight": np.zeros((4, 3), np.float32)}),
        {},
    ],
    ids=["foreign", "half", "half of another", "not linear", "unknown", "shape", "empty"],
)
def test_a_state_that_does_not_fit_is_refused_and_the_old_adapter_stays(model, wrong):
    hooks = AdapterHooks(model)
    hooks.replace(state(), CONFIG)
    x = torch.randn(4, 3)
    expected = model(x)
    with pytest.raises(DriverError, match="adapter"):
        hooks.replace(wrong, CONFIG)
    assert torch.equal(model(x), expected)
