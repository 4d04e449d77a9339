"""The arguments and options of the command line that have a meaning of their own: what they are called and what they say.

Knows no command.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Cluster(StrEnum):
    """Where a job runs."""

    SLURM = "slurm"
    LOCAL = "local"


SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="Job spec, a TOML file.")]
RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run folder, as submit and render print it.")
]
Site = Annotated[
    str | None,
    typer.Option(help="Site profile: a name, or the path of a TOML file.", metavar="NAME"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Override one key of the spec; may be repeated.", metavar="KEY=VALUE"
    ),
]
OnCluster = Annotated[
    Cluster, typer.Option(help="Where the job runs: on Slurm, or on this machine.")
]
DoctorSpec = Annotated[
    Path | None,
    typer.Argument(metavar="SPEC", help="Check its nodes, model and data; left out, the site's."),
]
Nodes = Annotated[int | None, typer.Option(metavar="N", help="This many nodes, not the spec's.")]
SaveFirst = Annotated[bool, typer.Option("--save", help="Let a running driver save first.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
