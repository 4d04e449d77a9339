import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.trainer.rollout import (
    Prompt,
    Sampling,
    digest_adapter,
    draw_uniforms,
    split_prompts,
)


def sampling(**changes):
    values = {
        "samples_per_prompt": 3,
        "max_response_tokens": 5,
        "temperature": 1.0,
        "stop_token_ids": (2,),
        "seed": 1,
        "step": 1,
    }
    return Sampling(**{**values, **changes})


@given(st.integers(0, 40), st.integers(1, 9))
def test_prompts_are_divided_in_order_and_evenly(num_prompts, num_engines):
    prompts = [Prompt(group=index, token_ids=(1,)) for index in range(num_prompts)]
    shares = split_prompts(prompts, num_engines)
    assert len(shares) == num_engines
    assert [prompt for share in shares for prompt in share] == prompts
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1


def test_draws_depend_on_seed_step_group_sample_and_position_alone():
    base = draw_uniforms(sampling(), group=0)
    assert base.shape == (3, 5)
    assert np.array_equal(base, draw_uniforms(sampling(temperature=0.5), group=0))
    # More samples or a longer limit leave the draws that were there as they were.
    wider = draw_uniforms(sampling(samples_per_prompt=4, max_response_tokens=9), group=0)
    assert np.array_equal(wider[:3, :5], base)


def test_no_two_draws_of_a_run_are_shared():
    draws = [
        draw_uniforms(sampling(seed=seed, step=step), group)
        for seed in (1, 2)
        for step in (1, 2)
        for group in (0, 1)
    ]
    flat = np.concatenate([part.ravel() for part in draws])
    assert len(np.unique(flat)) == len(flat) == 8 * 15


def test_a_digest_tells_any_change_of_name_shape_or_value():
    state = {"b": np.zeros((2, 3), np.float32), "a": np.ones(4, np.float32)}
    same = {"a": np.ones(4, np.float32), "b": np.zeros((2, 3), np.float32)}
    changed = np.zeros((2, 3), np.float32)
    changed[1, 2] = 1e-7
    digests = {
        digest_adapter(state),
        digest_adapter({**state, "b": changed}),
        digest_adapter({**state, "b": np.zeros((3, 2), np.float32)}),
        digest_adapter({"c": state["b"], "a": state["a"]}),
    }
    assert digest_adapter(same) == digest_adapter(state)
    assert len(digests) == 4
