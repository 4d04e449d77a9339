"""The model folder that trainer ranks and rollout engines load: found, made from a seed, or dequantised once.

Run as a child of the driver (`python -m miles_hpc.trainer.demo_model RUN_DIR`), so that the memory of a dequantised model
goes back to the system. Prints the folder on its last line. Never asks a hub for anything.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

from miles_hpc.errors import DriverError, MilesHpcError
from miles_hpc.paths import RunDir
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.model import ModelTable
from miles_hpc.trainer.model_config import check_checkpoint

COMPLETE = "COMPLETE"


def prepare_model(run: RunDir, spec: JobSpec) -> Path:
    """Return the model folder in Hugging Face format, making it in the run's cache if it is not there yet.

    A folder in the cache appears whole, by one rename; its name holds a digest of what it was made from. Only the
    driver of the live attempt calls this, so there is one writer.

    Raises:
        DriverError: if the checkpoint or the package is missing, or its shape is not that of the [model] table.
    """
    model = spec.model
    if model.weights == "checkpoint":
        if model.hf_checkpoint is None:
            raise DriverError(
                'model.hf_checkpoint: found nothing; expected a folder, since model.weights = "checkpoint". '
                "Set model.hf_checkpoint."
            )
        check_checkpoint(model.hf_checkpoint, model)
        return model.hf_checkpoint
    folder = run.cache / _cache_name(model, spec.train.seed)
    if (folder / COMPLETE).is_file():
        return folder
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        if model.weights == "random":
            _write_random(model, spec.train.seed, partial)
        else:
            _write_dequantised(model, partial)
        check_checkpoint(partial, model)
        (partial / COMPLETE).touch()
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _cache_name(model: ModelTable, seed: int) -> str:
    made_from = json.dumps([model.model_dump(mode="json"), seed], sort_keys=True)
    return f"model-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}"


def _write_random(model: ModelTable, seed: int, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from miles_hpc.trainer.tiny_tokenizer import make_tokenizer

    if model.family not in ("llama", "qwen3"):
        raise DriverError(
            f'model.family: found "{model.family}"; expected "llama" or "qwen3" with weights = "random". '
            "Use one of those, or a checkpoint."
        )
    tokenizer = make_tokenizer(model.vocab_size)
    config = AutoConfig.for_model(
        model.family,
        num_hidden_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        head_dim=model.head_dim,
        intermediate_size=model.ffn_hidden_size,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        tie_word_embeddings=model.tie_word_embeddings,
        attention_bias=model.attention_bias,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        rms_norm_eps=model.rms_norm_eps,
        initializer_range=model.initializer_range,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    _save(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder)
    tokenizer.save_pretrained(folder)


def _write_dequantised(model: ModelTable, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = _gguf_path(model)
    names = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **names)
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **names)
    if hasattr(loaded.config, "quantization_config"):
        # transformers keeps the mark of the file's quantisation, although every tensor is full precision by now.
        del loaded.config.quantization_config
    _save(loaded, folder)
    tokenizer.save_pretrained(folder)


def _gguf_path(model: ModelTable) -> Path:
    """Return the GGUF file inside the installed package, without importing the package."""
    if model.gguf_package is None or model.gguf_file is None:
        raise DriverError(
            "model.gguf_package, model.gguf_file: found one or none of them; expected both, since "
            'model.weights = "package_gguf". Set both.'
        )
    found = importlib.util.find_spec(model.gguf_package)
    roots = list(found.submodule_search_locations or ()) if found is not None else []
    if not roots:
        raise DriverError(
            f"model.gguf_package: found no installed package {model.gguf_package!r}; expected one that contains "
            f"{model.gguf_file}. Install it on the head node, for instance with the package's `cpu` extra."
        )
    path = Path(roots[0]) / model.gguf_file
    if not path.is_file():
        raise DriverError(
            f"model.gguf_file: found no file {path}; expected it inside package {model.gguf_package}. "
            "Check the name and the package's version."
        )
    return path


def _save(loaded: "object", folder: Path) -> None:
    """Write config and weights as safetensors; tied tensors are stored once, as transformers itself does."""
    from safetensors.torch import save_file
    from transformers import PreTrainedModel

    assert isinstance(loaded, PreTrainedModel)
    state = dict(loaded.state_dict())
    if loaded.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # The model's own save_pretrained would note this; SGLang chooses its implementation by it.
    loaded.config.architectures = [type(loaded).__name__]
    loaded.config.save_pretrained(folder)
    if loaded.generation_config is not None:
        loaded.generation_config.save_pretrained(folder)


def main(argv: list[str]) -> int:
    """Prepare the model of the run folder `argv[0]`; 0 and the folder on stdout, or an error on stderr."""
    from miles_hpc.trainer.inputs import read_plan

    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1")
    run = RunDir(Path(argv[0]))
    try:
        folder = prepare_model(run, read_plan(run).spec)
    except MilesHpcError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
