import json
import tomllib

import pytest

from miles_hpc.errors import DriverError
from miles_hpc.paths import packaged
from miles_hpc.spec.model import ModelTable
from miles_hpc.trainer.model_config import check_checkpoint, find_mismatches

SMOLLM2 = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "rope_theta": 100000,
    "rms_norm_eps": 9.999999747378752e-06,
}


@pytest.fixture(scope="module")
def model():
    table = tomllib.loads((packaged("jobs") / "demo.toml").read_text())["model"]
    return ModelTable.model_validate(table)


def test_a_checkpoint_of_the_tables_shape_has_no_mismatch(model):
    assert find_mismatches(SMOLLM2, model) == ()


def test_newer_files_keep_the_rotary_base_in_a_table_of_its_own(model):
    config = {**SMOLLM2, "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}
    del config["rope_theta"]
    assert find_mismatches(config, model) == ()
    config["rope_parameters"]["rope_theta"] = 10000.0
    assert [found.key for found in find_mismatches(config, model)] == ["rope_theta"]


def test_all_mismatches_are_told_at_once_in_both_sides_names(model, tmp_path):
    wrong = {**SMOLLM2, "num_hidden_layers": 24, "vocab_size": 49153, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(DriverError) as caught:
        check_checkpoint(tmp_path, model)
    text = str(caught.value)
    assert "num_hidden_layers = 24, but model.num_layers = 30" in text
    assert "vocab_size = 49153, but model.vocab_size = 49152" in text
    assert "head_dim = 32, but model.head_dim = 64" in text


def test_a_field_that_is_missing_is_a_mismatch(model):
    config = {key: value for key, value in SMOLLM2.items() if key != "hidden_size"}
    assert "hidden_size = None" in str(find_mismatches(config, model)[0])


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_missing_or_broken_config_is_told_with_its_path(model, tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(DriverError, match=r"config\.json"):
        check_checkpoint(tmp_path, model)
