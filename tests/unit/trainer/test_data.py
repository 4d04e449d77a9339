import pytest

from miles_hpc.errors import DriverError
from miles_hpc.paths import RunDir, packaged
from miles_hpc.spec.load import load_spec
from miles_hpc.trainer.data import TaskData, make_tasks
from miles_hpc.trainer.demo_model import prepare_model

pytestmark = pytest.mark.trainer


def load(*overrides):
    return load_spec(packaged("jobs") / "demo_tiny.toml", overrides=overrides, local=True).spec


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return prepare_model(RunDir(tmp_path_factory.mktemp("run")), load())


@pytest.fixture
def task_data(model_dir):
    def make(*overrides):
        spec = load(*overrides)
        return TaskData(spec, make_tasks(spec), model_dir)

    return make


def texts(data, step):
    return [str(question.entry["question"]) for question in data.prompts(step).questions]


def test_a_step_has_its_own_prompts_whatever_was_asked_before(task_data):
    first, second = task_data(), task_data()
    expected = [texts(first, step) for step in (1, 2, 3)]
    assert texts(second, 3) == expected[2]
    assert texts(second, 1) == expected[0]
    assert len({tuple(step) for step in expected}) == 3


def test_another_seed_gives_other_prompts(task_data):
    assert texts(task_data("train.seed=77"), 1) != texts(task_data(), 1)


def test_groups_number_the_prompts_of_a_step(task_data):
    questions = task_data().prompts(1).questions
    assert [question.prompt.group for question in questions] == [0, 1, 2, 3]


def test_the_instruction_stands_before_the_question_in_the_chat_template(task_data):
    data = task_data("data.instruction=Just the number.")
    question = data.prompts(1).questions[0]
    text = data._tokenizer.decode(question.prompt.token_ids)
    expected = f"user\nJust the number.\n{question.entry['question']}"
    assert expected in text
    assert text.endswith("assistant\n")


def test_prompts_that_are_too_long_are_passed_over_and_counted(task_data):
    options = "data.task_options={min_terms=2, max_terms=6, min_digits=1, max_digits=4}"
    lengths = [len(q.prompt.token_ids) for q in task_data(options).prompts(1).questions]
    limit = sorted(lengths)[2]
    found = task_data(options, f"rollout.max_prompt_tokens={limit}").prompts(1)
    assert found.num_dropped > 0
    assert all(len(q.prompt.token_ids) <= limit for q in found.questions)
    assert len(found.questions) == 4


def test_a_limit_that_no_prompt_meets_is_told_with_the_limit_that_would_do(task_data):
    data = task_data("rollout.max_prompt_tokens=5")
    with pytest.raises(DriverError, match=r"found 0 prompts .* among 32 candidates"):
        data.prompts(1)


def test_the_tasks_own_rule_scores_an_answer(task_data):
    data = task_data()
    question = data.prompts(1).questions[0]
    assert data.score(question, question.answer) == 1.0
    assert data.score(question, "123456") < 1.0
    assert data.score(question, None) == 0.0


def test_special_tokens_are_no_part_of_a_decoded_response(task_data):
    data = task_data()
    ids = (*data._tokenizer.encode("42", add_special_tokens=False), *data.stop_token_ids)
    assert data.decode(ids) == "42"


@pytest.mark.parametrize(
    "override",
    [
        "data.task=no_such_task",
        "data.task_options={no_such_option=1}",
        "data.task_options={min_terms=5, max_terms=2}",
    ],
)
def test_a_wrong_data_table_is_one_message(override):
    with pytest.raises(DriverError, match=r"data\.task"):
        make_tasks(load(override))
