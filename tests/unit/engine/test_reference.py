"""The generated pages are fresh, and the check of that can fail."""

from miles_hpc.engine.compose import all_rules
from miles_hpc.engine.reference import DEFAULT_FOLDER, environment_page, main, rules_page


def test_the_pages_are_fresh():
    assert main(["--check"]) == 0, "run python -m miles_hpc.engine.reference"
    assert (DEFAULT_FOLDER / "rules.md").read_text(encoding="utf-8") == rules_page()


def test_a_stale_page_is_told_and_repaired(tmp_path):
    assert main(["--output", str(tmp_path)]) == 0
    assert main(["--check", "--output", str(tmp_path)]) == 0
    (tmp_path / "rules.md").write_text("old")
    assert main(["--check", "--output", str(tmp_path)]) == 1
    assert (tmp_path / "rules.md").read_text() == "old"


def test_every_rule_has_its_heading_and_every_variable_one_row():
    page = rules_page()
    assert all(f"### {rule.id}: " in page for rule in all_rules())
    names = [
        line.split("`")[1] for line in environment_page().splitlines() if line.startswith("| `")
    ]
    assert len(names) == len(set(names))
    assert {"PYTORCH_CUDA_ALLOC_CONF", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"} <= set(names)
