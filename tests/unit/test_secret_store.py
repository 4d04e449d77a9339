"""Secrets: who may read their file, what a line means, and that values stay out of messages and text."""

import json
import os
from pathlib import Path

import pytest

from miles_hpc.handoff import SecretSource
from miles_hpc.secret_store import Redaction, parse_lines, read_secrets, state_folder, store_secrets

CANARY = "canary-5e1c $(id) 'a' \"b\", %j"


def source_of(path: Path, *names: str, is_stored: bool = False) -> SecretSource:
    return SecretSource(names=names, path=str(path), is_stored=is_stored)


def private(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_value_is_the_rest_of_its_line_and_is_never_evaluated():
    text = f"# a note=1\n\nexport A={CANARY}\nB=x=y\r\n C =\n"
    assert parse_lines(text) == {"A": CANARY, "B": "x=y", "C": ""}


def test_a_private_file_gives_the_named_values_alone(tmp_path):
    path = private(tmp_path / "s", f"A={CANARY}\nB=2\n")
    assert read_secrets(source_of(path, "A"), "here") == ({"A": CANARY}, ())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620])
def test_a_file_that_others_may_touch_is_refused_without_its_content(tmp_path, mode):
    path = private(tmp_path / "s", f"A={CANARY}\n", mode)
    values, (fault,) = read_secrets(source_of(path, "A"), "here")
    assert values == {}
    assert f"mode {mode:04o}" in str(fault)
    assert "chmod 600" in str(fault)
    assert CANARY not in str(fault)


def test_a_file_of_another_user_is_refused(tmp_path):
    path = private(tmp_path / "s", "A=1\n")
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)
    _, (fault,) = read_secrets(source_of(path, "A"), "here")
    assert "user id 12345" in str(fault)


def test_no_file_no_plain_file_and_no_name_are_told_apart(tmp_path):
    path = private(tmp_path / "s", f"B={CANARY}\n")
    os.mkfifo(tmp_path / "fifo", 0o600)
    found = [
        str(read_secrets(source_of(which, "A", "C"), "here")[1][0])
        for which in (tmp_path / "none", tmp_path / "fifo", path)
    ]
    assert "No such file" in found[0]
    assert "no plain file" in found[1]
    assert "no A, C in" in found[2]
    assert CANARY not in "".join(found)


def test_what_is_stored_is_private_and_reads_back_byte_for_byte(tmp_path):
    values = {"A": CANARY + "\nsecond line\n", "B": os.fsdecode(b"\xff\xfe")}
    folder = tmp_path / "state" / "secrets"
    path = store_secrets(values, folder, tmp_path)
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    assert read_secrets(source_of(path, "A", "B", is_stored=True), "here") == (values, ())
    assert json.loads(path.read_text())["run_dir"] == str(tmp_path)


def test_the_state_folder_follows_the_xdg_variable_when_it_is_absolute(tmp_path):
    assert state_folder({"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "miles-hpc" / "secrets"
    assert state_folder({"XDG_STATE_HOME": "relative"}).is_relative_to(Path.home())


def test_redaction_takes_values_and_their_lines_out_but_leaves_short_words():
    redaction = Redaction()
    redaction.add(["first line\nsecond line", "abc", "a longer first line value"])
    text = redaction.clean("x first line y second line abc a longer first line value")
    assert text == "x [secret] y [secret] abc [secret]"
