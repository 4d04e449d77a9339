"""The command `miles-hpc`: every command is a few lines that call below.

Imports inside the commands, so that `import miles_hpc.cli` and `--help` stay quick on a login node. Knows no rule, no
Slurm option and no file of a run folder.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from miles_hpc import __version__, run_commands
from miles_hpc.errors import MilesHpcError
from miles_hpc.launch.options import (
    AsJson,
    Cluster,
    DoctorSpec,
    Nodes,
    OnCluster,
    Overrides,
    RunPath,
    SaveFirst,
    Site,
    SpecPath,
)
from miles_hpc.launch.terminal import printable, status_text

if TYPE_CHECKING:
    from miles_hpc.engine.compose import Draft
    from miles_hpc.plan.plan import Plan
    from miles_hpc.run.report import Status
    from miles_hpc.spec.load import LoadedSpec

_DETACHED_EXIT_CODE = 130


app = typer.Typer(
    name="miles-hpc",
    help="Take one TOML job spec through a Slurm cluster to a post-trained model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def check(
    spec: SpecPath,
    site: Site = None,
    overrides: Overrides = None,
    cluster: OnCluster = Cluster.SLURM,
) -> None:
    """Check a spec: all faults at once, each with its place, the rule and what to do."""
    loaded = _load(spec, site, overrides, cluster)
    plan = _plan(loaded)
    _warn(plan)
    layout = plan.layout
    print(
        f"{spec}: ok: {layout.world_size} ranks on {layout.num_nodes} nodes, "
        f"{plan.rollout.num_engines} rollout engines"
    )


@app.command()
def plan(
    spec: SpecPath,
    site: Site = None,
    overrides: Overrides = None,
    cluster: OnCluster = Cluster.SLURM,
    as_json: AsJson = False,
    placement: Annotated[
        bool,
        typer.Option(
            "--placement", help="Also list the node and GPU of every rank and rollout engine."
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the plan as one page with figures."),
    ] = None,
) -> None:
    """Show what would run: layout, memory by phase, environment with its reasons, and the driver's command."""
    from miles_hpc.launch.describe import describe_plan, write_page
    from miles_hpc.plan.findings import refuse

    draft = _draft(_load(spec, site, overrides, cluster))
    if as_json:
        print(draft.to_json(placement=placement), end="")
    elif draft.plan is not None:
        print(describe_plan(draft.plan, placement=placement), end="")
    if html is not None and draft.plan is not None:
        write_page(draft.plan, draft.would_fit, html)
    refuse(draft.findings, draft.would_fit)


@app.command()
def submit(
    spec: SpecPath,
    site: Site = None,
    overrides: Overrides = None,
    cluster: OnCluster = Cluster.SLURM,
    wait: Annotated[
        bool | None,
        typer.Option(
            "--wait/--no-wait",
            help="Show progress and return the job's exit code. Default: only with --cluster local on a terminal.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job and print its run folder."""
    from miles_hpc.engine.compose import require_drivable
    from miles_hpc.launch.bundle import write_run_folder
    from miles_hpc.launch.submit import submit_run

    loaded = _load(spec, site, overrides, cluster)
    planned = _plan(loaded)
    require_drivable(planned)
    _warn(planned)
    run, handoff = write_run_folder(loaded, planned, cluster=cluster.value)
    job_id = submit_run(loaded.spec, run, handoff)
    _print_submission(run.root, job_id, cluster, as_json=as_json)
    if wait is None:
        wait = cluster is Cluster.LOCAL and sys.stderr.isatty()
    if wait:
        _wait(run.root)


@app.command()
def render(
    spec: SpecPath,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="New or empty folder to write; left out, one below job.run_root.",
        ),
    ] = None,
    site: Site = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Write the run folder without submitting; start it with `sbatch DIR/job.sbatch`."""
    from miles_hpc.launch.bundle import write_run_folder

    loaded = _load(spec, site, overrides, Cluster.SLURM)
    planned = _plan(loaded)
    _warn(planned)
    run, _ = write_run_folder(loaded, planned, cluster="slurm", output=output)
    _print_submission(run.root, None, Cluster.SLURM, as_json=as_json)


@app.command()
def doctor(
    spec: DoctorSpec = None,
    site: Site = None,
    overrides: Overrides = None,
    cluster: OnCluster = Cluster.SLURM,
    nodes: Nodes = None,
    as_json: AsJson = False,
) -> None:
    """Check nodes as a job would before its start, and print what each check found and how to mend it."""
    from miles_hpc.launch.doctor import load_doctor_spec, run_doctor

    local = cluster is Cluster.LOCAL
    loaded = load_doctor_spec(spec, site=site, overrides=overrides, num_nodes=nodes, local=local)
    done = run_doctor(loaded, cluster.value, sys.stderr)
    print(done.text(as_json=as_json))
    sys.exit(done.exit_code)


@app.command()
def status(run: RunPath, as_json: AsJson = False) -> None:
    """Say what has become of a run."""
    from miles_hpc.launch.queue import open_run
    from miles_hpc.launch.queue import status as ask_status

    _print_status(ask_status(open_run(run)), as_json=as_json)


@app.command()
def report(run: RunPath, as_json: AsJson = False) -> None:
    """Show the memory that was planned against what the nodes measured, by phase; also of a running job."""
    from miles_hpc.launch.queue import open_run
    from miles_hpc.run.memory_lines import memory_report_lines
    from miles_hpc.run.memory_report import report_memory

    found = report_memory(open_run(run))
    if as_json:
        print(found.to_json())
        return
    for line in memory_report_lines(found):
        print(printable(line))


@app.command()
def logs(
    run: RunPath,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the run has ended.")
    ] = False,
    node: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="This node's own log instead of the driver's."),
    ] = None,
) -> None:
    """Print the driver's log, or one node's, of all attempts."""
    from miles_hpc.launch.queue import EndWatch, open_run
    from miles_hpc.run.logs import follow_logs, read_logs

    folder = open_run(run)
    lines = (
        follow_logs(folder, node=node, has_ended=EndWatch(folder))
        if follow
        else read_logs(folder, node=node)
    )
    try:
        for line in lines:
            print(line, flush=follow)
    except KeyboardInterrupt:
        sys.exit(_DETACHED_EXIT_CODE)


@app.command()
def attach(
    run: RunPath,
    open_it: Annotated[
        bool, typer.Option("--open", help="Open the tunnel instead of printing its command.")
    ] = False,
) -> None:
    """Print the ssh command that tunnels to the dashboard on the head node (`agent.dashboard = true`)."""
    from miles_hpc.launch.attach import find_tunnel, open_tunnel
    from miles_hpc.launch.queue import open_run

    tunnel = find_tunnel(open_run(run))
    print(f"dashboard: {tunnel.url}\ntoken: the text in {tunnel.token}", file=sys.stderr)
    if open_it:
        open_tunnel(tunnel)
    elif tunnel.argv:
        print(tunnel.command)


@app.command()
def cancel(run: RunPath, save: SaveFirst = False, as_json: AsJson = False) -> None:
    """End a run's job; its nodes clean up first."""
    from miles_hpc.launch.queue import cancel as end_job
    from miles_hpc.launch.queue import open_run

    _print_status(end_job(open_run(run), save=save), as_json=as_json)


app.command()(run_commands.resume)


@app.command()
def explain(
    rule: Annotated[str, typer.Argument(metavar="RULE", help="Id of a rule, such as MH203.")],
) -> None:
    """Print why a rule exists, its arithmetic and its source."""
    from miles_hpc.launch.describe import explain_rule

    print(explain_rule(rule))


@app.command()
def jobs(as_json: AsJson = False) -> None:
    """List the recipes that come with the package: model, nodes, and what the largest phase needs."""
    from miles_hpc.launch.catalogue import list_recipes

    print(list_recipes(as_json=as_json))


@app.command()
def init(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Spec to write; a new file.")
    ],
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="Recipe by name; left out, a terminal is asked."),
    ] = None,
    site: Site = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
) -> None:
    """Write a small spec that extends a recipe and checks clean."""
    from miles_hpc.launch.new_spec import ask_recipe, write_new_spec

    write_new_spec(recipe or ask_recipe(), output, site=site, replace=force)
    print(output)


def _load(
    spec: Path, site: str | None, overrides: list[str] | None, cluster: Cluster
) -> "LoadedSpec":
    from miles_hpc.spec.load import load_spec

    return load_spec(
        spec, site=site, overrides=tuple(overrides or ()), local=cluster is Cluster.LOCAL
    )


def _draft(loaded: "LoadedSpec") -> "Draft":
    from miles_hpc.engine.compose import draft_plan

    return draft_plan(
        loaded.spec,
        python=sys.executable,
        package_version=__version__,
        overrides=loaded.overrides,
        hashes=loaded.hashes,
        position=loaded.position,
    )


def _plan(loaded: "LoadedSpec") -> "Plan":
    from miles_hpc.engine.compose import require_plan

    return require_plan(_draft(loaded))


def _warn(planned: "Plan") -> None:
    for finding in planned.findings:
        print(f"warning: {finding}", file=sys.stderr)
    for note in planned.notes:
        print(f"note: {note}", file=sys.stderr)


def _print_submission(
    run_dir: Path, job_id: str | None, cluster: Cluster, *, as_json: bool
) -> None:
    if as_json:
        print(json.dumps({"run_dir": str(run_dir), "job_id": job_id, "cluster": cluster.value}))
    else:
        print(run_dir)
    sys.stdout.flush()
    if job_id is not None:
        print(f"job {job_id} on {cluster.value}", file=sys.stderr)


def _print_status(now: "Status", *, as_json: bool) -> None:
    print(now.to_json() if as_json else status_text(now))


def _wait(run_dir: Path) -> NoReturn:
    from miles_hpc.launch.progress import wait_for_exit_code
    from miles_hpc.launch.queue import open_run

    sys.exit(wait_for_exit_code(open_run(run_dir), sys.stderr))


def main() -> None:
    """Run the command line; a MilesHpcError becomes one message and its exit code."""
    # A path may hold bytes that are no UTF-8; print them as they are.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        app()
    except MilesHpcError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
