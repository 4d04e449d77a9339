"""Rules of two tenants in one job: adapters, the reference, and where a side that sleeps on shared GPUs goes.

How many bytes that takes is `memory`. Knows no flag of an engine.
"""

from collections.abc import Iterator

from miles_hpc.plan.findings import Check, Verdict
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.model import LATENT_FAMILIES
from miles_hpc.spec.rules import Rule

_MILES = "radixark/miles 31f1ca961"
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
LATENT_PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def adaptable_projections(spec: JobSpec) -> tuple[str, ...]:
    """Return the projections of the model's family that an adapter may be put on."""
    latent = LATENT_PROJECTIONS if spec.model.family in LATENT_FAMILIES else ()
    return ATTENTION_PROJECTIONS + MLP_PROJECTIONS + latent


def _target_modules(spec: JobSpec) -> Iterator[Verdict]:
    if spec.lora is None:
        return
    known = adaptable_projections(spec)
    unknown = [name for name in spec.lora.target_modules if name not in known]
    if unknown:
        yield Verdict(
            keys=("lora.target_modules", "model.family"),
            found=f"target_modules with {', '.join(unknown)}",
            expected=f"projections of a {spec.model.family} model",
            fix=f"Choose from {', '.join(known)}.",
        )


def _lora_backend(spec: JobSpec) -> Iterator[Verdict]:
    rollout = spec.rollout
    if spec.lora is None or spec.model.num_experts is None or rollout.engine != "sglang":
        return
    if rollout.lora_backend != "triton":
        yield Verdict(
            keys=("rollout.lora_backend", "model.num_experts"),
            found=f"lora_backend = {rollout.lora_backend or '(engine default)'} for a mixture-of-experts model",
            expected='"triton"',
            fix='Set rollout.lora_backend = "triton".',
        )


def _base_backup(spec: JobSpec) -> Iterator[Verdict]:
    offload = spec.offload
    if (
        spec.job.engine == "miles"
        and spec.lora is not None
        and offload.rollout == "host"
        and not offload.base_cpu_backup
    ):
        yield Verdict(
            keys=("offload.base_cpu_backup", "lora"),
            found="LoRA over a sleeping rollout engine without base_cpu_backup",
            expected="the engine's base weights to survive their sleep; else the whole base is sent again at every step,"
            " and on quantised engines train and rollout drift apart",
            fix="Set offload.base_cpu_backup = true.",
            level="warning",
        )


def _reference(spec: JobSpec) -> Iterator[Verdict]:
    if spec.train.kl_coef > 0 and spec.job.engine == "miles":
        yield Verdict(
            keys=("train.kl_coef",),
            found=f"kl_coef = {spec.train.kl_coef:g}",
            expected="0 unless the KL term is wanted: Miles loads the reference and pins one more copy of the trainer's"
            " weights on every rank",
            fix="Set train.kl_coef = 0, or plan the memory of the reference.",
            level="warning",
        )


def _offloaded(spec: JobSpec) -> Iterator[Verdict]:
    offload = spec.offload
    if spec.rollout.own_gpus is not None:
        return
    if spec.cluster.device == "gpu" and "none" in (offload.train, offload.rollout):
        stays = "train" if offload.train == "none" else "rollout"
        yield Verdict(
            keys=(f"offload.{stays}",),
            found=f'offload.{stays} = "none" on shared GPUs',
            expected="a sleeping side to leave the GPU; what stays is memory that the other side never gets",
            fix=f'Remove offload.{stays} = "none", unless both fit together.',
            level="warning",
        )


def _nobody_sleeps(spec: JobSpec) -> Iterator[Verdict]:
    own, offload = spec.rollout.own_gpus, spec.offload
    sleeps = [
        f'offload.{side} = "{place}"'
        for side, place in (("train", offload.train), ("rollout", offload.rollout))
        if place != "none"
    ]
    if own is not None and sleeps:
        yield Verdict(
            keys=("offload.train", "offload.rollout", "rollout.own_gpus"),
            found=f"{' and '.join(sleeps)} with rollout.own_gpus({own})",
            expected="both sides awake: neither waits for the other's GPUs, and an offload would only take time",
            fix='Set offload.train = "none" and offload.rollout = "none".',
        )


COLOCATION_CHECKS = (
    Check(
        Rule(
            id="MH241",
            fixed=True,
            title="adapters on projections that exist",
            reason="An adapter on a name that the model does not have is never trained.",
            source=f"{_MILES} miles/utils/arguments.py (target_modules is mandatory with lora_rank)",
        ),
        _target_modules,
    ),
    Check(
        Rule(
            id="MH242",
            title="SGLang's triton LoRA backend for experts",
            reason="SGLang's default LoRA backend crashes on mixture-of-experts models.",
            source=f"{_MILES} examples/swe-agent-harbor-docker/run_glm52_lora_tb2_daytona.py (sglang_lora_backend)",
        ),
        _lora_backend,
    ),
    Check(
        Rule(
            id="MH243",
            title="a host copy of the frozen base, where it is used",
            reason="With adapters the base never changes: a copy in host memory lets the engine wake without it being sent."
            " Miles ignores the flag without LoRA or without a sleeping engine.",
            arithmetic="cost: gpus_per_node * engine weight bytes / gpus_per_engine of host memory on each node",
            source=f"{_MILES} miles/backends/sglang_utils/sglang_engine.py:787, miles/utils/arguments.py:1764",
        ),
        _base_backup,
    ),
    Check(
        Rule(
            id="MH244",
            title="no reference that nobody reads",
            reason="A KL term needs the logprobs of the reference. Miles keeps that model as one more pinned copy of the"
            " trainer's weights, even at coefficient 0 when --use-kl-loss is given.",
            arithmetic="cost: trainer weight bytes of a rank, on each rank, in pinned host memory",
            source=f"{_MILES} miles/backends/megatron_utils/actor.py; docs/models/qwen/qwen3-8.md section 6",
        ),
        _reference,
    ),
    Check(
        Rule(
            id="MH246",
            title="the sleeping side leaves the GPU",
            reason="Colocated sides share GPU memory; a side that stays shrinks the KV cache or the micro-batch of the other.",
            source="docs/memory.md",
        ),
        _offloaded,
    ),
    Check(
        Rule(
            id="MH247",
            title="no sleep without sharing",
            reason="Rollout engines with GPUs of their own and their trainer work at the same time; what one of them gave"
            " back, nobody would take.",
            source=f"{_MILES} miles/utils/arguments.py (offload follows colocate)",
        ),
        _nobody_sleeps,
    ),
)
