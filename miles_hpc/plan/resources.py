"""Rules between what a job asks of a node and what its processes need, and between nodes.

Knows no Slurm option; memory is `memory`.
"""

from collections.abc import Iterator

from miles_hpc.plan.findings import Check, Verdict
from miles_hpc.plan.grid import ranks_per_node, rollout_gpus_per_node
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.rules import Rule
from miles_hpc.units import format_bytes

MULTI_NODE_ENGINE_NCCL = (2, 30, 7)
MEMORY_FOLDERS = ("/dev/shm", "/run", "/sys/fs")


def threads_per_bundle(spec: JobSpec) -> int:
    """Return the CPUs that one rank's bundle needs: its trainer rank and engine share them, as they never compute at once."""
    native = spec.engine.native
    if spec.cluster.device == "gpu" or native is None:
        return 1
    return max(native.threads_per_rank, native.threads_per_engine)


def _cpus(spec: JobSpec) -> Iterator[Verdict]:
    have, ranks, threads = (
        spec.cluster.cpus_per_node,
        ranks_per_node(spec),
        threads_per_bundle(spec),
    )
    if have is None or ranks * threads <= have:
        return
    yield Verdict(
        keys=(
            "cluster.cpus_per_node",
            "engine.native.threads_per_rank",
            "cluster.cpu_ranks_per_node",
        ),
        found=f"{ranks} ranks a node * {threads} CPUs each = {ranks * threads} CPUs, above cpus_per_node({have})",
        expected="every rank's bundle to find its CPUs, or the placement would wait for ever",
        fix=f"Set cluster.cpus_per_node = {ranks * threads}.",
    )


def _segment(spec: JobSpec) -> Iterator[Verdict]:
    segment, nodes = spec.cluster.segment, spec.cluster.num_nodes
    if segment is not None and segment > nodes:
        yield Verdict(
            keys=("cluster.segment", "cluster.num_nodes"),
            found=f"segment({segment}) above num_nodes({nodes})",
            expected="a segment no larger than the job",
            fix=f"Set cluster.segment = {nodes}, or remove it.",
        )


def _nccl_for_wide_engines(spec: JobSpec) -> Iterator[Verdict]:
    if spec.cluster.device == "cpu" or spec.rollout.gpus_per_engine <= max(
        1, rollout_gpus_per_node(spec)
    ):
        return
    version = tuple(int(part) for part in spec.nccl.version.split("."))
    wanted = ".".join(map(str, MULTI_NODE_ENGINE_NCCL))
    text = f"a rollout engine of {spec.rollout.gpus_per_engine} GPUs on nodes of {ranks_per_node(spec)}"
    if version < MULTI_NODE_ENGINE_NCCL:
        yield Verdict(
            keys=("nccl.version", "rollout.gpus_per_engine"),
            found=f"{text} with NCCL {spec.nccl.version}",
            expected=f"NCCL {wanted} or newer for engines that span nodes",
            fix=f'Set nccl.version = "{wanted}".',
        )
    if not spec.nccl.preload and spec.nccl.path is None:
        yield Verdict(
            keys=("nccl.preload", "rollout.gpus_per_engine"),
            found=f"{text} with nccl.preload = false",
            expected=f"the pinned NCCL {wanted} to be what the engine's processes load, not the copy beside torch",
            fix="Remove nccl.preload = false.",
        )


def _nvlink_domain(spec: JobSpec) -> Iterator[Verdict]:
    per_node, tp, segment = max(1, ranks_per_node(spec)), spec.parallel.tp, spec.cluster.segment
    nodes = -(-tp // per_node)
    if spec.cluster.device == "gpu" and nodes > 1 and (segment is None or segment % nodes):
        yield Verdict(
            keys=("cluster.segment", "parallel.tp", "cluster.gpus_per_node"),
            found=f"tp({tp}) over {nodes} nodes of {per_node} GPUs with segment = {segment or 'none'}",
            expected="the ranks of a tensor parallel group in one NVLink domain",
            fix=f"Set cluster.segment = {nodes} where Slurm knows the domains, or parallel.tp = {per_node}.",
            level="warning",
        )


def _scratch_disk(spec: JobSpec) -> Iterator[Verdict]:
    offload = spec.offload
    if not (offload.train == "disk" or offload.stream_optimizer) or spec.cluster.device == "cpu":
        return
    root = offload.scratch_root
    memory = next((top for top in MEMORY_FOLDERS if root and root.is_relative_to(top)), None)
    if memory is not None and not offload.allow_memory_scratch:
        yield Verdict(
            keys=("offload.scratch_root", "offload.train"),
            found=f"scratch_root {root}, below {memory}, with {format_bytes(offload.scratch_min_free)} to write",
            expected="a real disk of the node: what is written there stays in host memory",
            fix="Name a folder on the node's disk, or leave scratch_root to the site profile.",
        )
    if root is not None and root.is_relative_to(spec.job.run_root):
        yield Verdict(
            keys=("offload.scratch_root", "job.run_root"),
            found=f"scratch_root {root} below job.run_root {spec.job.run_root}",
            expected="a disk of the node; run_root is seen by every node, so that all of them would write"
            f" {format_bytes(offload.scratch_min_free)} each to one file system at every step",
            fix="Name a folder on the node's disk.",
        )
    if offload.allow_memory_scratch:
        yield Verdict(
            keys=("offload.allow_memory_scratch", "offload.train"),
            found="allow_memory_scratch = true with tensors on scratch",
            expected="scratch on a disk: on tmpfs, in a container's overlay kept in memory or on a network file system the"
            " memory is not freed or every step waits for the network",
            fix="Remove allow_memory_scratch; preflight then refuses such a scratch on every node.",
            level="warning",
        )


def _resumable(spec: JobSpec) -> Iterator[Verdict]:
    interval, steps = spec.checkpoint.save_interval, spec.train.num_steps
    attempts = spec.job.max_attempts
    if spec.job.resume == "auto" and attempts > 1 and steps > 1 and (interval or steps) >= steps:
        yield Verdict(
            keys=("checkpoint.save_interval", "job.resume"),
            found=f'save_interval = {interval or "(none)"} with num_steps({steps}), resume = "auto" and {attempts} attempts',
            expected="a checkpoint before the last step; an attempt after a failure starts from step 0 otherwise",
            fix=f"Set checkpoint.save_interval = {max(1, min(10, steps // 2))}.",
            level="warning",
        )


def _time_before_saving(spec: JobSpec) -> Iterator[Verdict]:
    lead_s, limit_s = spec.agent.save_before_limit, spec.job.time_limit
    if lead_s is not None and lead_s >= limit_s:
        yield Verdict(
            keys=("agent.save_before_limit", "job.time_limit"),
            found=f"save_before_limit({lead_s:g} s) with time_limit({limit_s:g} s)",
            expected="less than the time limit; the driver is asked to stop before its first step otherwise",
            fix="Leave save_before_limit out, or set a longer time_limit.",
        )


RESOURCE_CHECKS = (
    Check(
        Rule(
            id="MH261",
            fixed=True,
            title="CPUs for every rank",
            reason="Ray places one bundle for each rank; a bundle that asks more CPUs than its node has left is never placed,"
            " and the job would wait in silence.",
            arithmetic="ranks_per_node * max(threads_per_rank, threads_per_engine) <= cpus_per_node;"
            " one CPU a rank on GPU nodes",
            source="radixark/miles 31f1ca961 miles/ray/placement_group.py (bundles of GPU 1, CPU 1)",
        ),
        _cpus,
    ),
    Check(
        Rule(
            id="MH262",
            fixed=True,
            title="a segment inside the job",
            reason="Slurm keeps `segment` nodes together in one NVLink domain; it cannot keep more than the job has.",
            arithmetic="segment <= num_nodes",
            source="sbatch manual, --segment",
        ),
        _segment,
    ),
    Check(
        Rule(
            id="MH263",
            title="a fixed NCCL for engines that span nodes",
            reason="NCCL 2.28 hangs in collectives that are captured in CUDA graphs and cross nodes, which is what a rollout"
            " engine of more than one node does.",
            arithmetic="gpus_per_engine > gpus_per_node needs nccl.version >= 2.30.7, preloaded",
            source="radixark/miles docs/models/qwen/qwen3-8.md section 6.2",
        ),
        _nccl_for_wide_engines,
    ),
    Check(
        Rule(
            id="MH264",
            title="tensor parallel groups inside an NVLink domain",
            reason="Every layer waits for its tensor parallel group twice; over a network between nodes that is slower than the"
            " layer itself. Racks with NVLink between nodes keep a group fast if Slurm keeps its nodes together.",
            arithmetic="tp <= gpus_per_node, or segment % ceil(tp / gpus_per_node) = 0 (warning)",
            source="sbatch manual, --segment; Narayanan et al. 2021, arXiv:2104.04473, section 5.4",
        ),
        _nvlink_domain,
    ),
    Check(
        Rule(
            id="MH265",
            title="scratch on a disk of the node",
            reason="Disk offload frees host memory only if the file system keeps its bytes on a disk. /dev/shm, /run and a tmpfs"
            " are memory, an overlay may be, and a network file system carries every rank's weights twice a step. The plan"
            " sees the path; preflight asks every node what it really is.",
            source="radixark/miles docs (offload-train-disk-dir: not tmpfs); docs/how-to/offload-to-disk.md",
        ),
        _scratch_disk,
    ),
    Check(
        Rule(
            id="MH266",
            title="a checkpoint to resume from",
            reason="Without save_interval only the last step saves, and what the time limit does not announce (a lost node, a"
            " failed rank) loses the run.",
            arithmetic='save_interval < num_steps with resume = "auto" and max_attempts above 1 (warning)',
            source="radixark/miles pull request 2488 scripts/run_qwen3_8.py (saves nothing); docs/how-to/run-a-job.md",
        ),
        _resumable,
    ),
    Check(
        Rule(
            id="MH267",
            fixed=True,
            title="time to train before the time limit",
            reason="save_before_limit seconds before the end the driver saves and stops, and the job goes back to the queue; an"
            " attempt that is all lead trains nothing.",
            arithmetic="save_before_limit < time_limit",
            source="docs/design.md, save and stop",
        ),
        _time_before_saving,
    ),
)
