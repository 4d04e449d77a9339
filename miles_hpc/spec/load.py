"""Loads a job spec: the file, what it extends, the site profile and `--set`, as one frozen `JobSpec`.

All faults of all files are reported at once, each with the file and line that wrote the value. Knows how layers overlay
and which paths are relative to what; the tables are in `spec.job`, the rules in `spec.rules`.

Precedence, lowest first: site profile, extended files in order, the spec, `--set`. Tables merge key by key; any other
value replaces the one below it.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from pydantic import ValidationError

from miles_hpc.errors import SpecError
from miles_hpc.paths import packaged
from miles_hpc.spec.checks import check_rules
from miles_hpc.spec.faults import SpecFault, explain_errors, format_key, format_value, refusal
from miles_hpc.spec.job import RESERVED_TABLES, JobSpec
from miles_hpc.spec.rules import Settings
from miles_hpc.spec.scan import KeyPath
from miles_hpc.spec.schema import spec_keys
from miles_hpc.spec.source import Kind, Layer, Sources, read_chain, read_overrides
from miles_hpc.spec.unfit import unfit_values

SITES_VARIABLE = "MILES_HPC_SITES"
SITE_KEYS = frozenset({"cluster", "network", "offload", "nccl", "env", "agent", "engine"})
SITE_JOB_KEYS = frozenset({"run_root", "comment"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSpec:
    """A spec and where it came from.

    Attributes:
        files: bytes of every file that was read, by its name in the run folder's spec/.
        overrides: the `--set` arguments, as given.
        positions: "file:line" of each key that was written, by its path as in TOML.
    """

    spec: JobSpec
    path: Path
    files: Mapping[str, bytes]
    overrides: tuple[str, ...]
    positions: Mapping[str, str]

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of each file, by its name in spec/."""
        return {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}

    def position(self, key: str) -> str | None:
        """Return "file:line" of the key path or of the nearest table above it; None when nothing wrote it."""
        while key:
            if key in self.positions:
                return self.positions[key]
            key = key.rpartition(".")[0]
        return None


@dataclass(frozen=True, slots=True)
class _Origin:
    label: str
    line: int
    kind: Kind


def load_spec(
    path: Path, *, site: str | None = None, overrides: Sequence[str] = (), local: bool = False
) -> LoadedSpec:
    """Read, complete and validate the spec at `path`.

    Args:
        path: the spec's TOML file.
        site: name of a site profile (in $MILES_HPC_SITES, then the packaged ones), or a path to one.
        overrides: "key.path=value" texts.
        local: the job is for the local cluster, where Slurm's keys have no effect.

    Raises:
        SpecError: with every fault, one a line, sorted by file and line.
    """
    _require_current_folder()
    sources = Sources()
    if site is not None:
        _read_site(sources, site)
    read_chain(sources, path, "file")
    read_overrides(sources, overrides)
    merged = _Merged(sources)
    merged.set_default_run_root()
    merged.remove_unfit_values()
    merged.remove_reserved_tables()
    if sources.complete:
        merged.apply_rules(local=local)
    spec = merged.validate()
    if spec is None or sources.faults:
        raise refusal(sources.faults)
    return LoadedSpec(
        spec=spec,
        path=path,
        files=sources.files,
        overrides=tuple(overrides),
        positions={
            format_key(key): f"{origin.label}:{origin.line}"
            for key, origin in merged.origins.items()
        },
    )


def load_planned(
    values: Mapping[str, object], label: str, overrides: Sequence[str] = ()
) -> JobSpec:
    """Return the spec whose JSON `values` stand in a plan, with `overrides` laid over it.

    Rules of what has an effect were checked when the plan was made; its values name every default.

    Raises:
        SpecError: with every fault, one a line.
    """
    _require_current_folder()
    sources = Sources()
    sources.layers.append(
        Layer(label=label, kind="file", folder=Path.cwd(), values=dict(values), lines={})
    )
    read_overrides(sources, overrides)
    merged = _Merged(sources)
    merged.remove_unfit_values()
    spec = merged.validate()
    if spec is None or sources.faults:
        raise refusal(sources.faults)
    return spec


def _require_current_folder() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise SpecError(
            f"current folder: found {error.strerror}; expected a folder that exists, since relative paths are taken "
            "from it. Change to one"
        ) from error


def site_folders() -> tuple[Path, ...]:
    """Return the folders that hold site profiles: those of $MILES_HPC_SITES (colon-separated), then the packaged one."""
    named = os.environ.get(SITES_VARIABLE, "").split(os.pathsep)
    return (*(Path(folder) for folder in named if folder), packaged("env") / "sites")


def _read_site(sources: Sources, site: str) -> None:
    if "/" in site or site.endswith(".toml"):
        read_chain(sources, Path(os.path.expanduser(site)), "site")  # noqa: PTH111 - never raises
        return
    for folder in site_folders():
        if os.path.exists(folder / f"{site}.toml"):  # noqa: PTH110 - never raises
            read_chain(sources, folder / f"{site}.toml", "site")
            return
    names = sorted({entry.stem for folder in site_folders() for entry in folder.glob("*.toml")})
    close = get_close_matches(site, names, n=1)
    sources.unreadable(
        SpecFault(
            label="--site",
            line=0,
            key="",
            found=format_value(site),
            expected=f"a path, or one of: {', '.join(names) or 'none'} "
            f"(in {', '.join(str(folder) for folder in site_folders())})",
            fix=f'nearest site "{close[0]}"' if close else "",
        )
    )


class _Merged:
    """The layers overlaid: the values, where each was written, and the steps that make a spec of them."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.values: dict[str, object] = {}
        self.origins: dict[KeyPath, _Origin] = {}
        self.removed: set[KeyPath] = set()
        for layer in sources.layers:
            if layer.kind == "site":
                self.refuse_foreign_site_keys(layer)
            self.resolve_paths(layer)
            self.overlay(self.values, layer.values, (), layer)

    def overlay(
        self, below: dict[str, object], above: Mapping[str, object], prefix: KeyPath, layer: Layer
    ) -> None:
        for name, value in above.items():
            path = (*prefix, name)
            old = below.get(name)
            if isinstance(old, dict) and isinstance(value, dict):
                # What is missing in a table is told where a spec file opens it.
                if layer.kind == "file":
                    self.origins[path] = _Origin(layer.label, layer.lines.get(path, 1), layer.kind)
                self.overlay(old, value, path, layer)
                continue
            if old is not None:
                self.forget(path, old)
            below[name] = _copy(value)
            self.note(path, value, layer)

    def note(self, path: KeyPath, value: object, layer: Layer) -> None:
        """Remember that `layer` wrote `value` at `path`, and everything in it."""
        self.origins[path] = _Origin(layer.label, layer.lines.get(path, 1), layer.kind)
        for part, child in _children(value):
            self.note((*path, part), child, layer)

    def forget(self, path: KeyPath, value: object) -> None:
        """Forget who wrote `value` at `path`, and everything in it."""
        self.origins.pop(path, None)
        for part, child in _children(value):
            self.forget((*path, part), child)

    def origin(self, path: KeyPath) -> _Origin:
        """Return where `path`, or the nearest thing above it, was written; the spec's first line when nowhere."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        files = [layer.label for layer in self.sources.layers if layer.kind == "file"]
        return _Origin(files[-1] if files else "spec", 1, "file")

    def add_fault(self, path: KeyPath, found: str, expected: str, fix: str = "") -> None:
        origin = self.origin(path)
        self.sources.faults.append(
            SpecFault(
                label=origin.label,
                line=origin.line,
                key=format_key(path),
                found=found,
                expected=expected,
                fix=fix,
            )
        )

    def refuse_foreign_site_keys(self, layer: Layer) -> None:
        """Refuse keys in a site profile that are the experiment's, not the cluster's."""
        job = layer.values.get("job", {})
        foreign: list[KeyPath] = [
            (name,) for name in layer.values if name not in SITE_KEYS and name != "job"
        ]
        if isinstance(job, dict):
            foreign += [("job", name) for name in job if name not in SITE_JOB_KEYS]
        for path in foreign:
            self.sources.faults.append(
                SpecFault(
                    label=layer.label,
                    line=layer.lines.get(path, 1),
                    key=format_key(path),
                    found="a key of the experiment in a site profile",
                    expected=f"only {', '.join(sorted(SITE_KEYS))}, "
                    f"{', '.join(f'job.{key}' for key in sorted(SITE_JOB_KEYS))}",
                    fix="move it to the spec",
                )
            )
            if len(path) == 1:
                del layer.values[str(path[0])]
            elif isinstance(job, dict):
                del job[path[1]]

    def resolve_paths(self, layer: Layer) -> None:
        """Make the layer's paths absolute: `~`, and relative ones by what the field says they are relative to."""
        for key in spec_keys().values():
            holder: object = layer.values
            for part in key.path[:-1]:
                holder = holder.get(part) if isinstance(holder, dict) else None
            name = key.path[-1]
            text = holder.get(name) if isinstance(holder, dict) else None
            if key.base is None or not isinstance(text, str) or not text.strip():
                continue
            try:
                resolved = Path(text).expanduser()
            except RuntimeError:
                self.sources.faults.append(
                    SpecFault(
                        label=layer.label,
                        line=layer.lines.get(key.path, 1),
                        key=format_key(key.path),
                        found=format_value(text),
                        expected="a home folder that exists",
                    )
                )
                continue
            if key.base != "node":
                folder = layer.folder if key.base == "file" else Path.cwd()
                resolved = folder / resolved
            if isinstance(holder, dict):
                holder[name] = str(resolved)

    def set_default_run_root(self) -> None:
        job = self.values.get("job")
        if isinstance(job, dict):
            job.setdefault(
                "run_root", str(Path.cwd() / str(spec_keys()["job", "run_root"].default))
            )

    def remove(self, path: KeyPath) -> None:
        holder: object = self.values
        for part in path[:-1]:
            holder = holder.get(part) if isinstance(holder, dict) else None
        if isinstance(holder, dict):
            self.forget(path, holder.pop(path[-1]))

    def remove_reserved_tables(self) -> None:
        for name in RESERVED_TABLES:
            if name in self.values:
                self.add_fault(
                    (name,),
                    f"the table [{name}]",
                    "a table of this version; this name is kept for a later one",
                    "remove it",
                )
                self.remove((name,))

    def remove_unfit_values(self) -> None:
        """Tell and take out what JSON cannot carry or no field wants: dates, non-finite and huge numbers, NUL."""
        for path, found in unfit_values(self.values, ()):
            self.add_fault(
                path, found, "a text, a finite number, true or false, an array or a table"
            )
            top = next((i for i, part in enumerate(path) if isinstance(part, int)), len(path))
            if path[:top] not in self.removed:
                self.remove(path[:top])
                self.removed.add(path[:top])

    def apply_rules(self, *, local: bool) -> None:
        """Check the spec's own rules; what a site profile sets without effect is dropped instead of refused."""
        settings = Settings(
            self.values,
            overridden=frozenset(
                key for key, origin in self.origins.items() if origin.kind == "override"
            ),
            local=local,
        )
        for violation in check_rules(settings):
            if violation.inert and self.origin(violation.path).kind == "site":
                self.remove(violation.path)
                continue
            self.add_fault(
                violation.path,
                violation.found,
                violation.expected,
                "; ".join(part for part in (violation.fix, violation.rule.id) if part),
            )

    def validate(self) -> JobSpec | None:
        """Return the spec, or None after noting every fault that pydantic finds."""
        try:
            return JobSpec.model_validate_json(json.dumps(self.values))
        except ValidationError as error:
            errors = error.errors(include_url=False)
        for fault in explain_errors(errors, self.values):
            if fault.is_missing and (not self.sources.complete or fault.path in self.removed):
                continue
            self.add_fault(fault.path, fault.found, fault.expected, fault.fix)
        return None


def _children(value: object) -> Iterable[tuple[str | int, object]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def _copy(value: object) -> object:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
