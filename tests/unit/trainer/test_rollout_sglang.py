"""The SGLang engine: what it is started with, the order of its calls, and, where SGLang is installed, its logprobs."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from miles_hpc.errors import DriverError
from miles_hpc.paths import packaged
from miles_hpc.spec.load import load_spec
from miles_hpc.trainer.rollout import AdapterConfig, Prompt, Sampling, digest_adapter
from miles_hpc.trainer.rollout_sglang import SglangEngine, engine_options

CONFIG = AdapterConfig(rank=2, alpha=4.0, target_modules=("q_proj",))
STATE = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.ones((2, 4), np.float32)
}


class Recorder:
    """Stands where SGLang's Engine stands and remembers the calls, in order."""

    def __init__(self, *, accepts=True):
        self.calls = []
        self._result = SimpleNamespace(
            success=accepts, error_message=None if accepts else "rank too high"
        )

    def load_lora_adapter_from_tensors(self, name, tensors, config):
        self.calls.append(("load", name))
        return self._result

    def unload_lora_adapter(self, name):
        self.calls.append(("unload", name))
        return self._result

    def flush_cache(self):
        self.calls.append(("flush",))

    def release_memory_occupation(self, tags):
        self.calls.append(("release", *tags))

    def resume_memory_occupation(self, tags):
        self.calls.append(("resume", *tags))

    def generate(self, *, input_ids, sampling_params, return_logprob, lora_path=None):
        self.calls.append(("generate", lora_path))
        self.seeds = [params["sampling_seed"] for params in sampling_params]
        drawn = [(-0.5, 9, None), (-0.25, 2, None)]
        kinds = ["stop", "length"] * (len(input_ids) // 2)
        return [
            {"meta_info": {"output_token_logprobs": drawn, "finish_reason": {"type": kind}}}
            for kind in kinds
        ]


def engine(recorder, **options):
    made = SglangEngine({"model_path": "/model", **options})
    made._engine = recorder
    return made


def sampling():
    return Sampling(
        samples_per_prompt=2,
        max_response_tokens=2,
        temperature=1.0,
        stop_token_ids=(2,),
        seed=1,
        step=1,
    )


def spec_on(device):
    spec = load_spec(packaged("jobs") / "demo_tiny.toml", local=True).spec
    return spec.model_copy(
        update={
            "cluster": spec.cluster.model_copy(update={"device": device}),
            "offload": spec.offload.model_copy(update={"rollout": "host"}),
        }
    )


def test_a_gpu_engine_can_sleep_and_keeps_a_copy_of_weights_that_are_not_sent_again():
    options = engine_options(spec_on("gpu"), Path("/model"), "bf16")
    assert options["enable_memory_saver"] is options["enable_weights_cpu_backup"] is True
    assert options["dtype"] == "bfloat16"
    assert (options["enable_lora"], options["max_lora_rank"]) == (True, 8)
    assert "attention_backend" not in options


def test_a_cpu_engine_uses_torchs_own_kernels_and_no_memory_saver():
    options = engine_options(spec_on("cpu"), Path("/model"), "fp32")
    assert options["device"] == "cpu"
    assert options["attention_backend"] == options["lora_backend"] == "torch_native"
    assert "enable_memory_saver" not in options


def test_the_new_adapter_is_in_before_the_old_one_goes_and_no_name_is_used_twice():
    recorder = Recorder()
    made = engine(recorder)
    assert made.load_adapter(STATE, CONFIG, 4) == digest_adapter(STATE)
    made.load_adapter(STATE, CONFIG, 4)
    first, second = recorder.calls[0][1], recorder.calls[1][1]
    assert recorder.calls == [("load", first), ("load", second), ("unload", first)]
    assert first != second
    assert made.version() == 4


def test_a_refusal_that_sglang_only_returns_is_raised_and_the_version_stays():
    made = engine(Recorder(accepts=False))
    with pytest.raises(DriverError, match="rank too high"):
        made.load_adapter(STATE, CONFIG, 4)
    assert made.version() == 0


def test_the_cache_goes_first_and_comes_back_last():
    recorder = Recorder()
    made = engine(recorder, enable_memory_saver=True)
    made.sleep()
    made.wake()
    assert recorder.calls == [
        ("flush",),
        ("release", "kv_cache"),
        ("release", "weights"),
        ("resume", "weights"),
        ("resume", "kv_cache"),
    ]


def test_without_the_memory_saver_nothing_is_released():
    recorder = Recorder()
    made = engine(recorder)
    assert made.sleep()["bytes"] == 0
    made.wake()
    assert recorder.calls == []


def test_outputs_become_samples_and_every_request_has_its_own_seed():
    recorder = Recorder()
    made = engine(recorder)
    prompts = [Prompt(group=0, token_ids=(1, 2)), Prompt(group=1, token_ids=(3,))]
    samples = made.generate(prompts, sampling())
    assert [sample.group for sample in samples] == [0, 0, 1, 1]
    assert [sample.finished for sample in samples] == [True, False, True, False]
    assert samples[3].prompt_ids == (3,)
    assert samples[0].response_ids == (9, 2)
    assert samples[0].rollout_logprobs == (-0.5, -0.25)
    assert len(set(recorder.seeds)) == 4
    made.load_adapter(STATE, CONFIG, 1)
    made.generate(prompts, sampling())
    assert recorder.calls[-1] == ("generate", ["policy-1-1"] * 4)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_sglang_on_cpu_gives_the_logprobs_of_transformers_with_and_without_adapter():
    pytest.importorskip("sglang")
    # A script of its own: SGLang spawns processes, which need a main module that can be imported.
    script = Path(__file__).with_name("sglang_parity.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
