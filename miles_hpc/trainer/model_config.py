"""Hugging Face's config.json against the [model] table, in both directions.

Knows the names of the fields that both sides have; knows neither weights nor how a model is built.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.errors import DriverError
from miles_hpc.spec.model import ModelTable

_MODEL_TYPES = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5_moe": "qwen3_5_moe",
    "glm_dsa": "glm_moe_dsa",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One field in which a checkpoint and the [model] table disagree; `found` is None when config.json lacks it."""

    key: str
    config_key: str
    found: object
    expected: object

    def __str__(self) -> str:
        return f"{self.config_key} = {self.found!r}, but model.{self.key} = {self.expected!r}"


def config_fields(model: ModelTable) -> dict[str, tuple[str, object]]:
    """Return, for every key of the [model] table that decides a shape, its name in config.json and its value."""
    return {
        "family": ("model_type", _MODEL_TYPES[model.family]),
        "num_layers": ("num_hidden_layers", model.num_layers),
        "hidden_size": ("hidden_size", model.hidden_size),
        "num_attention_heads": ("num_attention_heads", model.num_attention_heads),
        "num_query_groups": ("num_key_value_heads", model.num_query_groups),
        "head_dim": ("head_dim", model.head_dim),
        "ffn_hidden_size": ("intermediate_size", model.ffn_hidden_size),
        "vocab_size": ("vocab_size", model.vocab_size),
        "tie_word_embeddings": ("tie_word_embeddings", model.tie_word_embeddings),
        "attention_bias": ("attention_bias", model.attention_bias),
        "rope_theta": ("rope_theta", model.rope_theta),
        "rms_norm_eps": ("rms_norm_eps", model.rms_norm_eps),
    }


def find_mismatches(config: dict[str, object], model: ModelTable) -> tuple[Mismatch, ...]:
    """Return every field of `config` that contradicts the [model] table, in the table's order.

    Fields that Hugging Face leaves out at their default (head_dim, attention_bias, tie_word_embeddings) are compared
    by that default; floats are compared to six digits, since GGUF stores them in single precision.
    """
    return tuple(
        Mismatch(key=key, config_key=config_key, found=found, expected=expected)
        for key, (config_key, expected) in config_fields(model).items()
        if not _equal(found := _lookup(config, config_key), expected)
    )


def check_checkpoint(folder: Path, model: ModelTable) -> None:
    """Check that `folder` holds a Hugging Face checkpoint of the shape that the [model] table gives.

    Raises:
        DriverError: if config.json is missing or unreadable, or with all mismatches at once.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"a JSON {type(config).__name__}")
    except (OSError, ValueError) as error:
        raise DriverError(
            f"{path}: {error}; expected the config.json of a Hugging Face checkpoint. "
            "Check model.hf_checkpoint."
        ) from error
    mismatches = find_mismatches(config, model)
    if mismatches:
        listed = "; ".join(str(mismatch) for mismatch in mismatches)
        raise DriverError(
            f"{path}: found {listed}; expected the shape of the [model] table. "
            "Correct the table from this config.json, or point model.hf_checkpoint at the right folder."
        )


def _lookup(config: dict[str, object], key: str) -> object:
    if key in config and config[key] is not None:
        return config[key]
    rope = config.get("rope_parameters")
    if key == "rope_theta" and isinstance(rope, dict):
        return rope.get("rope_theta")
    if key == "head_dim":
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        if isinstance(hidden, int) and isinstance(heads, int):
            return hidden // heads
    return {"attention_bias": False, "tie_word_embeddings": False}.get(key)


def _equal(found: object, expected: object) -> bool:
    if isinstance(expected, float) and isinstance(found, int | float):
        return math.isclose(found, expected, rel_tol=1e-6)
    return found == expected
