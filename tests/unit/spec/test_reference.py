"""The reference page and the JSON Schema are generated, complete and fresh."""

import json
from pathlib import Path

import jsonschema
import pytest
import tomli

from miles_hpc.paths import packaged
from miles_hpc.spec.load import load_spec
from miles_hpc.spec.reference import (
    DEFAULT_FOLDER,
    exact_size,
    main,
    render_page,
    render_schema,
    stale_files,
)
from miles_hpc.spec.schema import describe, spec_keys
from tests.unit.spec.written import MILES, NATIVE, write


def test_the_files_in_docs_are_fresh():
    assert list(stale_files(DEFAULT_FOLDER)) == []


def test_a_stale_or_missing_file_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["--check", "--output", str(tmp_path)]) == 1
    assert "job-spec.md: found text that differs" in capsys.readouterr().err
    assert main(["--output", str(tmp_path)]) == 0
    assert main(["--check", "--output", str(tmp_path)]) == 0
    page = tmp_path / "job-spec.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert main(["--check", "--output", str(tmp_path)]) == 1


def test_every_key_is_documented_and_on_the_page():
    page = render_page()
    for key in spec_keys().values():
        text = describe(key)
        assert len(text) > 10 or key.table is not None, key.path
        if key.table is None and len(key.path) > 1:
            assert f"| `{key.path[-1]}` |" in page
        assert key.table is None or f"## [{'.'.join(key.path)}]" in page


def test_defaults_are_shown_as_they_are_written():
    page = render_page()
    assert '| `chunk` | size above 0 | `"64MiB"` |' in page
    assert '| `ready_deadline` | duration above 0 | `"300s"` |' in page
    assert exact_size(2**30 + 1) == f"{2**30 + 1}B"


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(render_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


FILES = [*packaged("jobs").glob("*.toml"), *(packaged("env") / "sites").glob("*.toml")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_schema_accepts_every_packaged_file(
    path: Path, validator: jsonschema.Draft202012Validator
):
    values = tomli.loads(path.read_text(encoding="utf-8"))
    assert [error.message for error in validator.iter_errors(values)] == []


@pytest.mark.parametrize(
    "change",
    [
        "num_steps = 4 -> num_step = 4",
        "num_steps = 4 -> num_steps = 'x'",
        '"10min" -> 30',
        '"native" -> "nativ"',
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(
    change: str, validator: jsonschema.Draft202012Validator
):
    old, new = change.split(" -> ")
    assert old in NATIVE
    assert list(validator.iter_errors(tomli.loads(NATIVE.replace(old, new)))) != []
    assert list(validator.iter_errors(tomli.loads(NATIVE))) == []


def test_every_default_on_the_page_is_accepted_when_written(tmp_path: Path):
    from miles_hpc.spec.reference import default_value

    text = "\n".join(
        f"{'.'.join(key.path)} = {json.dumps(default_value(key))}"
        for key in spec_keys().values()
        if key.path[0] in ("agent", "checkpoint", "offload", "parallel", "nccl")
        and key.table is None
        and default_value(key) is not None
    )
    spec = load_spec(write(tmp_path, "a.toml", text + "\n" + MILES)).spec
    assert spec == load_spec(write(tmp_path, "b.toml", MILES)).spec
