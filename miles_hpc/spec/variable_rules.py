"""The rules about text that goes through to others: environment variables, sbatch and srun options, engine flags.

Knows the names that this package owns and why; not how they are set (`plan.environ`, `launch`, `node`).
"""

import json
from collections.abc import Iterator, Mapping

from miles_hpc.spec.faults import SECRET_VARIABLE, is_secret
from miles_hpc.spec.rules import Rule, Settings, Violation

_EXTRA = ("engine", "miles", "extra_args")
ALLOCATOR = Rule(
    id="MH121",
    title="an allocator that can be paused",
    reason="Offload unmaps what cudaMalloc gave out; expandable segments do not come from there, so pausing frees nothing,"
    " under the variable's newer name without an error. A job-wide memory fraction also caps the rollout engines.",
    source="torch_memory_saver issue 24 and pull request 25; radixark/miles 31f1ca961"
    " examples/swe-agent-harbor-docker/run_glm52_lora_tb2_daytona.py",
)
OWNED_VARIABLES = Rule(
    id="MH122",
    title="variables with one owner",
    reason="A variable that is set twice has one value that its reader did not expect.",
    source="docs/reference/environment.md; docs/design.md, what runs on a node",
)
SECRETS = Rule(
    id="MH123",
    title="no secret in a spec",
    reason="The spec, the plan and the handoff are stored in the run folder, and flags show in every process list.",
    source="docs/design.md, the files between the parts",
)
OWNED_OPTIONS = Rule(
    id="MH124",
    title="Slurm options with one owner",
    reason="An option given twice has the value of whichever comes last; these follow from keys of the spec or from what"
    " the package needs to hold the job together.",
    source="sbatch and srun manuals",
)

_OWNED_VARIABLES: Mapping[str, str] = {
    "LD_PRELOAD": "the engine joins the NCCL library and the memory saver for the actors that need them; see [nccl]",
    "PYTHONPATH": "the node agent puts the frozen code there; see engine.miles.megatron_path",
    "CUDA_VISIBLE_DEVICES": "Ray gives each actor its GPUs",
    "MASTER_ADDR": "the driver gives the trainer its rendezvous",
    "MASTER_PORT": "the driver gives the trainer its rendezvous",
    "RANK": "the driver numbers the ranks",
    "LOCAL_RANK": "the driver numbers the ranks",
    "WORLD_SIZE": "the driver numbers the ranks",
    "NCCL_SOCKET_IFNAME": "network.interface decides it",
    "GLOO_SOCKET_IFNAME": "network.interface decides it",
    "NCCL_IB_HCA": "network.ib_hca decides it",
    "NCCL_DEBUG": "nccl.debug decides it",
    "SGLANG_NCCL_SO_PATH": "nccl.path decides it",
    "TMPDIR": "the node agent makes a short folder for each job",
}
_OWNED_PREFIXES: Mapping[str, str] = {
    "MILES_HPC_": "the package's own names",
    "RAY_": "the node agent configures Ray",
    "SLURM_": "Slurm's own names",
    "SBATCH_": "Slurm's own names",
    "SUBMITIT_": "submitit's own names",
    "TMS_": "offload.train decides it; with both backups of the memory saver on, it silently keeps a full pinned copy",
}
_PACKAGE = "the package decides it"
_BOTH_OPTIONS: Mapping[str, str] = {
    "nodes": "use cluster.num_nodes",
    "ntasks": _PACKAGE,
    "ntasks-per-node": _PACKAGE,
    "cpus-per-task": "use cluster.cpus_per_node",
    "gres": "use cluster.gpus_per_node",
    "gpus": "use cluster.gpus_per_node",
    "gpus-per-node": "use cluster.gpus_per_node",
    "gpus-per-task": "use cluster.gpus_per_node",
    "mem": "use cluster.memory_per_node",
    "mem-per-cpu": "use cluster.memory_per_node",
    "mem-per-gpu": "use cluster.memory_per_node",
    "time": "use job.time_limit",
    "job-name": "use job.name",
    "export": "use [env]",
    "export-file": "use [env]",
    "output": _PACKAGE,
    "error": _PACKAGE,
    "input": _PACKAGE,
    "open-mode": _PACKAGE,
    "signal": _PACKAGE,
    "chdir": _PACKAGE,
}
_SBATCH_OPTIONS: Mapping[str, str] = {
    **_BOTH_OPTIONS,
    "partition": "use cluster.partition",
    "account": "use cluster.account",
    "qos": "use cluster.qos",
    "constraint": "use cluster.constraint",
    "reservation": "use cluster.reservation",
    "exclusive": "use cluster.exclusive",
    "segment": "use cluster.segment",
    "comment": "use job.comment",
    "requeue": "use job.resume",
    "no-requeue": "use job.resume",
    "array": _PACKAGE,
    "wrap": _PACKAGE,
    "wait": "use submit --wait",
    "parsable": _PACKAGE,
    "test-only": "use miles-hpc check",
    "time-min": "use job.time_limit; the deadline of a save is reckoned from it",
    "help": _PACKAGE,
    "usage": _PACKAGE,
    "version": _PACKAGE,
}
_SRUN_OPTIONS: Mapping[str, str] = {
    **_BOTH_OPTIONS,
    "kill-on-bad-exit": _PACKAGE,
    "wait": _PACKAGE,
    "multi-prog": _PACKAGE,
    "pty": _PACKAGE,
    "label": _PACKAGE,
    "unbuffered": _PACKAGE,
    "relative": _PACKAGE,
    "nodelist": _PACKAGE,
    "jobid": _PACKAGE,
    "help": _PACKAGE,
    "usage": _PACKAGE,
    "version": _PACKAGE,
}


def check_variables(settings: Settings) -> Iterator[Violation]:
    """Yield what [env], the options of sbatch and srun, and further engine flags may not hold."""
    for path, name, value in _variables(settings):
        yield from _owned_variable(path, name)
        if name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            yield from _allocator(settings, path, name, value)
    names = settings.written("secrets.names")
    for name in names if isinstance(names, list) else []:
        yield from _secret_name(settings, str(name))
    yield from _secrets(settings)
    yield from _options(settings)


def _variables(settings: Settings) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield the place, name and value of each variable: of [env], and of JSON that a flag carries to some actors."""
    for name, value in settings.table("env").items():
        yield ("env", name), name, str(value)
    for flag, value in settings.table(".".join(_EXTRA)).items():
        for name, inner in _json_object(value).items():
            yield (*_EXTRA, flag), name, str(inner)


def _json_object(value: object) -> Mapping[str, object]:
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return {}
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _owned_variable(path: tuple[str, ...], name: str) -> Iterator[Violation]:
    prefixed = (why for start, why in _OWNED_PREFIXES.items() if name.startswith(start))
    reason = _OWNED_VARIABLES.get(name) or next(prefixed, None)
    if reason is not None:
        yield Violation(
            rule=OWNED_VARIABLES,
            path=path,
            found=f"the variable {name}",
            expected=f"a variable that this package does not own ({reason})",
            fix="remove it",
        )


def _secret_name(settings: Settings, name: str) -> Iterator[Violation]:
    yield from _owned_variable(("secrets", "names"), name)
    if name in settings.table("env"):
        yield Violation(
            rule=OWNED_VARIABLES,
            path=("secrets", "names"),
            found=f"the variable {name}, which [env] sets too",
            expected="one place for each variable",
            fix="remove it from [env]",
        )


def _allocator(
    settings: Settings, path: tuple[str, ...], name: str, value: str
) -> Iterator[Violation]:
    pairs = (part.partition(":") for part in value.split(","))
    chosen = {key.strip().lower(): setting.strip().lower() for key, _, setting in pairs}
    sleeping = [
        key for key in ("offload.train", "offload.rollout") if settings.value(key) != "none"
    ]
    if chosen.get("expandable_segments") == "true" and sleeping:
        yield Violation(
            rule=ALLOCATOR,
            path=path,
            found=f"expandable_segments:True in {name} with {settings.shown(sleeping[0])}",
            expected="no expandable segments, since pausing then frees nothing",
            fix="remove it; garbage_collection_threshold and max_split_size_mb hold fragmentation down",
        )
    if "per_process_memory_fraction" in chosen:
        yield Violation(
            rule=ALLOCATOR,
            path=path,
            found=f"per_process_memory_fraction in {name}, which reaches every process of the job",
            expected="no job-wide cap, since the rollout engines inherit it and run out of memory",
            fix="remove it; size the engines with rollout.mem_fraction_static",
        )


def _secrets(settings: Settings) -> Iterator[Violation]:
    paths: list[tuple[str, ...]] = [("env", name) for name in settings.table("env")]
    paths += [(*_EXTRA, flag) for flag in settings.table(".".join(_EXTRA))]
    secret = [path for path in paths if is_secret(path)]
    secret += [
        path
        for path, name, _ in _variables(settings)
        if path[0] == "engine" and SECRET_VARIABLE.search(name)
    ]
    for path in dict.fromkeys(secret):
        yield Violation(
            rule=SECRETS,
            path=path,
            found="a name that says its value is a secret",
            expected="no secret in a spec, whose text and plan are kept in the run folder",
            fix="remove it; put the name into secrets.names, and the value into secrets.file or the environment of submit",
        )


def _options(settings: Settings) -> Iterator[Violation]:
    for name in settings.table("cluster.sbatch_options"):
        if name in _SBATCH_OPTIONS:
            yield _owned_option(("cluster", "sbatch_options", name), name, _SBATCH_OPTIONS[name])
    written = settings.written("cluster.srun_options")
    for option in written if isinstance(written, list) else []:
        name = str(option).partition("=")[0].removeprefix("--")
        if name in _SRUN_OPTIONS:
            yield _owned_option(("cluster", "srun_options"), name, _SRUN_OPTIONS[name])


def _owned_option(path: tuple[str, ...], name: str, fix: str) -> Violation:
    return Violation(
        rule=OWNED_OPTIONS,
        path=path,
        found=f"the option --{name}",
        expected="an option that this package does not set itself",
        fix=fix,
    )


VARIABLE_RULES: tuple[Rule, ...] = (ALLOCATOR, OWNED_VARIABLES, SECRETS, OWNED_OPTIONS)
