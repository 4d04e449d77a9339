"""What is wrong with a spec is told all at once: file, line, key, what was found, what was expected, the nearest key."""

import os
import re
from pathlib import Path

import pytest

from miles_hpc.errors import SpecError
from tests.unit.spec.written import MILES, NATIVE, faults, load, only_fault, write


def test_all_faults_of_all_files_are_told_at_once_in_order(tmp_path: Path):
    base = write(tmp_path, "base.toml", NATIVE.replace("num_steps = 4", "num_step = 4"))
    top = write(
        tmp_path,
        "top.toml",
        'extends = "base.toml"\n[job]\nengine = "nativ"\ntime_limit = 30\n\n[offlod]\ntrain = "disk"\n[tenant]\n',
    )
    lines = faults(top, "train.seed=x", "parallel.tp=0")
    assert [line.split(" found ")[0] for line in lines] == [
        "--set:1: train.seed:",
        "--set:2: parallel.tp:",
        f"{base}:{NATIVE.splitlines().index('[train]') + 1}: train.num_steps:",
        f"{base}:{NATIVE.splitlines().index('num_steps = 4') + 1}: train.num_step:",
        f"{top}:3: job.engine:",
        f"{top}:4: job.time_limit:",
        f"{top}:6: offlod:",
        f"{top}:8: tenant:",
    ]


def test_the_exit_code_of_a_wrong_spec_is_2(tmp_path: Path):
    with pytest.raises(SpecError) as refusal:
        load(write(tmp_path, "a.toml", ""))
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("[offlod]", "offload"),
        ("[job]\nnmae = 1", "job.name"),
        ("[cluster]\ntp = 1", "parallel.tp"),
        ("[cluster]\ngpu_per_node = 1", "cluster.gpus_per_node"),
        ("[engine.native]\nthreads = 1", "engine.native.threads_per_rank"),
        ("[engine.nativ]", "engine.native"),
        ("num_steps = 1", "train.num_steps"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest_valid_one(tmp_path: Path, key: str, nearest: str):
    spec = write(tmp_path, "base.toml", NATIVE)
    top = write(tmp_path, "top.toml", f'{key if key[0] != "[" else ""}\nextends = "{spec.name}"\n'
                + (key if key[0] == "[" else ""))  # fmt: skip
    assert only_fault(top).endswith(f'nearest valid key "{nearest}"')


def test_an_unknown_key_that_is_near_to_nothing_is_told_with_what_is_valid(native: Path):
    assert "valid here: interface, ib_hca" in only_fault(native, ["network.qqqqqq=1"])


@pytest.mark.parametrize("table", ["prepare", "tenant", "eval"])
def test_a_reserved_table_is_told_as_such(native: Path, table: str):
    assert "kept for a later one" in only_fault(native, [f"{table}.a=1"])


@pytest.mark.parametrize(
    ("override", "found", "expected"),
    [
        ("job.name=5", "5", 'a valid string; write it in quotes: "5"'),
        ('train.num_steps="5"', '"5"', "a valid integer; write it without quotes"),
        ("train.num_steps=5.0", "5.0", "a valid integer"),
        ("train.num_steps=true", "true", "a valid integer"),
        ("train.num_steps=[5]", "[5]", "a valid integer"),
        ("train.num_steps=0", "0", "greater than or equal to 1"),
        ("train.learning_rate=0", "0", "greater than 0"),
        ("train.learning_rate=inf", "a number that is not finite", "a finite number"),
        ("train.adam_betas=[nan, 0.9]", "a number that is not finite", "a finite number"),
        ("train.adam_betas=[0.9]", "nothing", "a value"),
        ("train.adam_betas=[0.9, 1.0]", "1.0", "less than 1"),
        (
            "train.seed=9223372036854775808",
            "a whole number of more than 64 bits",
            "a finite number",
        ),
        ("parallel=3", "3", "a table"),
        ("env=3", "3", "a table"),
        ("rollout.engine=vllm", '"vllm"', '"sglang" or "transformers"'),
        ('env."A B"=x', "this name", "text of the form"),
        ("env.A=[2026-01-01]", "a date or time", "a text"),
        ('job.name="a/b"', '"a/b"', "text of the form"),
        ('job.name="a\\n"', '"a\\n"', "text of the form"),
        ('data.instruction="a\\u0000"', "a text with a NUL", "a text"),
        ('"a\\u0000"=1', "a NUL in a name", "a text"),
        ('cluster.partition="a b"', '"a b"', "text of the form"),
        ('cluster.partition="-x"', '"-x"', "text of the form"),
        ('cluster.account="a\\n#SBATCH --x"', '"a\\n#SBATCH --x"', "text of the form"),
        ('cluster.qos="$(id)"', '"$(id)"', "text of the form"),
        ('cluster.constraint="a;b"', '"a;b"', "text of the form"),
        ('job.comment="a\\u2028b"', '"a\\u2028b"', "one line of text"),
        ('env.A="a\\u001b[2Jb"', '"a\\u001b[2Jb"', "text without control characters"),
        ("cluster.srun_options=['x']", '"x"', "text of the form"),
        ("cluster.srun_options=['--a=b', '--c\\nd']", '"--c', "text of the form"),
        ("cluster.sbatch_options={x = 1}", "1", "a valid string or a valid boolean"),
        ("cluster.sbatch_options={--x = 'a'}", "this name", "text of the form"),
        ("cluster.memory_per_node=4", "4", "a text with a unit"),
        ("cluster.memory_per_node=4G", '"4G"', "a size: a number and a unit"),
        ("cluster.memory_per_node=0GiB", '"0GiB"', "a size above zero"),
        ("lora={rank = 1, alpha = 1, target_modules = []}", "[]", "at least 1 item"),
        (
            "lora={rank = 1, alpha = 1, target_modules = ['a', 'a']}",
            '["a", "a"]',
            "without duplicates",
        ),
        ("nccl.version=2.30", "2.3", "a valid string"),
        ("model.shape_source=''", '""', "at least 1 character"),
    ],
)
def test_a_wrong_value_is_told_as_it_was_written(
    native: Path, override: str, found: str, expected: str
):
    matching = [line for line in faults(native, override) if f"found {found}" in line]
    assert len(matching) == 1
    assert matching[0].startswith("--set:1: ")
    assert expected in matching[0]


@pytest.mark.parametrize("text", ["30", "0.5", "true", "[1]"])
def test_a_bare_number_is_no_time_limit_and_the_reason_is_told(native: Path, text: str):
    assert "would be minutes to Slurm" in only_fault(native, [f"job.time_limit={text}"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0", "no limit at all"),
        ("0:00", "no limit at all"),
        ("00:00:00", "no limit at all"),
        ("0-0", "no limit at all"),
        ("0s", "no limit at all"),
        ("UNLIMITED", "no limit at all"),
        ("unlimited", "no limit at all"),
        ("INFINITE", "no limit at all"),
        ("-1", "no limit at all"),
        ("9999-00:00:00", "at most a year"),
        ("9" * 400, "a duration"),
        ("9" * 400 + "d", "at most a year"),
        ("1:90:00", "below 60"),
        ("1-25", "hours below 24"),
        ("1 0", "a duration"),
        ("4 h 5", "a duration"),
        ("1h1h", "each unit once"),
        ("30m", "a duration"),
        ("", "a duration"),
        ("ten", "a duration"),
        ("1-", "a duration"),
        ("1:2:3:4", "a duration"),
        ("\u0663h", "a duration"),
    ],
)
def test_a_time_that_slurm_would_misread_is_refused(native: Path, text: str, reason: str):
    assert reason in only_fault(native, [f'job.time_limit="{text}"'])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("10:00", 600), ("90:00", 5400), ("4:00:00", 14400), ("100:00:00", 360000),
        ("1-12", 129600), ("1-12:30", 131400), ("1-12:30:15", 131415), ("90s", 90), ("1h30min", 5400),
        ("2d", 172800), (" 2 h ", 7200), ("0:30", 30), ("500ms", 0.5),
    ],
)  # fmt: skip
def test_every_time_form_has_slurms_meaning(native: Path, text: str, seconds: float):
    assert load(native, f'job.time_limit="{text}"').spec.job.time_limit == seconds


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("a = \n", 1, "malformed TOML"),
        ("\n\n[job\n", 3, "malformed TOML"),
        ("[job]\na = 1\na = 2\n", 3, "malformed TOML"),
        ("[job]\n[job]\n", 2, "malformed TOML"),
        ("\ufeffa = 1\n", 1, "a byte order mark"),
        ("a = " + "[" * 500, 1, "nested more than the allowed"),
        ("a = " + "[" * 30 + "]" * 30, 1, "nested more than 16 deep"),
        (".".join(["a"] * 30) + " = 1", 1, "nested more than 16 deep"),
        ("a = " + "9" * 5000, 1, "Exceeds the limit"),
    ],
)
def test_malformed_toml_is_told_by_file_and_line(tmp_path: Path, text: str, line: int, found: str):
    spec = write(tmp_path, "a.toml", text)
    fault = only_fault(spec)
    assert fault.startswith(f"{spec}:{line}: found ")
    assert found in fault


def test_bytes_that_are_no_utf8_are_told_by_line(tmp_path: Path):
    spec = tmp_path / "a.toml"
    spec.write_bytes(b"[job]\nname = '\xff'\n")
    assert only_fault(spec) == f"{spec}:2: found the byte 0xff; expected UTF-8 text"
    spec.write_bytes(NATIVE.encode("utf-16"))
    assert "expected UTF-8 text" in only_fault(spec)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "large.toml").write_text("#" * 300_000, encoding="utf-8")
    found = {
        "none.toml": "found no such file",
        ".": "found a folder",
        "pipe": "found a pipe, socket or device",
        "loop": "found Too many levels of symbolic links",
        "large.toml": "found 300000 bytes",
        "n" * 300: "found File name too long",
        "a\0b": "found embedded null byte",
        "x/y.toml": "found no such file",
    }
    for name, text in found.items():
        assert text in only_fault(tmp_path / name)


def test_no_message_holds_a_line_break_or_an_escape_of_its_own(tmp_path: Path):
    spec = write(
        tmp_path,
        "evil\n\x1b[31m.toml",
        NATIVE
        + '[env]\n"A\\nB" = "x"\n"\\u001b[2J" = 3\nC = "\\u0085\\u2028\\n\\u007f"\n"\\u202e" = ""\n',
    )
    text = "\n".join(faults(spec))
    assert len(text.splitlines()) == 4
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", text)


def test_a_broken_file_does_not_make_its_keys_missing(tmp_path: Path):
    base = write(tmp_path, "base.toml", NATIVE + "\nbroken =\n")
    top = write(tmp_path, "top.toml", 'extends = "base.toml"\n[train]\nseed = "x"\n')
    lines = faults(top)
    assert [line.split(": ")[0] for line in lines] == [
        f"{base}:{len(NATIVE.splitlines()) + 2}",
        f"{top}:3",
    ]


def test_a_missing_key_is_told_at_its_table_with_its_meaning(tmp_path: Path):
    spec = write(tmp_path, "a.toml", MILES.replace('root = "/root/miles"\n', ""))
    line = MILES.splitlines().index("[engine.miles]") + 1
    fault = only_fault(spec)
    assert fault.startswith(f"{spec}:{line}: engine.miles.root: found nothing; expected a value")
    assert "Checkout of radixark/miles" in fault


def test_a_missing_table_is_told_once(tmp_path: Path):
    text = NATIVE[: NATIVE.index("[data]")]
    spec = write(tmp_path, "a.toml", text)
    assert only_fault(spec) == f"{spec}:1: data: found nothing; expected a table [data]"


def test_very_many_faults_are_cut_short_and_counted(tmp_path: Path):
    spec = write(
        tmp_path, "a.toml", NATIVE + "[nccl]\n" + "".join(f"k{i} = 1\n" for i in range(2000))
    )
    lines = faults(spec)
    assert len(lines) == 301
    assert lines[-1] == "... and 1700 more faults"


def test_the_line_of_an_element_in_an_array_of_several_lines_is_told(tmp_path: Path):
    spec = write(
        tmp_path,
        "a.toml",
        NATIVE + "[lora]\nrank = 1\nalpha = 1\ntarget_modules = [\n  'a',\n  5,\n]\n",
    )
    assert only_fault(spec).startswith(
        f"{spec}:{len(NATIVE.splitlines()) + 6}: lora.target_modules[1]: found 5"
    )
