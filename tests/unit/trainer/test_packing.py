"""Micro-batches hold every sample once, pad on the right, and look at the position before each response token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.trainer.packing import pack, split_micro_batches, unpack
from miles_hpc.trainer.samples import TrainSample

pytestmark = pytest.mark.trainer

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)
PAIRS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 99), min_size=1, max_size=9),
        st.lists(st.integers(1, 99), max_size=9),
    ),
    min_size=1,
    max_size=8,
)


def samples_of(pairs) -> list[TrainSample]:
    return [
        TrainSample(
            prompt_ids=tuple(prompt), response_ids=tuple(response), old_logprobs=(), advantage=0.0
        )
        for prompt, response in pairs
    ]


@given(LENGTHS, st.integers(1, 8))
def test_a_fixed_size_splits_everything_once(lengths, size):
    batches = split_micro_batches(lengths, micro_batch_size=size, max_tokens=None)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)


@given(LENGTHS, st.integers(1, 200))
def test_a_token_budget_counts_padding(lengths, budget):
    batches = split_micro_batches(lengths, micro_batch_size=None, max_tokens=budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[index] for index in batch)
        assert padded <= budget or len(batch) == 1


@given(PAIRS, st.integers(1, 4))
def test_packing_points_at_the_token_before_each_response_token(pairs, multiple):
    samples = samples_of(pairs)
    batch = pack(samples, list(reversed(range(len(samples)))), multiple=multiple)
    assert batch.tokens_BS.shape[1] % multiple == 0
    place = 0
    for row, index in enumerate(batch.indices):
        whole = samples[index].prompt_ids + samples[index].response_ids
        assert tuple(batch.tokens_BS[row, : len(whole)].tolist()) == whole
        assert not batch.tokens_BS[row, len(whole) :].any()
        for offset, token in enumerate(samples[index].response_ids):
            column = len(samples[index].prompt_ids) + offset
            assert (batch.rows_T[place], batch.columns_T[place] + 1) == (row, column)
            assert batch.targets_T[place] == token == batch.tokens_BS[row, column]
            place += 1
    assert place == len(batch.targets_T)
    found = unpack(batch, batch.targets_T.float())
    assert found == {i: tuple(map(float, s.response_ids)) for i, s in enumerate(samples)}


def test_an_empty_response_is_a_row_without_targets():
    batch = pack(samples_of([([5], [])]), [0])
    assert torch.equal(batch.tokens_BS, torch.tensor([[5]]))
    assert len(batch.targets_T) == 0
    assert unpack(batch, torch.empty(0)) == {0: ()}
