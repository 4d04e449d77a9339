import tomllib

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_hpc.errors import DriverError
from miles_hpc.paths import RunDir, packaged
from miles_hpc.spec.load import load_spec
from miles_hpc.spec.model import ModelTable
from miles_hpc.trainer.demo_model import prepare_model
from miles_hpc.trainer.tiny_tokenizer import TURN_END, make_tokenizer

pytestmark = pytest.mark.trainer


@pytest.fixture(scope="module")
def spec():
    return load_spec(packaged("jobs") / "demo_tiny.toml", local=True).spec


@pytest.fixture(scope="module")
def made(spec, tmp_path_factory):
    return prepare_model(RunDir(tmp_path_factory.mktemp("run")), spec)


def with_model(spec, **changes):
    return spec.model_copy(update={"model": spec.model.model_copy(update=changes)})


def test_a_random_model_loads_in_transformers_with_the_shape_of_the_table(made, spec):
    model = AutoModelForCausalLM.from_pretrained(made, local_files_only=True)
    assert model.config.num_hidden_layers == spec.model.num_layers
    assert model.get_input_embeddings().weight.shape == (512, 64)
    assert model.config.architectures == ["Qwen3ForCausalLM"] == [type(model).__name__]


def test_the_same_seed_gives_the_same_files_byte_for_byte(made, spec, tmp_path):
    again = prepare_model(RunDir(tmp_path), spec)
    assert again.name == made.name
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (made / name).read_bytes()


def test_another_seed_or_shape_is_another_folder(made, spec, tmp_path):
    run = RunDir(tmp_path)
    reseeded = spec.model_copy(update={"train": spec.train.model_copy(update={"seed": 5})})
    assert prepare_model(run, reseeded).name != made.name
    assert prepare_model(run, with_model(spec, num_layers=2)).name != made.name


def test_a_finished_folder_is_used_again_and_an_unfinished_one_is_made_anew(spec, tmp_path):
    run = RunDir(tmp_path)
    folder = prepare_model(run, spec)
    (folder / "config.json").write_text("kept")
    assert prepare_model(run, spec) == folder
    assert (folder / "config.json").read_text() == "kept"
    (folder / "COMPLETE").unlink()
    prepare_model(run, spec)
    assert (folder / "config.json").read_text() != "kept"
    assert [entry.name for entry in run.cache.iterdir()] == [folder.name]


def test_the_chat_template_ends_where_the_assistant_begins(made):
    tokenizer = AutoTokenizer.from_pretrained(made, local_files_only=True)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 3?"}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token == TURN_END


@pytest.mark.parametrize("text", ["2 + 33 = 35", "naïve ☃ text\n\ttabs", "a  b   c", "-17,000.5"])
def test_any_text_survives_the_tokenizer(text):
    tokenizer = make_tokenizer(512)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert max(ids) < 512
    assert len(tokenizer) == 512


def test_every_digit_is_a_token_of_its_own():
    tokenizer = make_tokenizer(512)
    assert len(tokenizer.encode("12345", add_special_tokens=False)) == 5


def test_a_vocabulary_without_room_for_the_bytes_is_refused_with_the_arithmetic():
    with pytest.raises(DriverError, match=r"256 bytes \+ 3 special tokens = 259"):
        make_tokenizer(258)


@pytest.mark.parametrize(
    ("package", "file", "named"),
    [
        ("no_such_package_of_ours", "x.gguf", "no_such_package_of_ours"),
        ("json", "x.gguf", "x.gguf"),
        (None, None, "gguf_package"),
    ],
)
def test_a_missing_package_or_file_is_named(spec, tmp_path, package, file, named):
    wrong = with_model(spec, weights="package_gguf", gguf_package=package, gguf_file=file)
    run = RunDir(tmp_path)
    with pytest.raises(DriverError, match=named):
        prepare_model(run, wrong)
    assert list(run.cache.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_packaged_gguf_becomes_a_checkpoint_of_the_demos_shape(tmp_path):
    demo = load_spec(packaged("jobs") / "demo.toml", local=True).spec
    folder = prepare_model(RunDir(tmp_path), demo)
    assert (folder / "model.safetensors").stat().st_size > 4 * 134_000_000
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = tokenizer.encode("The capital of France is", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    word = tokenizer.decode(model(ids).logits[0, -1].argmax())
    assert word.strip() == "Paris"


def test_the_checkpoint_of_the_table_is_used_where_it_lies(made, spec, tmp_path):
    checked = with_model(spec, weights="checkpoint", hf_checkpoint=made)
    assert prepare_model(RunDir(tmp_path), checked) == made
    wrong = with_model(spec, weights="checkpoint", hf_checkpoint=made, num_layers=5)
    with pytest.raises(DriverError, match=r"num_hidden_layers = 4, but model\.num_layers = 5"):
        prepare_model(RunDir(tmp_path), wrong)


def test_the_demo_table_is_complete():
    table = tomllib.loads((packaged("jobs") / "demo.toml").read_text())["model"]
    assert ModelTable.model_validate(table).shape_source
