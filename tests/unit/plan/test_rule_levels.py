"""[rules] of a spec: another level for a rule with the reason, and what is no such thing refused with its place."""

import json

import pytest

from miles_hpc.cli import main
from miles_hpc.engine.compose import all_rules, compose_plan, draft_plan
from miles_hpc.errors import PlanError, SpecError
from miles_hpc.launch.describe import describe_plan
from miles_hpc.plan.page import render_page
from miles_hpc.spec.load import load_spec
from tests.unit.plan.specs import GLM52, QWEN38, spec_of
from tests.unit.spec.written import MILES, faults, only_fault, write

OLD_NCCL = {**QWEN38, "nccl.version": "2.29.1"}
LOWERED = {"rules": {"MH263": {"level": "warning", "reason": "our 2.29 carries the fix"}}}


def compose(*changes):
    return compose_plan(spec_of(*changes), python="/p", package_version="0")


def test_a_lowered_rule_no_longer_refuses_and_its_reason_is_shown_everywhere():
    with pytest.raises(PlanError, match="MH263"):
        compose(OLD_NCCL)
    plan = compose(OLD_NCCL, LOWERED)
    (finding,) = [finding for finding in plan.findings if finding.id == "MH263"]
    assert (finding.level, finding.reason) == ("warning", "our 2.29 carries the fix")
    shown = next(f for f in json.loads(plan.to_json())["findings"] if f["id"] == "MH263")
    assert shown["reason"] == "our 2.29 carries the fix"
    assert "our 2.29 carries the fix" in " ".join(describe_plan(plan).split())
    assert "our 2.29 carries the fix" in render_page(plan)


def test_a_raised_warning_refuses():
    raised = {"rules": {"MH244": {"level": "error", "reason": "our hosts are small"}}}
    changes = {**GLM52, "train.kl_coef": 0.1, "cluster.node_memory": "8TiB"}
    assert compose(changes).findings
    with pytest.raises(PlanError, match="our hosts are small"):
        compose(changes, raised)


def test_a_level_that_changes_nothing_is_noted():
    assert (
        "rules.MH263 changes nothing: the rule finds nothing here."
        in compose(QWEN38, LOWERED).notes
    )


def test_a_rule_that_guards_the_impossible_keeps_its_level_and_says_so(tmp_path):
    line = 'MH202 = {level = "warning", reason = "let me"}'
    path = write(tmp_path, "job.toml", f"{MILES}\n[rules]\n{line}\n")
    loaded = load_spec(path)
    with pytest.raises(SpecError) as refused:
        draft_plan(loaded.spec, python="/p", package_version="0", position=loaded.position)
    number = path.read_text(encoding="utf-8").splitlines().index(line) + 1
    assert f"{path}:{number}: rules.MH202: found a level for MH202 (whole model replicas)" in str(
        refused.value
    )


def test_an_unknown_id_is_a_fault_with_its_line_and_the_nearest_one(tmp_path):
    path = write(
        tmp_path, "job.toml", f'{MILES}\n[rules]\nMH269 = {{level = "warning", reason = "x"}}\n'
    )
    loaded = load_spec(path)
    with pytest.raises(SpecError) as refused:
        draft_plan(loaded.spec, python="/p", package_version="0", position=loaded.position)
    assert str(refused.value).startswith(f"{path}:{MILES.count(chr(10)) + 3}: rules.MH269: found")
    assert "the nearest is MH26" in str(refused.value)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ('MH263 = {level = "warning"}', "rules.MH263.reason: found nothing; expected a value"),
        ('MH263 = {level = "warning", reason = ""}', "rules.MH263.reason: found"),
        ('MH263 = {level = "off", reason = "x"}', 'rules.MH263.level: found "off"'),
        ('MH263 = {level = "error", reason = "x", why = "y"}', "valid here: level, reason"),
        ('nccl = {level = "error", reason = "x"}', "rules.nccl"),
    ],
)
def test_an_entry_without_level_or_reason_is_a_fault_with_its_line(tmp_path, entry, text):
    path = write(tmp_path, "job.toml", f"{MILES}\n[rules]\n{entry}\n")
    line = only_fault(path)
    assert line.startswith(f"{path}:{MILES.count(chr(10)) + 3}: ")
    assert text in line


def test_a_site_profile_sets_no_level(tmp_path):
    path = write(tmp_path, "job.toml", MILES)
    site = write(
        tmp_path, "site.toml", '[rules]\nMH263 = {level = "warning", reason = "our cluster"}\n'
    )
    assert any("a key of the experiment" in line for line in faults(path, site=str(site)))


def test_the_page_of_a_rule_says_whether_its_level_can_change(monkeypatch, capsys):
    for name, words in (("MH202", "fixed"), ("MH263", "rules.MH263 = {level"), ("MH108", "fixed")):
        monkeypatch.setattr("sys.argv", ["miles-hpc", "explain", name])
        with pytest.raises(SystemExit):
            main()
        assert words in capsys.readouterr().out


def test_the_rules_of_memory_can_be_judged_by_whoever_knows_the_node():
    fixed = {rule.id for rule in all_rules() if rule.has_fixed_level}
    assert not {f"MH30{digit}" for digit in range(1, 6)} & fixed
    assert {"MH202", "MH221", "MH402"} <= fixed
