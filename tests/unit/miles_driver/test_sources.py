"""A checkout of Miles read without being imported."""

import subprocess

import pytest

from miles_hpc.miles_driver.sources import checkout_flags, checkout_revision, main

ARGUMENTS = """
def add(parser):
    parser.add_argument("--colocate", action="store_true")
    parser.add_argument("-o", "--offload-train", action=argparse.BooleanOptionalAction)
    reset_arg(parser, "--save", type=str)
    parser.add_argument(f"--{prefix}-interval")
    parser.set_defaults(name="--not-a-flag")
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "miles" / "utils").mkdir(parents=True)
    (tmp_path / "miles" / "utils" / "arguments.py").write_text(ARGUMENTS)
    (tmp_path / "miles" / "backends" / "deep").mkdir(parents=True)
    (tmp_path / "miles" / "backends" / "deep" / "a.py").write_text(
        'p.add_argument("--sglang-router-ip")'
    )
    (tmp_path / "miles" / "backends" / "broken.py").write_text("def (")
    return tmp_path


def test_flags_are_read_from_the_sources(checkout, capsys):
    expected = {"colocate", "offload-train", "no-offload-train", "save", "sglang-router-ip"}
    assert checkout_flags(checkout) == expected
    assert main([str(checkout)]) == 0
    assert capsys.readouterr().out.split() == sorted(expected)
    assert main([]) == 2


def test_a_folder_without_sources_has_none(tmp_path):
    assert checkout_flags(tmp_path) == frozenset()
    assert checkout_revision(tmp_path) is None


def git(folder, *words):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(
        ["git", *identity, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_the_commit_is_found_in_every_form_of_a_checkout(checkout, tmp_path):
    git(checkout, "init", "-q", "-b", "main")
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "one")
    commit = git(checkout, "rev-parse", "HEAD")
    assert checkout_revision(checkout) == commit
    git(checkout, "pack-refs", "--all")
    assert checkout_revision(checkout) == commit
    tree = tmp_path / "tree"
    git(checkout, "worktree", "add", "-q", "-b", "other", str(tree))
    assert checkout_revision(tree) == commit
    git(checkout, "checkout", "-q", "--detach")
    assert checkout_revision(checkout) == commit
