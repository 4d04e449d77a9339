"""A new spec made from a recipe: `miles-hpc init` writes the few keys that are the user's own and extends the rest.

Knows no rule: the new spec is loaded and planned like any other before it gets its name.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from miles_hpc.engine.compose import compose_plan
from miles_hpc.errors import SpecError, SubmitError
from miles_hpc.launch.catalogue import recipe_path, recipe_paths
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.load import load_spec

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def ask_recipe() -> str:
    """Return the recipe that the person at the terminal chooses.

    Raises:
        SpecError: when there is no terminal, or the answer is no recipe.
    """
    if sys.stdin.isatty():
        return choose_recipe(sys.stderr, sys.stdin)
    return recipe_path("").stem  # which is none: the message says what to do


def choose_recipe(asked: TextIO, answers: TextIO) -> str:
    """Ask for a recipe by its number or name, and return its name.

    Raises:
        SpecError: when the answer is neither, or there is none.
    """
    names = [path.stem for path in recipe_paths()]
    for number, name in enumerate(names, start=1):
        print(f"{number:>3}  {name}", file=asked)
    print("Recipe, by number or name: ", end="", flush=True, file=asked)
    answer = answers.readline().strip()
    if answer.isascii() and answer.isdigit() and 1 <= int(answer) <= len(names):
        return names[int(answer) - 1]
    return recipe_path(answer).stem


def write_new_spec(recipe: str, output: Path, *, site: str | None, replace: bool) -> None:
    """Write a spec to `output` that extends `recipe`, once it is known to check clean.

    Args:
        recipe: name of a recipe.
        output: the file to write.
        site: profile that it is checked with, and that its first lines name.
        replace: overwrite `output` when it exists.

    Raises:
        SpecError: when there is no such recipe, or the file exists.
        PlanError: when the recipe cannot run, or not on that site.
        SubmitError: when the file cannot be written.
    """
    source = recipe_path(recipe)
    if not replace and os.path.lexists(output):
        raise SpecError(
            f"{output}: found a file; expected a name that is free. Choose another, or add --force"
        )
    text = _new_text(recipe, output, site, load_spec(source).spec)
    draft = output.with_name(f".{output.name}.{os.getpid()}.toml")
    try:
        draft.write_text(text, encoding="utf-8")
        loaded = load_spec(draft, site=site)
        compose_plan(loaded.spec, python=sys.executable, package_version="")
        if replace:
            draft.replace(output)
        else:
            os.link(draft, output)  # fails, unlike a rename, when someone made the file meanwhile
    except OSError as error:
        raise SubmitError(
            f"{output}: found {error.strerror}; expected a file that can be written. Choose another folder"
        ) from error
    finally:
        draft.unlink(missing_ok=True)


def _new_text(recipe: str, output: Path, site: str | None, spec: JobSpec) -> str:
    stem = output.name.removesuffix(".toml")
    name = stem if _JOB_NAME.fullmatch(stem) else spec.job.name
    with_site = f" --site {site}" if site else ""
    lines = [
        f"# Made from the recipe {recipe}, which has every key that is not here.",
        "#",
        f"# miles-hpc plan {output.name}{with_site}",
        f"# miles-hpc submit {output.name}{with_site}",
        "",
        f'extends = "recipe:{recipe}"',
        "",
        "[job]",
        f'name = "{name}"',
        "",
        "# What is most often changed, with the recipe's values:",
    ]
    return "\n".join([*lines, *_own_keys(spec)]) + "\n"


def _own_keys(spec: JobSpec) -> Sequence[str]:
    tables = {
        "cluster": ("num_nodes",),
        "model": ("hf_checkpoint", "megatron_checkpoint", "rollout_checkpoint"),
        "data": ("path",),
        "train": ("num_steps", "learning_rate"),
    }
    values = spec.model_dump(mode="json")
    return [
        f"# {table}.{key} = {_toml(values[table][key])}"
        for table, keys in tables.items()
        for key in keys
        if values[table][key] is not None
    ]


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
