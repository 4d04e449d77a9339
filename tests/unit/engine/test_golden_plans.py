"""The whole plan of a recipe of each kind, byte for byte: `pytest tests/unit/engine --update-golden` after a wanted change."""

from pathlib import Path

import pytest

from miles_hpc.engine.compose import compose_plan
from miles_hpc.spec.load import load_spec
from tests.fakes.recipes import RECIPES, ROOT


def plan_text(recipe: Path) -> str:
    """Return plan.json without what changes for other reasons: file hashes, the version, this checkout's place."""
    loaded = load_spec(recipe, overrides=("job.run_root=/runs",))
    plan = compose_plan(
        loaded.spec,
        python="/opt/python",
        package_version="0",
    )
    return plan.to_json().replace(str(ROOT), "{checkout}")


@pytest.mark.parametrize("recipe", RECIPES, ids=[path.stem for path in RECIPES])
def test_the_plan_is_the_golden_one(recipe, update_golden):
    golden = ROOT / "tests" / "golden" / recipe.stem / "plan.json"
    text = plan_text(recipe)
    if update_golden:
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert golden.read_text(encoding="utf-8") == text
