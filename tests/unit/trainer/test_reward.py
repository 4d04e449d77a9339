import pytest

from miles_hpc.trainer.reward import Reward, find_answer, reward_response


@pytest.mark.parametrize(
    ("text", "reference", "answer"),
    [
        ("4", "4", "4"),
        ("The answer is 4.", "4", "4"),
        ("6 - 2 which is 4", "4", "4"),
        ("First <answer> 7 </answer> then 9", "4", "7"),
        ("6 -2", "4", "-2"),
        ("6-2", "4", "2"),
        ("x-2", "4", "2"),
        ("It is -4.", "-4", "-4"),
        ("It is 1,234,567 in all", "1234567", "1234567"),
        ("3.5", "3", "3.5"),
        ("It ends with 4.", "4", "4"),
        ("no number here", "4", None),
        ("", "4", None),
        ("  Paris ", "Rome", "Paris"),
        ("   ", "Rome", None),
    ],
)
def test_the_answer_is_a_tag_else_the_last_number_else_the_text(text, reference, answer):
    assert find_answer(text, reference) == answer


def exact(reference):
    return lambda answer: 1.0 if answer == reference else 0.0


def test_right_wrong_and_missing_answers_are_told_apart():
    assert reward_response("it is 4", "4", exact("4")) == Reward(value=1.0, score=1.0)
    assert reward_response("it is 5", "4", exact("4")) == Reward(value=0.1, score=0.0)
    assert reward_response("who knows", "4", exact("4")) == Reward(value=0.0, score=0.0)


def test_a_partial_score_of_the_task_is_kept():
    found = reward_response("40", "4", lambda answer: 0.5)
    assert found.score == 0.5
    assert found.value == pytest.approx(0.55)
