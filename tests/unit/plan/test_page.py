"""The plan as a page and as lines: self-contained, escaped, within the terminal, and telling what the plan holds."""

import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from miles_hpc.engine.compose import draft_plan
from miles_hpc.plan.figures import MOST_NODES, memory_figure, node_figure
from miles_hpc.plan.page import render_page
from miles_hpc.plan.timeline import memory_lines
from miles_hpc.units import format_bytes
from tests.unit.plan.specs import GLM52, NATIVE, QWEN38, spec_of

CPU = {
    **NATIVE,
    "cluster.device": "cpu",
    "cluster.gpus_per_node": 0,
    "cluster.num_nodes": 2,
    "model.train_dtype": "fp32",
    "model.rollout_quantisation": "fp32",
    "rollout.engine": "transformers",
}
SPECS = [
    QWEN38,
    GLM52,
    CPU,
    {**QWEN38, "cluster.num_nodes": 4096, "rollout.prompts_per_step": 8192},
]


def plan_of(*changes):
    draft = draft_plan(spec_of(*changes), python="/opt/python", package_version="0")
    assert draft.plan is not None
    return draft.plan


class Tags(HTMLParser):
    """Collects what a page opens and refers to, and checks that it closes what it opens."""

    VOID = ("meta", "br", "line", "rect")

    def __init__(self):
        super().__init__()
        self.open, self.references, self.seen = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("changes", SPECS)
def test_the_page_is_whole_and_fetches_nothing(changes):
    page = render_page(plan_of(changes))
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.references == []
    assert not {"script", "link", "img", "iframe"} & set(tags.seen)
    assert "url(" not in page
    assert "@import" not in page


def test_the_page_tells_layout_environment_command_and_findings():
    plan = plan_of(CPU, {"rollout.max_response_tokens": 9000, "cluster.segment": 9})
    page = render_page(plan, ("set cluster.num_nodes = 9",))
    for text in (
        "<dt>world_size</dt><dd>2</dd>",
        "OMP_NUM_THREADS",
        "/opt/python -m miles_hpc.trainer",
        "MH262",
        "MH236",
        "What would fit: set cluster.num_nodes = 9.",
    ):
        assert text in page


def test_text_of_the_spec_cannot_become_markup():
    page = render_page(plan_of(CPU, {"env": {"X": "<script>alert(1)</script>"}}))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("changes", SPECS)
def test_figures_are_well_formed_and_bounded(changes):
    plan = plan_of(changes)
    nodes = ElementTree.fromstring(node_figure(plan.layout, plan.rollout))
    labels = [element.text for element in nodes.iter("text")]
    assert sum(label.startswith("node ") for label in labels) == min(
        plan.layout.num_nodes, MOST_NODES
    )
    if plan.layout.num_nodes > MOST_NODES:
        assert f"and {plan.layout.num_nodes - MOST_NODES} more nodes in the same pattern" in labels
    host = ElementTree.fromstring(memory_figure(plan.memory, "host", plan.memory.phases))
    labels = [element.text for element in host.iter("text")]
    for phase in plan.memory.phases:
        assert phase.name in labels
        assert format_bytes(phase.host_bytes_per_node) in labels


def test_bars_are_as_wide_as_their_bytes():
    plan = plan_of(QWEN38)
    figure = ElementTree.fromstring(memory_figure(plan.memory, "gpu", plan.memory.phases))
    train = plan.memory.phase("train")
    widths = {}
    for bar in figure.iter("rect"):
        title = bar.find("title")
        if title is not None:
            widths[title.text] = int(bar.get("width"))
    weights = train.parts["gpu.trainer_weights"]
    limit = plan.memory.limits.gpu_bytes_per_gpu
    drawn = widths[f"trainer_weights: {format_bytes(weights)}"]
    assert drawn == pytest.approx(620 * weights / limit, abs=2)


def test_a_place_that_holds_nothing_has_no_figure():
    memory = plan_of(CPU).memory
    assert memory_figure(memory, "gpu", memory.phases) == ""


@pytest.mark.parametrize("changes", SPECS)
def test_the_timeline_fits_a_terminal(changes):
    lines = memory_lines(plan_of(changes).memory)
    assert max(map(len, lines)) <= 100
    assert len(lines) == 8


def test_the_timeline_shows_what_is_above_the_alarm():
    fits = memory_lines(plan_of(QWEN38).memory)
    double = memory_lines(plan_of(QWEN38, {"offload.peak_device": "cpu"}).memory)
    assert not any("!" in line for line in fits)
    assert ["!" in line for line in double[1:7]] == [True, False, True, False, False, False]


def test_a_plan_of_thousands_of_nodes_is_no_larger_than_one_of_sixteen():
    small = plan_of(QWEN38, {"rollout.prompts_per_step": 8192}).to_json()
    large = plan_of(SPECS[3]).to_json()
    assert abs(len(large) - len(small)) < 100
