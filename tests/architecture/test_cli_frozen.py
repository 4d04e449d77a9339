"""The command line is a contract: its verbs, arguments and flags equal this set, so that none appears by accident.

docs/reference/cli.md is generated from the command line itself: `pytest tests/architecture --update-golden`.
"""

from enum import Enum

import typer.main

from miles_hpc.cli import app
from tests.architecture.sources import ROOT

SPEC = ["SPEC", "--site", "--set"]
COMMANDS = {
    "check": [*SPEC, "--cluster"],
    "plan": [*SPEC, "--cluster", "--json", "--placement", "--html"],
    "submit": [*SPEC, "--cluster", "--wait/--no-wait", "--json"],
    "render": [*SPEC, "-o/--output", "--json"],
    "doctor": [*SPEC, "--cluster", "--nodes", "--json"],
    "status": ["RUN", "--json"],
    "report": ["RUN", "--json"],
    "logs": ["RUN", "-f/--follow", "--node"],
    "attach": ["RUN", "--open"],
    "resume": ["RUN", "--set", "--json"],
    "cancel": ["RUN", "--save", "--json"],
    "explain": ["RULE"],
    "jobs": ["--json"],
    "init": ["RECIPE", "--site", "-o/--output", "--force"],
}
PAGE = ROOT / "docs" / "reference" / "cli.md"
INTRODUCTION = """\
# Command line

Generated from the commands themselves. Every command ends with 0 or a code of [errors](../errors.md); `submit --wait` ends with the
job's own. `python -m miles_hpc` is the same command where the `miles-hpc` script is not on PATH.

`--json` prints one JSON object on stdout. `submit` and `render` print the run folder alone on stdout; all else goes to stderr.
"""


def spelled(parameter) -> str:
    if parameter.param_type_name == "argument":
        return parameter.metavar or parameter.name.upper()
    return "/".join(sorted([*parameter.opts, *parameter.secondary_opts], key=len))


def commands():
    return typer.main.get_command(app).commands


def command_section(name: str, command) -> str:
    lines = [f"## {name}", "", command.help, "", "| | |", "|---|---|"]
    for parameter in command.params:
        value = "" if parameter.param_type_name == "argument" else metavar_of(parameter)
        words = ", ".join(f"`{word}{value}`" for word in spelled(parameter).split("/"))
        lines.append(f"| {words} | {parameter.help} |")
    return "\n".join(lines) + "\n"


def metavar_of(parameter) -> str:
    if parameter.is_flag:
        return ""
    if isinstance(parameter.default, Enum):
        return " " + "\\|".join(choice.value for choice in type(parameter.default))
    return f" {parameter.metavar or parameter.name.upper()}"


def test_verbs_and_flags_equal_the_frozen_set():
    actual = {
        name: sorted(spelled(parameter) for parameter in command.params)
        for name, command in commands().items()
    }
    assert actual == {name: sorted(flags) for name, flags in COMMANDS.items()}


def test_every_command_and_flag_is_explained():
    for name, command in commands().items():
        assert command.help, name
        for parameter in command.params:
            assert parameter.help, f"{name} {spelled(parameter)}"


def test_the_reference_page_is_fresh(update_golden):
    sections = [command_section(name, command) for name, command in commands().items()]
    page = "\n".join([INTRODUCTION, *sections])
    if update_golden:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.is_file(), "run pytest tests/architecture --update-golden"
    assert PAGE.read_text(encoding="utf-8") == page
