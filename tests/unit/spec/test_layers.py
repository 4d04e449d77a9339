"""How a spec is put together: extended files, site profiles, --set, and what relative paths are relative to."""

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.source import Sources, read_overrides
from tests.unit.spec.written import MILES, NATIVE, faults, load, only_fault, write


def test_a_spec_extends_files_in_order_and_wins_over_them(tmp_path: Path):
    write(tmp_path, "base.toml", NATIVE)
    write(
        tmp_path, "more.toml", "[train]\nnum_steps = 5\nseed = 7\n[env]\nA = 'more'\nB = 'more'\n"
    )
    top = write(
        tmp_path, "top.toml", "extends = ['base.toml', 'more.toml']\n[train]\nnum_steps = 6\n[env]\nB = 'top'\n"
    )  # fmt: skip
    loaded = load(top)
    assert (loaded.spec.train.num_steps, loaded.spec.train.seed) == (6, 7)
    assert loaded.spec.env == {"A": "more", "B": "top"}
    assert loaded.position("train.num_steps") == f"{top}:3"
    assert loaded.position("train.seed") == f"{tmp_path}/more.toml:3"
    assert loaded.position("parallel.tp") is None


def test_one_extended_file_may_be_a_string_and_extend_another_by_its_own_folder(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    write(tmp_path, "base.toml", NATIVE)
    write(tmp_path / "deep", "middle.toml", 'extends = "../base.toml"\n[train]\nseed = 3\n')
    top = write(tmp_path, "top.toml", 'extends = "deep/middle.toml"\n')
    assert load(top).spec.train.seed == 3


def test_the_bytes_of_every_file_are_kept_under_a_name_of_their_own(tmp_path: Path):
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", "top.toml", NATIVE)
    top = write(tmp_path, "top.toml", 'extends = "other/top.toml" # kept as it is\r\n')
    site = write(tmp_path, "hall.toml", "[cluster]\npartition = 'p'\n")
    loaded = load(top, site=str(site))
    assert set(loaded.files) == {"top.toml", "top-2.toml", "site-hall.toml"}
    assert top.read_bytes() in loaded.files.values()
    assert loaded.hashes["site-hall.toml"] == hashlib.sha256(site.read_bytes()).hexdigest()


def test_a_file_that_two_others_extend_is_kept_once(tmp_path: Path):
    write(tmp_path, "base.toml", NATIVE)
    write(tmp_path, "a.toml", 'extends = "base.toml"\n')
    write(tmp_path, "b.toml", 'extends = "base.toml"\n[train]\nseed = 2\n')
    loaded = load(write(tmp_path, "top.toml", 'extends = ["a.toml", "b.toml"]\n'))
    assert set(loaded.files) == {"base.toml", "a.toml", "b.toml", "top.toml"}
    assert loaded.spec.train.seed == 2


def test_a_cycle_of_extended_files_is_refused_with_its_way(tmp_path: Path):
    write(tmp_path, "a.toml", '# first\nextends = "b.toml"\n')
    write(tmp_path, "b.toml", 'extends = "c.toml"\n')
    write(tmp_path, "c.toml", '\n\nextends = "a.toml"\n')
    fault = only_fault(tmp_path / "a.toml")
    assert fault.startswith(f"{tmp_path}/c.toml:3: extends: found a cycle: ")
    assert fault.count("a.toml") == 2


def test_a_file_that_extends_itself_through_a_link_is_a_cycle(tmp_path: Path):
    write(tmp_path, "a.toml", 'extends = "link.toml"\n')
    (tmp_path / "link.toml").symlink_to("a.toml")
    assert "a cycle" in only_fault(tmp_path / "a.toml")


@pytest.mark.parametrize("value", ["5", "[1]", "{}", "''", "true", "['base.toml', '']"])
def test_extends_takes_file_names_only(tmp_path: Path, value: str):
    write(tmp_path, "base.toml", NATIVE)
    top = write(tmp_path, "top.toml", f"# x\nextends = {value}\n")
    assert f"{top}:2: extends: found " in "\n".join(faults(top))


def test_a_missing_extended_file_is_told_where_it_is_named(tmp_path: Path):
    top = write(tmp_path, "top.toml", 'extends = ["none.toml"]\n' + NATIVE)
    assert only_fault(top).startswith(f"{top}:1: extends: found no file")


def test_a_site_profile_fills_what_the_spec_leaves_out(tmp_path: Path, miles: Path):
    site = write(
        tmp_path, "hall.toml", "[job]\nrun_root = '/shared/runs'\n[cluster]\npartition = 'hall'\ngpus_per_node = 4\n"
    )  # fmt: skip
    loaded = load(miles, "cluster.account=me", site=str(site))
    assert (loaded.spec.cluster.partition, loaded.spec.cluster.account) == ("hall", "me")
    assert loaded.spec.cluster.gpus_per_node == 8
    assert loaded.spec.job.run_root == Path("/shared/runs")
    assert loaded.position("cluster.partition") == f"{site}:4"


def test_what_a_site_profile_sets_without_effect_is_left_out_for_the_job(
    tmp_path: Path, native: Path
):
    site = write(
        tmp_path,
        "hall.toml",
        "[cluster]\ngpus_per_node = 4\ngpu_type = 'h200'\n[network]\nib_hca = 'mlx5'\n"
        "[engine.miles]\nroot = '/root/miles'\n",
    )
    spec = load(native, site=str(site)).spec
    assert (spec.cluster.gpus_per_node, spec.cluster.gpu_type) == (0, None)
    assert spec.network.ib_hca is None
    assert spec.engine.miles is None


@pytest.mark.parametrize(
    "text", ["[train]\nseed = 1\n", "[job]\nname = 'x'\n", "[model]\n", "seed = 1\n"]
)
def test_a_site_profile_holds_nothing_of_the_experiment(tmp_path: Path, native: Path, text: str):
    site = write(tmp_path, "hall.toml", text)
    assert "in a site profile" in only_fault(native, site=str(site))


def test_a_site_is_found_in_the_folders_of_the_variable_first(
    tmp_path: Path, miles: Path, monkeypatch: pytest.MonkeyPatch
):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "b", "hall.toml", "[cluster]\npartition = 'b'\n")
    write(tmp_path / "b", "example-h200.toml", "[cluster]\npartition = 'mine'\n")
    monkeypatch.setenv("MILES_HPC_SITES", f"{tmp_path}/a{os.pathsep}{tmp_path}/b")
    assert load(miles, site="hall").spec.cluster.partition == "b"
    assert load(miles, site="example-h200").spec.cluster.partition == "mine"
    assert load(miles, site="example-gb300").spec.cluster.partition == "gb300"


def test_an_unknown_site_is_told_with_the_nearest(native: Path):
    fault = only_fault(native, site="example-h20")
    assert 'nearest site "example-h200"' in fault
    assert "example-gb300" in fault


def test_set_wins_over_everything_and_the_later_one_over_the_earlier(native: Path):
    spec = load(native, "train.num_steps=9", "train.num_steps=10", "train . 'seed' = 5").spec
    assert (spec.train.num_steps, spec.train.seed) == (10, 5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("job.time_limit=04:00:00", 14400.0),
        ("job.time_limit=2h", 7200.0),
        ('job.time_limit="30"', 1800.0),
        ("job.time_limit='1-12'", 129600.0),
    ],
)
def test_a_bare_word_and_a_time_are_text_on_the_command_line(
    native: Path, text: str, expected: float
):
    assert load(native, text).spec.job.time_limit == expected


def test_set_reaches_tables_arrays_and_quoted_keys(native: Path):
    spec = load(
        native,
        "data.task_options={min_terms = 2}",
        "data.task_options.max_terms=3",
        'env."A_B"=x=y, z',
        "lora.rank=4",
        "lora.alpha=8",
        "lora.target_modules=['q_proj']",
        "job.comment=about #3",
        "model.shape_source=2026-01-01",
    ).spec
    assert spec.data.task_options == {"min_terms": 2, "max_terms": 3}
    assert spec.env == {"A_B": "x=y, z"}
    assert spec.lora is not None
    assert spec.lora.target_modules == ("q_proj",)
    assert spec.job.comment == "about #3"
    assert spec.model.shape_source == "2026-01-01"


@pytest.mark.parametrize(
    "text",
    ["", "=", "a", "=1", "a=", "a.=1", ".a=1", "a b=1", "a[0]=1", '"a=1', "a=1\nb=2", "a\0=1", "a..b=1", "\ud800=1",
     ".".join(["a"] * 40) + "=1"],
)  # fmt: skip
def test_what_is_no_assignment_is_refused_with_its_number(native: Path, text: str):
    lines = faults(native, "train.seed=1", text)
    assert [line for line in lines if line.startswith("--set:2: found ")] == lines


@pytest.mark.parametrize("value", ["[1", "{a = 1", "'x", '"x', '"a" "b"', "{a = 1, a = 2}"])
def test_a_malformed_value_on_the_command_line_is_refused(native: Path, value: str):
    assert only_fault(native, [f"train.seed={value}"]).startswith(
        "--set:1: train.seed: found a malformed TOML value"
    )


def test_set_cannot_extend(native: Path):
    assert only_fault(native, ["extends=x.toml"]).startswith(
        "--set:1: extends: found an unknown key"
    )


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_any_text_for_set_is_a_layer_or_a_fault(text: str):
    sources = Sources()
    read_overrides(sources, [text])
    assert len(sources.layers) + len(sources.faults) == 1
    assert all("\n" not in str(fault) for fault in sources.faults)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("abz019_-", min_size=1, max_size=5), min_size=1, max_size=4),
    st.one_of(
        st.integers(-(2**63), 2**63 - 1), st.booleans(), st.text("abc xyz/@%&$;|`", min_size=1)
    ),
)
def test_set_gives_the_value_that_toml_or_the_word_means(parts: list[str], value: object):
    sources = Sources()
    text = str(value).lower() if isinstance(value, bool) else str(value)
    read_overrides(sources, [f"{'.'.join(parts)}={text}"])
    if not text.strip():
        assert len(sources.faults) == 1
        return
    found: object = sources.layers[0].values
    for part in parts:
        assert isinstance(found, dict)
        found = found[part]
    words = {"true": True, "false": False}
    assert found == (words.get(text.strip(), text.strip()) if isinstance(value, str) else value)


def test_paths_are_relative_to_what_their_key_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "specs").mkdir()
    (tmp_path / "here").mkdir()
    base = MILES.replace('"/models/big"', '"models/big"').replace(
        '"/data/prompts.jsonl"', '"p.jsonl"'
    )
    write(tmp_path / "specs", "base.toml", base)
    top = write(tmp_path, "top.toml", 'extends = "specs/base.toml"\n[job]\nrun_root = "out"\n')
    monkeypatch.chdir(tmp_path / "here")
    spec = load(Path("../top.toml"), "data.path=q.jsonl").spec
    assert spec.job.run_root == tmp_path / "here" / "out"
    assert spec.model.hf_checkpoint is not None
    assert spec.model.hf_checkpoint.resolve() == tmp_path / "specs" / "models" / "big"
    assert spec.data.path == tmp_path / "here" / "q.jsonl"
    assert load(top).spec.model.hf_checkpoint == tmp_path / "specs" / "models" / "big"


def test_the_default_run_root_and_a_tilde_become_absolute(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load(native).spec.job.run_root == tmp_path / "runs"
    spec = load(native, "job.run_root=~/runs", "offload.scratch_root=~/scratch").spec
    assert spec.job.run_root == tmp_path / "home" / "runs"
    assert spec.offload.scratch_root == tmp_path / "home" / "scratch"


@pytest.mark.parametrize("path", ["scratch", "./x", "$SLURM_TMPDIR/x", "{scratch}"])
def test_a_path_on_the_nodes_is_absolute_and_no_variable_is_expanded(native: Path, path: str):
    assert "an absolute path on the compute nodes" in only_fault(
        native, [f"offload.scratch_root='{path}'"]
    )


def test_an_unknown_home_folder_is_told(native: Path):
    assert "a home folder that exists" in only_fault(native, ["job.run_root=~no-such-user-here/x"])


def test_a_dumped_spec_validates_to_the_same_spec(miles: Path):
    spec = load(
        miles,
        "agent.ready_deadline=1.000001s",
        "offload.chunk=1.5MiB",
        "cluster.memory_per_node=1TB",
        "cluster.srun_options=['--container-image=a b']",
        "cluster.sbatch_options={licenses = 'scratch:1', spread-job = true}",
    ).spec
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    "site",
    ["~no-such-user-here/x.toml", "n" * 300, "n" * 300 + ".toml", "a/b.toml", "", "..", "a\0b"],
)
def test_a_site_that_cannot_be_read_is_told_whatever_its_name(native: Path, site: str):
    assert "found " in only_fault(native, site=site)


@pytest.mark.parametrize(
    "name", ["n" * 300, "~no-such-user-here/x.toml", "a\\u0000b", "native.toml/x"]
)
def test_an_extended_file_that_cannot_be_named_is_told(tmp_path: Path, name: str):
    write(tmp_path, "native.toml", NATIVE)
    top = write(tmp_path, "top.toml", f'extends = "{name}"\n{NATIVE}')
    assert only_fault(top).startswith(f"{top}:1: extends: found ")


def test_a_current_folder_that_is_gone_is_told(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert only_fault(native).startswith("current folder: found No such file")
