"""From a spec to a whole plan: the planner's parts and those of the engine that the spec names, put together.

Pure: reads no file and no clock. Writing a plan into a run folder is `launch.bundle`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from miles_hpc.engine import miles, native
from miles_hpc.engine.miles_flag_rules import FLAG_RULE_CHECKS
from miles_hpc.engine.miles_flags import FLAG_CHECKS
from miles_hpc.engine.miles_sharing_rules import SHARING_CHECKS
from miles_hpc.errors import PlanError
from miles_hpc.handoff import SaveTrigger
from miles_hpc.paths import RunDir
from miles_hpc.plan.engine_sizes import ENGINE_SIZE_CHECKS
from miles_hpc.plan.environ import make_environment
from miles_hpc.plan.expansion import expand_placement
from miles_hpc.plan.findings import Check, Finding, errors_of, locate, refuse, run_checks
from miles_hpc.plan.layout import LAYOUT_CHECKS, make_layout, make_rollout_layout
from miles_hpc.plan.memory import plan_memory
from miles_hpc.plan.memory_rules import MEMORY_RULES, memory_checks
from miles_hpc.plan.phases import MemoryPlan
from miles_hpc.plan.plan import EnvVar, Plan
from miles_hpc.plan.rules import CHECKS, nearest_fits
from miles_hpc.spec.checks import SPEC_RULES
from miles_hpc.spec.faults import SpecFault, refusal
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.rules import Rule

ENGINE_CHECKS: Mapping[str, tuple[Check, ...]] = {
    "native": native.NATIVE_CHECKS,
    "miles": (*miles.MILES_CHECKS, *FLAG_CHECKS, *FLAG_RULE_CHECKS, *SHARING_CHECKS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan that may have been refused.

    Attributes:
        plan: None when the layout itself is impossible, so that there is nothing to show.
        findings: errors and warnings, with the places in the spec's files.
        would_fit: changes after which no error is left, when there are errors.
    """

    plan: Plan | None
    findings: tuple[Finding, ...]
    would_fit: tuple[str, ...]

    def to_json(self, *, placement: bool = False) -> str:
        """Return the plan's JSON with `would_fit`; of an impossible layout, what the rules say alone.

        Args:
            placement: write out where every rank and engine is; the stored plan has the rule alone.
        """
        if self.plan is None:
            shown: dict[str, object] = {
                "layout": None,
                "findings": [asdict(f) for f in self.findings],
            }
        else:
            shown = asdict(self.plan)
            if placement:
                shown["placement"] = asdict(expand_placement(self.plan.layout, self.plan.rollout))
        return json.dumps({**shown, "would_fit": self.would_fit}, indent=2) + "\n"


def all_rules() -> tuple[Rule, ...]:
    """Return the rules of the spec, the planner and both engines, in order of their ids."""
    checks = (*CHECKS, *(check for engine in ENGINE_CHECKS.values() for check in engine))
    rules = (*SPEC_RULES, *MEMORY_RULES, *(check.rule for check in checks))
    return tuple(sorted(rules, key=lambda rule: rule.id))


def rule_level_text(rule: Rule) -> str:
    """Return what a spec may do about the level of `rule`, as its page says it."""
    if rule.has_fixed_level:
        return "fixed: what it guards cannot work"
    return f'as the message says; a spec may set rules.{rule.id} = {{level = ..., reason = "..."}}'


def refuse_levels(spec: JobSpec, position: Callable[[str], str | None]) -> None:
    """Refuse levels in [rules] of rules that do not exist or that keep theirs.

    Raises:
        SpecError: with every such entry, its file:line and the nearest id.
    """
    rules = {rule.id: rule for rule in all_rules()}
    faults = []
    for name in spec.rules:
        rule = rules.get(name)
        if rule is not None and not rule.has_fixed_level:
            continue
        label, _, line = (position(f"rules.{name}") or "spec").rpartition(":")
        near = min(rules, key=lambda other: abs(int(other[2:]) - int(name[2:])))
        faults.append(
            SpecFault(
                label=label or "spec",
                line=int(line) if line.isdigit() else 0,
                key=f"rules.{name}",
                found="a level for no rule"
                if rule is None
                else f"a level for {name} ({rule.title})",
                expected="the id of a rule"
                if rule is None
                else "a rule whose level can change; this one guards what cannot work",
                fix=f"the nearest is {near}" if rule is None else "remove it",
            )
        )
    if faults:
        raise refusal(faults)


def find(spec: JobSpec) -> tuple[Finding, ...]:
    """Return everything that the planner's and the engine's rules say about `spec`; memory only of a sound layout."""
    findings = run_checks((*CHECKS, *ENGINE_CHECKS[spec.job.engine]), spec)
    if errors_of(run_checks((*LAYOUT_CHECKS, *ENGINE_SIZE_CHECKS), spec)):
        return findings
    return (*findings, *run_checks(memory_checks(memory_of(spec)), spec))


def memory_of(spec: JobSpec) -> MemoryPlan:
    """Return the memory of every phase under the engine that the spec names, for a sound layout."""
    is_miles = spec.job.engine == "miles"
    return plan_memory(spec, miles.memory_traits(spec) if is_miles else native.memory_traits())


def draft_plan(
    spec: JobSpec,
    *,
    python: str,
    package_version: str,
    overrides: Sequence[str] = (),
    hashes: Mapping[str, str] | None = None,
    position: Callable[[str], str | None] = lambda _: None,
) -> Draft:
    """Return the plan of `spec` and everything the rules say about it; what they refuse does not raise.

    Args:
        spec: the validated spec.
        python: interpreter of the driver on the nodes, used when the spec names none.
        package_version: version of this package.
        overrides: the `--set` arguments as given.
        hashes: SHA-256 of each file in spec/, by name.
        position: gives the file:line of a key path, or None when no file has it.

    Raises:
        SpecError: if [rules] gives a level to a rule that does not exist or keeps its own.
    """
    if spec.rules:
        refuse_levels(spec, position)
    found = find(spec)
    findings = locate(found, position)
    would_fit = nearest_fits(spec, find) if errors_of(found) else ()
    if errors_of(run_checks((*LAYOUT_CHECKS, *ENGINE_SIZE_CHECKS), spec)):
        return Draft(plan=None, findings=findings, would_fit=would_fit)
    plan = Plan(
        name=spec.job.name,
        engine=spec.job.engine,
        layout=make_layout(spec),
        rollout=make_rollout_layout(spec),
        memory=memory_of(spec),
        environment=_environment(spec),
        driver_argv=_driver_argv(spec, python),
        overrides=tuple(overrides),
        spec=spec.model_dump(mode="json"),
        hashes=dict(hashes or {}),
        notes=(*_notes(spec), *_unused_levels(spec, findings)),
        findings=findings,
        package_version=package_version,
    )
    return Draft(plan=plan, findings=findings, would_fit=would_fit)


def compose_plan(
    spec: JobSpec,
    *,
    python: str,
    package_version: str,
    overrides: Sequence[str] = (),
    hashes: Mapping[str, str] | None = None,
    position: Callable[[str], str | None] = lambda _: None,
) -> Plan:
    """Return the plan of `spec`; the arguments are those of `draft_plan`.

    Raises:
        PlanError: with every rule that the spec breaks and the nearest changes that make it pass.
    """
    draft = draft_plan(
        spec,
        python=python,
        package_version=package_version,
        overrides=overrides,
        hashes=hashes,
        position=position,
    )
    return require_plan(draft)


def require_plan(draft: Draft) -> Plan:
    """Return the plan of `draft`.

    Raises:
        PlanError: with every rule that the spec breaks and the nearest changes that make it pass.
    """
    refuse(draft.findings, draft.would_fit)
    if draft.plan is None:  # an impossible layout always has an error among the findings
        raise PlanError(
            "plan: the layout is impossible, but no rule said why. Report the spec as a bug."
        )
    return draft.plan


def require_drivable(plan: Plan) -> None:
    """Raise PlanError when this version does not drive the plan's engine."""
    if plan.engine == "miles":
        raise PlanError(
            f"job.engine: found engine {plan.engine}, which this version can plan but not drive; expected one that it"
            ' drives. Set job.engine = "native", or use `miles-hpc plan` only.'
        )


def page_cache_roots(spec: JobSpec, run_dir: Path) -> tuple[str, ...]:
    """Return the files and folders whose page cache is dropped on every node once both sides have loaded them."""
    if not spec.offload.drop_page_cache:
        return ()
    model = spec.model
    if model.weights != "checkpoint":
        return (str(RunDir(run_dir).cache),)
    folders = (model.hf_checkpoint, model.megatron_checkpoint, model.rollout_checkpoint)
    return tuple(dict.fromkeys(str(folder) for folder in folders if folder is not None))


def save_trigger(spec: JobSpec) -> SaveTrigger | None:
    """Return how the driver of the spec's engine is asked to save and stop; None where it cannot be asked."""
    return miles.save_trigger(spec) if spec.job.engine == "miles" else native.SAVE_TRIGGER


def _driver_argv(spec: JobSpec, python: str) -> tuple[str, ...]:
    interpreter = str(spec.cluster.python or python)
    if spec.job.engine == "miles":
        return miles.driver_argv(spec, interpreter)
    return native.driver_argv(interpreter)


def _environment(spec: JobSpec) -> tuple[EnvVar, ...]:
    ours = make_environment(spec)
    if spec.job.engine != "miles":
        return ours
    users = tuple(variable for variable in ours if variable.source == "spec")
    return (*ours[: len(ours) - len(users)], *miles.make_environment(spec), *users)


def _unused_levels(spec: JobSpec, findings: Sequence[Finding]) -> tuple[str, ...]:
    unused = spec.rules.keys() - {finding.id for finding in findings}
    return tuple(
        f"rules.{name} changes nothing: the rule finds nothing here." for name in sorted(unused)
    )


def _notes(spec: JobSpec) -> tuple[str, ...]:
    limits = {"cluster.node_memory": spec.cluster.node_memory or spec.cluster.memory_per_node}
    if spec.cluster.device == "gpu":
        limits["cluster.gpu_memory"] = spec.cluster.gpu_memory
    unknown = [key for key, size in limits.items() if size is None]
    notes = (f"Memory is planned but not judged: set {' and '.join(unknown)}.",) if unknown else ()
    return (*notes, miles.NOTE) if spec.job.engine == "miles" else notes
