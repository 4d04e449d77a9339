"""The prompts of each step: verifiable tasks of reasoning-gym, rendered by the model's chat template.

A step's prompts depend on (seed, step) alone, so a resumed run sees what the first attempt would have seen. Scores answers
by the task's own rule, since only the data set knows it. Knows neither engines nor models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import reasoning_gym
from reasoning_gym.factory import ProceduralDataset
from transformers import AutoTokenizer

from miles_hpc.errors import DriverError
from miles_hpc.spec.job import JobSpec
from miles_hpc.trainer.rollout import Prompt

_CANDIDATES_PER_PROMPT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One task of the data set.

    Attributes:
        entry: the data set's own record, with the keys question, answer and metadata.
    """

    prompt: Prompt
    entry: Mapping[str, object]

    @property
    def answer(self) -> str:
        """The reference answer."""
        return str(self.entry["answer"])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrompts:
    """The questions of a step and how many candidates were dropped because their prompt was too long."""

    questions: tuple[Question, ...]
    num_dropped: int


def make_tasks(spec: JobSpec) -> ProceduralDataset:
    """Return the data set of a job; needs no model, so that a wrong [data] table is found before anything is placed.

    Raises:
        DriverError: if the source, the task or its options are not known.
    """
    data = spec.data
    if data.source != "reasoning_gym" or data.task is None:
        raise DriverError(
            f'data: found source = "{data.source}" and task = {data.task!r}; expected source = "reasoning_gym" with a task. '
            "The native engine has no other source."
        )
    size = spec.train.num_steps * spec.rollout.prompts_per_step * _CANDIDATES_PER_PROMPT
    try:
        return reasoning_gym.create_dataset(
            data.task, seed=spec.train.seed, size=size, **data.task_options
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise DriverError(
            f"data.task, data.task_options: found {data.task!r} with {data.task_options}: {error}; expected a "
            "reasoning-gym task and options that it has. Correct the [data] table."
        ) from error


class TaskData:
    """Prompts and scores of one reasoning-gym task for one model's tokenizer."""

    def __init__(self, spec: JobSpec, tasks: ProceduralDataset, model_dir: Path) -> None:
        self._data = spec.data
        self._rollout = spec.rollout
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        if not self._tokenizer.chat_template:
            raise DriverError(
                f"{model_dir}: found a tokenizer without chat template; expected one. Use an instruction-tuned checkpoint."
            )
        self._stride = spec.rollout.prompts_per_step * _CANDIDATES_PER_PROMPT
        self._tasks = tasks

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        return (int(self._tokenizer.eos_token_id),)

    def prompts(self, step: int) -> StepPrompts:
        """Return the questions of `step` (from 1); candidates whose prompt is too long are passed over.

        Raises:
            DriverError: if the step's candidates run out.
        """
        questions: list[Question] = []
        wanted = self._rollout.prompts_per_step
        first = (step - 1) * self._stride
        longest = 0
        for tried, index in enumerate(range(first, first + self._stride), start=1):
            entry = self._tasks[index]
            token_ids = self._render(str(entry["question"]))
            longest = max(longest, len(token_ids))
            if len(token_ids) <= self._rollout.max_prompt_tokens:
                prompt = Prompt(group=len(questions), token_ids=token_ids)
                questions.append(Question(prompt=prompt, entry=entry))
            if len(questions) == wanted:
                return StepPrompts(questions=tuple(questions), num_dropped=tried - wanted)
        raise DriverError(
            f"data, step {step}: found {len(questions)} prompts within rollout.max_prompt_tokens = "
            f"{self._rollout.max_prompt_tokens} among {self._stride} candidates (the longest has {longest}); expected "
            f"prompts_per_step = {wanted}. Raise max_prompt_tokens to {longest}."
        )

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of a response, special tokens left out."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def score(self, question: Question, answer: str | None) -> float:
        """Return the task's own score of `answer`, from 0 to 1."""
        return float(self._tasks.score_answer(answer=answer, entry=dict(question.entry)))

    def _render(self, text: str) -> tuple[int, ...]:
        content = f"{self._data.instruction}\n{text}" if self._data.instruction else text
        token_ids = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
        return tuple(int(token) for token in token_ids)
