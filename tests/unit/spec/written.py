"""Spec files as text for the tests of the spec: a smallest native and a smallest miles spec."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from miles_hpc.errors import SpecError
from miles_hpc.spec.load import LoadedSpec, load_spec

NATIVE = """\
[job]
name = "tiny"
engine = "native"
time_limit = "10min"

[model]
name = "tiny"
family = "qwen3"
shape_source = "made up"
weights = "random"
num_layers = 4
hidden_size = 64
num_attention_heads = 4
num_query_groups = 2
head_dim = 16
ffn_hidden_size = 128
vocab_size = 512

[cluster]
num_nodes = 2
device = "cpu"

[rollout]
engine = "transformers"
prompts_per_step = 4
samples_per_prompt = 8
max_response_tokens = 8

[train]
num_steps = 4
learning_rate = 1e-2

[data]
source = "reasoning_gym"
task = "chain_sum"
"""

MILES = """\
[job]
name = "big"
engine = "miles"
time_limit = "1-00:00:00"

[model]
name = "big"
family = "qwen3"
shape_source = "made up"
hf_checkpoint = "/models/big"
num_layers = 4
hidden_size = 64
num_attention_heads = 4
num_query_groups = 2
head_dim = 16
ffn_hidden_size = 128
vocab_size = 512

[cluster]
num_nodes = 2
gpus_per_node = 8

[rollout]
prompts_per_step = 4
samples_per_prompt = 8
max_response_tokens = 8

[train]
num_steps = 4
learning_rate = 1e-2

[data]
source = "jsonl"
path = "/data/prompts.jsonl"

[engine.miles]
root = "/root/miles"
revision = "31f1ca961"
megatron_path = "/root/Megatron-LM"
model_type = "qwen3-4B"
"""


def write(folder: Path, name: str, text: str) -> Path:
    """Write `text` as `folder/name` and return the path."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def load(path: Path, *overrides: str, site: str | None = None, local: bool = False) -> LoadedSpec:
    """Load `path` with `--set` texts."""
    return load_spec(path, site=site, overrides=overrides, local=local)


def faults(path: Path, *overrides: str, site: str | None = None, local: bool = False) -> list[str]:
    """Return the lines of the refusal of `path`; fail when it is accepted."""
    with pytest.raises(SpecError) as refusal:
        load(path, *overrides, site=site, local=local)
    return str(refusal.value).splitlines()


def only_fault(path: Path, overrides: Sequence[str] = (), *, site: str | None = None) -> str:
    """Return the one line of the refusal of `path`."""
    lines = faults(path, *overrides, site=site)
    assert len(lines) == 1, lines
    return lines[0]
