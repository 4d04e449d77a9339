"""Token log-probabilities in chunks equal the plain computation, value and gradient."""

import pytest
import torch

from miles_hpc.trainer import head
from miles_hpc.trainer.head import VocabularyShard, token_logprobs

pytestmark = pytest.mark.trainer


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 50 * 3, 2**20])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_change_neither_value_nor_gradient(monkeypatch, chunk_bytes, temperature):
    monkeypatch.setattr(head, "LOGITS_BYTES", chunk_bytes)
    torch.manual_seed(0)
    weight, targets = torch.randn(50, 8), torch.randint(0, 50, (11,))
    hidden = torch.randn(11, 8, requires_grad=True)
    plain = hidden.detach().clone().requires_grad_()
    direction = torch.randn(11)
    shard = VocabularyShard(weight=weight, start=0, group=None)
    found = token_logprobs(hidden, targets, shard, temperature)
    expected = (plain @ weight.t() / temperature).log_softmax(-1)[torch.arange(11), targets]
    torch.testing.assert_close(found, expected)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(hidden.grad, plain.grad)


def test_large_logits_do_not_overflow():
    hidden, weight = torch.full((2, 4), 100.0), torch.eye(4) * 10
    shard = VocabularyShard(weight=weight, start=0, group=None)
    found = token_logprobs(hidden, torch.tensor([0, 1]), shard, 1.0)
    torch.testing.assert_close(found, torch.full((2,), -torch.tensor(4.0).log().item()))


def test_no_response_tokens_is_an_empty_result():
    shard = VocabularyShard(weight=torch.randn(5, 3), start=0, group=None)
    hidden = torch.empty(0, 3, requires_grad=True)
    token_logprobs(hidden, torch.empty(0, dtype=torch.long), shard, 1.0).sum().backward()
    assert hidden.grad.shape == (0, 3)
