"""The job spec: every TOML table a user may write, with its meaning, unit and default.

`JobSpec` is what the user asked, validated key by key. It derives nothing: layouts, rules across tables and flags
belong to `plan` and `engine`. Read from files by `miles_hpc.spec.load`.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from miles_hpc.spec.agent import AgentTable
from miles_hpc.spec.fields import (
    Adapter,
    Duration,
    FilePath,
    Interface,
    Line,
    NodePath,
    OptionName,
    PositiveSize,
    Size,
    SlurmExpression,
    SlurmName,
    SrunOption,
    SubmitPath,
    Table,
    Text,
    TimeLimit,
    VariableName,
    Word,
    distinct,
)
from miles_hpc.spec.levels import RuleId, RuleLevel
from miles_hpc.spec.model import Count, ModelTable
from miles_hpc.units import Bytes, Seconds

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class JobTable(Table):
    """[job]: what is run, for how long, and where its run folder goes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Name of the job in Slurm and first part of the run folder's name."""
    engine: Literal["native", "miles"]
    """Trainer back-end: `native` (megatron-core with SGLang or transformers, in this package) or `miles` (drives radixark/miles)."""
    time_limit: TimeLimit
    """Longest run time of one attempt; near its end the driver saves and the job requeues itself. Written as "4h" or any Slurm time form ("30" is 30 minutes, "10:00" ten minutes). Slurm rounds it up to whole minutes."""
    run_root: SubmitPath = Path("runs")
    """Folder, on a file system that every node sees, in which the run folder is made. `~` is expanded and a relative path is taken from the current folder at submission."""
    resume: Literal["auto", "never"] = "auto"
    """Whether a later attempt continues from the last complete checkpoint; "never" also forbids Slurm to requeue the job."""
    max_attempts: Count = 3
    """Attempts without success after which the run is given up (`resume = "auto"` only). One that was preempted, or that `time_limit` ended after it had saved something new, does not count."""
    comment: Line | None = None
    """Free text for Slurm's job comment."""


class ClusterTable(Table):
    """[cluster]: the nodes to ask for. Site profiles (`--site`) fill what a cluster adds."""

    num_nodes: Count
    """Nodes of the job. On the local cluster each becomes one node agent on this machine."""
    device: Literal["gpu", "cpu"] = "gpu"
    """What trainer ranks and rollout engines run on."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs of each node, all of them used; required when `device` is "gpu", left out when it is "cpu"."""
    cpu_ranks_per_node: Count = 1
    """Trainer ranks on each node when `device` is "cpu"."""
    cpus_per_node: Count | None = None
    """CPUs to ask for on each node; left out, the whole node's (with `exclusive`) or the site's default."""
    memory_per_node: PositiveSize | None = None
    """Memory to ask for on each node; left out, all of it (`--mem=0`)."""
    node_memory: PositiveSize | None = None
    """Physical memory of a node of this type, for the planner."""
    gpu_memory: PositiveSize | None = None
    """Memory of one GPU, for the planner."""
    exclusive: bool = True
    """Ask for whole nodes; large jobs always should."""
    partition: SlurmName | None = None
    """Slurm partition, or a comma list of them."""
    account: SlurmName | None = None
    """Slurm account."""
    qos: SlurmName | None = None
    """Slurm quality of service."""
    constraint: SlurmExpression | None = None
    """Slurm node feature expression."""
    reservation: SlurmName | None = None
    """Slurm reservation."""
    gpu_request: Literal["gres", "gpus-per-node", "none"] = "gpus-per-node"
    """How GPUs are asked for: `--gres=gpu:N`, `--gpus-per-node=N`, or not at all where whole nodes imply them."""
    gpu_type: Word | None = None
    """GPU type name inside the request, such as "h200"."""
    segment: Count | None = None
    """Nodes of one NVLink domain that must stay together (`--segment`)."""
    sbatch_options: dict[OptionName, Line | bool] = Field(default_factory=dict)
    """Further long sbatch options by name without dashes, such as {licenses = "scratch:1"}; options that this package owns are refused."""
    srun_options: tuple[SrunOption, ...] = ()
    """Further long options of the one srun step, each as one text, such as "--container-image=..."; options that this package owns are refused."""
    python: NodePath | None = None
    """Python interpreter on the compute nodes with Ray and the engine installed; left out, the interpreter that submits."""


class NetworkTable(Table):
    """[network]: which interface carries the traffic between nodes."""

    interface: Interface | None = None
    """Interface for NCCL, Gloo and Ray, resolved on each node: a name ("ib0"), a list of prefixes, the first that fits wins ("ib,eth"), an exclusion ("^lo,docker"), `=` before either for whole names, or a subnet ("10.1.0.0/16"). Left out, the interface that holds the address by which Slurm knows the node. Loopback is never chosen between hosts, and every node proves that it and the head reach each other."""
    ib_hca: Adapter | None = None
    """Value of NCCL_IB_HCA, such as "mlx5"; left out, NCCL chooses."""


class ParallelTable(Table):
    """[parallel]: the Megatron grid. world size = tp * pp * cp * dp = etp * ep * pp * edp; dp and edp follow."""

    tp: Count = 1
    """Tensor parallel size."""
    pp: Count = 1
    """Pipeline parallel size."""
    cp: Count = 1
    """Context parallel size."""
    ep: Count = 1
    """Expert parallel size."""
    etp: Count = 1
    """Expert tensor parallel size."""
    sequence_parallel: bool = False
    """Split activations along the sequence inside a tensor parallel group (`tp` above 1)."""
    first_stage_layers: Count | None = None
    """Decoder layers on the first pipeline stage, when the split is uneven (`pp` above 1)."""
    last_stage_layers: Count | None = None
    """Decoder layers on the last pipeline stage, when the split is uneven (`pp` above 1)."""


class RolloutTable(Table):
    """[rollout]: how responses are generated."""

    engine: Literal["sglang", "transformers"] = "sglang"
    """Rollout engine: SGLang, or transformers (CPU; native engine only)."""
    gpus_per_engine: Count = 1
    """GPUs of one rollout engine (its tensor parallel size); with `device = "cpu"` the CPU ranks it spans."""
    own_gpus: Count | None = None
    """GPUs of the job that rollout engines have for themselves, the last ones: whole nodes, or a part of the only node (miles engine). Left out, both sides share every GPU."""
    prompts_per_step: Count
    """Prompts (groups) in one step."""
    samples_per_prompt: Count
    """Responses sampled for each prompt (the group size of GRPO)."""
    max_prompt_tokens: Count = 1024
    """Longest prompt after the chat template; longer ones are dropped with an event."""
    max_response_tokens: Count
    """Longest response; generation stops there."""
    temperature: Positive = 1.0
    """Sampling temperature; the trainer's logprobs use it too."""
    top_p: Fraction = 1.0
    """Nucleus sampling mass; below 1 the rollout's logprobs are no longer those of the policy, so the native engine refuses it."""
    mem_fraction_static: Fraction | None = None
    """Part of GPU memory for weights and KV cache (sglang only)."""
    max_running_requests: Count | None = None
    """Requests that one engine works on at a time (sglang only)."""
    context_length: Count | None = None
    """Longest prompt plus response an engine accepts (sglang only); left out, the sum of the two maxima."""
    expert_parallel: Count | None = None
    """Expert parallel size inside an engine (sglang only)."""
    attention_backend: Word | None = None
    """SGLang attention backend, such as "triton" (sglang only)."""
    moe_runner_backend: Word | None = None
    """SGLang MoE runner backend, such as "flashinfer_trtllm" (sglang only)."""
    lora_backend: Word | None = None
    """SGLang LoRA backend; mixture-of-experts models with LoRA need "triton" (sglang only)."""


class TrainTable(Table):
    """[train]: the GRPO update."""

    num_steps: Count
    """Steps of the run; one step is rollout, updates and weight sync."""
    learning_rate: Positive
    """Adam's learning rate, constant."""
    global_batch_size: Count | None = None
    """Samples of one optimizer update; left out, all samples of the step (one update)."""
    micro_batch_size: Count | None = None
    """Samples of one forward pass; exclusive with `max_tokens_per_gpu`."""
    max_tokens_per_gpu: Count | None = None
    """Token budget of one micro-batch (dynamic batching); exclusive with `micro_batch_size`."""
    clip_low: Fraction = 0.2
    """Lower clip of the probability ratio: 1 - clip_low."""
    clip_high: Positive = 0.28
    """Upper clip of the probability ratio: 1 + clip_high (DAPO's clip-higher)."""
    loss_aggregation: Literal["token", "sample"] = "token"
    """Average the loss over all response tokens of the global batch, or over each sample first."""
    normalise_advantages: bool = True
    """Divide a group's centred rewards by their standard deviation."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL term against the reference (the base without adapter); 0 loads no reference."""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.98)
    """Adam's beta1 and beta2."""
    adam_eps: Positive = 1e-8
    """Adam's epsilon."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    clip_grad: Positive = 1.0
    """Largest gradient norm; larger ones are scaled down."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: none, the attention scores (`selective`), or every layer (`full`; least memory, about a third more work)."""
    optimizer_cpu_offload: bool = False
    """Keep the optimizer state in host memory (miles engine)."""
    seed: Annotated[int, Field(ge=0)] = 1234
    """Seed of data order, adapters and sampling."""


class LoraTable(Table):
    """[lora]: train low-rank adapters instead of all weights."""

    rank: Count
    """Rank of the adapters."""
    alpha: Positive
    """Scale: the adapter's output is multiplied by alpha / rank."""
    dropout: Decay = 0.0
    """Dropout before the adapter (miles engine only; the native engine wants 0)."""
    target_modules: Annotated[tuple[Word, ...], Field(min_length=1), AfterValidator(distinct)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    )
    """Hugging Face names of the adapted projections."""


class OffloadTable(Table):
    """[offload]: where the sleeping side of a colocated pair goes."""

    train: Literal["none", "host", "disk"] = "disk"
    """Where the trainer's weights, gradients and optimizer state go during rollout."""
    rollout: Literal["none", "host"] = "host"
    """Whether the rollout engine gives back its memory during training ("host" keeps a copy of the weights in host memory)."""
    scratch_root: NodePath | None = None
    """Node-local folder on a real disk for offloaded tensors; the job's own subfolder is made below it and removed at the end. Left out, the site's, else the first of $SLURM_TMPDIR, /scratch, /local, /var/tmp that is a writable disk."""
    scratch_min_free: Size = Bytes(2**30)
    """Free space that must be on the scratch file system of every node before the job starts."""
    allow_memory_scratch: bool = False
    """Accept a scratch folder on tmpfs, ramfs or a network file system (it defeats the purpose of disk offload)."""
    chunk: PositiveSize = Bytes(64 * 2**20)
    """Bytes moved at a time between memory and scratch disk (`train = "disk"` or `stream_optimizer = true` only)."""
    stream_optimizer: bool = False
    """Keep the optimizer state on scratch disk and pass it through memory one bucket at a time during the step: for states that fit nowhere else, as every step reads and writes all of it. The native engine's file has room for the state twice, Miles' files for one; a run resumes with the value it was saved with. Miles streams the state of full training only."""
    optimizer_bucket: PositiveSize = Bytes(256 * 2**20)
    """Memory of the one bucket of streamed optimizer state (`stream_optimizer = true` with the native engine; Miles' bucket is fixed). A run resumes with the value it was saved with."""
    peak_device: Literal["cpu", "gpu"] = "cpu"
    """Where both sides' weights overlap during a handoff: host memory or GPU memory."""
    base_cpu_backup: bool = False
    """Keep the rollout engine's frozen base weights in host memory so that a LoRA weight sync ships adapters alone (miles engine)."""
    drop_page_cache: bool = True
    """Drop the page cache of the checkpoint files on every node after they were loaded."""


class DataTable(Table):
    """[data]: where prompts and rewards come from."""

    source: Literal["reasoning_gym", "jsonl"]
    """`reasoning_gym` makes verifiable tasks from a seed; `jsonl` reads a file of prompts (miles engine)."""
    task: Word | None = None
    """Name of the reasoning-gym task, such as "chain_sum"; required with `reasoning_gym`."""
    task_options: dict[Line, int | float | Text | bool] = Field(default_factory=dict)
    """Options of the task, passed on as they are, such as {min_terms = 2, max_terms = 2}."""
    instruction: Text = ""
    """Text put before every question, in the user's message (`reasoning_gym` only)."""
    path: FilePath | None = None
    """Prompt file, seen by every node; required with `jsonl`. A relative path is taken from the folder of the file that sets it."""
    input_key: Line = "prompt"
    """Key of the prompt in each line of `path`."""
    label_key: Line | None = None
    """Key of the reference answer in each line of `path`."""
    metadata_key: Line | None = None
    """Key of the metadata in each line of `path`."""
    reward: Word | None = None
    """Name of Miles' reward for the responses to `path`, such as "deepscaler" (`jsonl` only); left out when the generate function scores them itself."""
    apply_chat_template: bool = True
    """Render `input_key` through the tokenizer's chat template (`jsonl` only); false for a session server that renders it."""
    shuffle: bool = True
    """Visit the lines of `path` in a seeded random order (`jsonl` only)."""


class CheckpointTable(Table):
    """[checkpoint]: what is saved, how often and how many are kept."""

    save_interval: Count | None = None
    """Steps between checkpoints; left out, only the last step saves."""
    keep: Count = 2
    """Complete checkpoints kept; older ones are removed."""
    save_hf: bool = False
    """Also export the adapter in PEFT format (or the weights in Hugging Face format) at the last step."""


class NcclTable(Table):
    """[nccl]: the pinned NCCL library and how strictly it is demanded."""

    version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$")] = "2.30.7"
    """Version that the library must report; env/nccl.toml holds the pin."""
    path: NodePath | None = None
    """libnccl.so.2 on every node; left out, the one of the nvidia-nccl-cu13 package beside the node's Python."""
    preload: bool = True
    """Have the processes that use NCCL use this library: by LD_PRELOAD in the trainer ranks and engines, before torch elsewhere; and prove it in each."""
    on_mismatch: Literal["fail", "warn"] = "fail"
    """What a process of the job that uses another NCCL does: end the job with a verdict that names it, or write a `warning` event."""
    debug: Literal["VERSION", "WARN", "INFO"] | None = None
    """Value of NCCL_DEBUG."""


class SecretsTable(Table):
    """[secrets]: variables whose values must not stand in a spec; they reach the driver's environment and nothing else."""

    names: Annotated[tuple[VariableName, ...], Field(min_length=1), AfterValidator(distinct)]
    """Names of the variables, such as ["WANDB_API_KEY"]."""
    file: SubmitPath | None = None
    """File of `NAME=value` lines, mode 0600, that the head node reads when it starts the driver. Left out, the values are taken from the environment of `submit` or `render`."""


class NativeTable(Table):
    """[engine.native]: settings of our own trainer."""

    threads_per_rank: Count = 1
    """CPU threads of one trainer rank."""
    threads_per_engine: Count = 1
    """CPU threads of one transformers rollout engine."""
    cpu_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of all weights when `cluster.device` is "cpu"."""
    phase_deadline: Duration = Seconds(3600.0)
    """Longest time of one phase of a step (rollout, update, save, weight sync); then the driver fails and names who is late."""


class MilesTable(Table):
    """[engine.miles]: which Miles to drive and with what it is not modelled here."""

    root: NodePath
    """Checkout of radixark/miles, or its path inside the container image."""
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}$")]
    """Commit of that checkout; flags are checked against what this revision knows."""
    megatron_path: NodePath
    """Megatron-LM checkout put on PYTHONPATH."""
    model_type: Word
    """Name of the file in Miles' scripts/models that holds the model arguments."""
    script: Literal["train.py", "train_async.py"] = "train.py"
    """Miles' driver script."""
    mode: Literal["normal", "debug_rollout_only"] = "normal"
    """`debug_rollout_only` starts the rollout engines alone and trains nothing: the first thing to try on a new site."""
    python_path: tuple[NodePath, ...] = ()
    """Further folders on PYTHONPATH of every process, such as the example folder that holds a custom generate function."""
    extra_args: dict[OptionName, Line | int | float | bool | tuple[Line, ...]] = Field(
        default_factory=dict
    )
    """Further flags of the script by name without dashes: true gives a flag without value, a text or number one value, an array several. Flags that this package owns are refused."""


class EngineTable(Table):
    """[engine]: the table of the engine named by `job.engine`."""

    native: NativeTable | None = None
    """[engine.native]"""
    miles: MilesTable | None = None
    """[engine.miles]"""


class JobSpec(Table):
    """A whole job spec, as written by the user and completed by `extends`, a site profile and `--set`."""

    job: JobTable
    model: ModelTable
    cluster: ClusterTable
    network: NetworkTable = NetworkTable()
    parallel: ParallelTable = ParallelTable()
    rollout: RolloutTable
    train: TrainTable
    lora: LoraTable | None = None
    offload: OffloadTable = OffloadTable()
    data: DataTable
    checkpoint: CheckpointTable = CheckpointTable()
    nccl: NcclTable = NcclTable()
    env: dict[VariableName, Text] = Field(default_factory=dict)
    """[env]: further environment variables of the engine's processes; variables that this package owns, and secrets, are refused."""
    secrets: SecretsTable | None = None
    """[secrets]"""
    agent: AgentTable = AgentTable()
    engine: EngineTable = EngineTable()
    rules: dict[RuleId, RuleLevel] = Field(default_factory=dict)
    """[rules]: levels of the planner's and engine's rules, such as MH263 = {level = "warning", reason = "our NCCL 2.29 carries the fix"}. The reason is shown with every finding; a rule that guards what cannot work keeps its level."""


RESERVED_TABLES = ("prepare", "tenant", "eval")
"""Top-level names kept for later; a spec that uses one is told so."""
