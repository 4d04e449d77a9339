"""The GRPO loop of the native engine.

    rollout (trainer asleep) -> reward -> trainer onload -> old logprobs -> agreement check -> update(s) -> adapter export
    -> save? -> trainer offload -> weight sync

A request to save and stop is looked for at the borders of the phases and while samples are made. Before the step's first
update the step is abandoned, since the run draws it again alike; from there on it is finished. Then the state is saved,
unless the newest checkpoint holds it.

Knows the order of things and what is told about them in events; every part of the work is another module's.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, cast

from miles_hpc.errors import DriverError
from miles_hpc.paths import RunDir
from miles_hpc.run.events import EventLog, FieldValue, Kind
from miles_hpc.spec.job import JobSpec
from miles_hpc.trainer.advantages import group_advantages
from miles_hpc.trainer.agreement import Agreement, compare_logprobs, judge_agreement
from miles_hpc.trainer.calls import Fleet
from miles_hpc.trainer.data import Question, TaskData
from miles_hpc.trainer.metrics import PhaseClock, StepCounts, step_fields, time_left_s
from miles_hpc.trainer.reward import Reward, reward_response
from miles_hpc.trainer.rollout import AdapterConfig, PeftState, Sampling, split_prompts
from miles_hpc.trainer.samples import Sample, TrainSample, train_samples
from miles_hpc.trainer.saves import (
    begin_save,
    complete_save,
    export_adapter,
    find_saved,
    prune_saves,
    remove_unfinished,
)
from miles_hpc.trainer.startup import Actors, native_table, precision
from miles_hpc.trainer.stop_request import StopAskedError, StopRequests
from miles_hpc.trainer.weight_sync import sync_weights

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

TRAINER = "trainer"
"""Folder of the trainer ranks' files inside a checkpoint."""


@dataclass(slots=True)
class Trainer:
    """One run of the loop over loaded actors."""

    run: RunDir
    spec: JobSpec
    actors: Actors
    data: TaskData
    events: EventLog
    stop: StopRequests
    done: int = 0
    step_seconds: list[float] = field(default_factory=list)
    _is_asleep: bool = False

    @property
    def deadline_s(self) -> float:
        """Longest time of one phase."""
        return float(native_table(self.spec).phase_deadline)

    def train(self) -> bool:
        """Run from the newest complete checkpoint, or from the start; return whether the last step is done.

        It is not when a request to save and stop came first.
        """
        self.done = self._resume()
        for step in remove_unfinished(self.run.checkpoints):
            _log.info("removed what an interrupted save left of step %d", step)
        if self.done >= self.spec.train.num_steps:
            _log.info(
                "step %d of %d is already saved; nothing is left",
                self.done,
                self.spec.train.num_steps,
            )
            return True
        try:
            self._run_steps()
        except StopAskedError:
            self._save_and_stop()
            return False
        self.actors.trainers.call("close", deadline_s=self.deadline_s)
        self.actors.engines.call("close", deadline_s=self.deadline_s)
        return True

    def _run_steps(self) -> None:
        self.stop.raise_if_asked()
        state = self._adapter()
        self._offload(self.done)
        self._sync(state, self.done)
        for step in range(self.done + 1, self.spec.train.num_steps + 1):
            self.stop.raise_if_asked()
            self._step(step)

    def _save_and_stop(self) -> None:
        """Save the state after step `done`, unless it is saved already or is the one that every run begins with."""
        saved = find_saved(self.run.checkpoints)
        is_new = self.done > 0 and (not saved or saved[-1].step != self.done)
        if is_new:
            if self._is_asleep:
                # They hold the memory that the trainer needs, and may be in the middle of an abandoned rollout.
                self.actors.engines.end()
                self._wake_trainers(self.done)
            self._save(self.done, self._adapter())
        self.events.append(Kind.STOPPED_ON_REQUEST, step=self.done, saved=is_new)
        _log.warning("stopped on request after step %d", self.done)

    def _resume(self) -> int:
        """Return the number of steps that the restored state has behind it."""
        saved = find_saved(self.run.checkpoints) if self.spec.job.resume == "auto" else ()
        if not saved:
            return 0
        newest = saved[-1]
        steps = self.actors.trainers.call(
            "restore", str(newest.folder / TRAINER), deadline_s=self.deadline_s
        )
        if set(steps) != {newest.step}:
            raise DriverError(
                f"{newest.folder}: found steps {sorted(set(steps))} in its ranks' files; expected {newest.step}. "
                "Remove this folder to resume from the checkpoint before it."
            )
        self.events.append(Kind.CHECKPOINT_LOADED, step=newest.step, path=str(newest.folder))
        _log.info("resumed from %s", newest.folder)
        return newest.step

    def _step(self, step: int) -> None:
        clock = PhaseClock()
        with clock.measure("rollout"):
            questions, samples = self._rollout(step)
        rewards = self._reward(questions, samples)
        self.stop.raise_if_asked()
        self._phase("handoff", step)
        with clock.measure("onload"):
            self._onload(step)
        self._phase("train", step)
        with clock.measure("logprobs"):
            old, agreement = self._old_logprobs(samples, step)
        self.stop.raise_if_asked()
        advantages = group_advantages(
            [reward.value for reward in rewards],
            [sample.group for sample in samples],
            normalise=self.spec.train.normalise_advantages,
        )
        with clock.measure("update"):
            report = self._update(train_samples(samples, old, advantages))
            state = self._adapter()
        self.done = step
        is_asked = self.stop.asked() is not None
        if is_asked or self._is_save_due(step):
            with clock.measure("save"):
                self._save(step, state)
        if not is_asked:
            with clock.measure("offload"):
                self._offload(step)
            with clock.measure("weight_sync"):
                self._sync(state, step)
        counts = StepCounts(
            rewards=[reward.value for reward in rewards],
            scores=[reward.score for reward in rewards],
            response_lengths=[len(sample.response_ids) for sample in samples],
            num_finished=sum(sample.finished for sample in samples),
            num_zero_groups=_count_zero_groups(samples, advantages),
        )
        self._report(step, step_fields(counts, clock), report, agreement)

    def _rollout(self, step: int) -> tuple[tuple[Question, ...], list[Sample]]:
        self._phase("rollout", step)
        prompts = self.data.prompts(step)
        if prompts.num_dropped:
            self._warn(
                step,
                f"{prompts.num_dropped} prompts longer than rollout.max_prompt_tokens were dropped",
            )
        sampling = Sampling(
            samples_per_prompt=self.spec.rollout.samples_per_prompt,
            max_response_tokens=self.spec.rollout.max_response_tokens,
            temperature=self.spec.rollout.temperature,
            stop_token_ids=self.data.stop_token_ids,
            seed=self.spec.train.seed,
            step=step,
        )
        engines = self.actors.engines
        shares = split_prompts(
            [question.prompt for question in prompts.questions], len(engines.members)
        )
        parts = engines.call_each(
            "generate",
            [(share, sampling) for share in shares],
            deadline_s=self.deadline_s,
            look=self.stop.raise_if_asked,
        )
        return prompts.questions, [sample for part in parts for sample in part]

    def _reward(self, questions: Sequence[Question], samples: Sequence[Sample]) -> list[Reward]:
        rewards = []
        for sample in samples:
            question = questions[sample.group]
            text = self.data.decode(sample.response_ids)
            score = partial(self.data.score, question)
            rewards.append(reward_response(text, question.answer, score))
        return rewards

    def _old_logprobs(
        self, samples: Sequence[Sample], step: int
    ) -> tuple[list[tuple[float, ...]], Agreement]:
        """Return the trainer's logprobs of the response tokens and how far the engines' are from them."""
        old = _only(
            self.actors.trainers.call("logprobs", list(samples), deadline_s=self.deadline_s)
        )
        agreement = compare_logprobs([sample.rollout_logprobs for sample in samples], old)
        kind = cast(Literal["fp32", "bf16"], precision(self.spec))
        verdict, arithmetic = judge_agreement(agreement, kind)
        if verdict == "fail":
            raise DriverError(
                f"driver, logprob agreement of trainer and rollout at step {step}: found {arithmetic}. "
                "The two are not the same policy: check the model's shape against its checkpoint and the weight sync events."
            )
        if verdict == "alarm":
            self._warn(step, f"logprob agreement of trainer and rollout: {arithmetic}")
        return old, agreement

    def _update(self, samples: Sequence[TrainSample]) -> dict[str, FieldValue]:
        """Run the optimizer updates of a step; return the last one's report with the mean loss."""
        size = self.spec.train.global_batch_size or len(samples)
        if len(samples) % size:
            raise DriverError(
                f"train.global_batch_size: found {size} for {len(samples)} samples a step; expected a divisor of "
                f"{len(samples)}. Set global_batch_size to prompts_per_step * samples_per_prompt or a divisor of it."
            )
        reports = [
            _only(
                self.actors.trainers.call(
                    "train_step", list(samples[start : start + size]), deadline_s=self.deadline_s
                )
            )
            for start in range(0, len(samples), size)
        ]
        return {**reports[-1], "num_updates": len(reports)}

    def _adapter(self) -> PeftState:
        state: PeftState = _only(self.actors.trainers.call("adapter", deadline_s=self.deadline_s))
        return state

    def _is_save_due(self, step: int) -> bool:
        interval = self.spec.checkpoint.save_interval
        last = step == self.spec.train.num_steps
        return last or (interval is not None and step % interval == 0)

    def _save(self, step: int, state: PeftState) -> None:
        self._phase("save", step)
        folder = begin_save(self.run.checkpoints, step)
        self.actors.trainers.call("save", str(folder / TRAINER), step, deadline_s=self.deadline_s)
        if self.spec.checkpoint.save_hf and step == self.spec.train.num_steps:
            base = str(self.actors.model_dir)
            export_adapter(folder / "peft", state, adapter_config(self.spec), base)
        size_bytes = complete_save(folder, step)
        removed = prune_saves(self.run.checkpoints, self.spec.checkpoint.keep)
        self.events.append(
            Kind.CHECKPOINT_SAVED,
            step=step,
            path=str(folder),
            bytes=size_bytes,
            removed_steps=list(removed),
        )

    def _offload(self, step: int) -> None:
        if self.spec.offload.train != "none":
            self._phase("handoff", step)
            reports = self.actors.trainers.call("offload", deadline_s=self.deadline_s)
            self._is_asleep = True
            self._tell(Kind.OFFLOAD, self.actors.trainers, reports, step)

    def _onload(self, step: int) -> None:
        if self.spec.offload.rollout != "none":
            reports = self.actors.engines.call("sleep", deadline_s=self.deadline_s)
            self._tell(Kind.OFFLOAD, self.actors.engines, reports, step)
        self._wake_trainers(step)

    def _wake_trainers(self, step: int) -> None:
        if self.spec.offload.train != "none":
            reports = self.actors.trainers.call("onload", deadline_s=self.deadline_s)
            self._is_asleep = False
            self._tell(Kind.ONLOAD, self.actors.trainers, reports, step)

    def _sync(self, state: PeftState, version: int) -> None:
        self._phase("weight_sync", version)
        if self.spec.offload.rollout != "none":
            reports = self.actors.engines.call("wake", deadline_s=self.deadline_s)
            self._tell(Kind.ONLOAD, self.actors.engines, reports, version)
        synced = sync_weights(
            self.actors.engines,
            state,
            adapter_config(self.spec),
            version,
            deadline_s=self.deadline_s,
        )
        self.events.append(
            Kind.WEIGHT_SYNC,
            version=synced.version,
            bytes=synced.size_bytes,
            num_tensors=synced.num_tensors,
            digest=synced.digest,
            seconds=synced.seconds,
            num_engines=len(self.actors.engines.members),
        )

    def _report(
        self,
        step: int,
        fields: dict[str, FieldValue],
        update: dict[str, FieldValue],
        agreement: Agreement,
    ) -> None:
        num_steps = self.spec.train.num_steps
        self.step_seconds.append(float(cast(float, fields["step_s"])))
        left_s = time_left_s(self.step_seconds, num_steps - step)
        self.events.append(
            Kind.STEP,
            **{
                **update,
                **fields,
                "step": step,
                "num_steps": num_steps,
                "logprob_max_diff": agreement.max_diff,
                "logprob_mean_diff": agreement.mean_diff,
                "time_left_s": left_s,
            },
        )
        _log.info(
            "step %d/%d reward %.3f score %.3f loss %s |d logprob| %.2g %.1f tokens/s %.1f s, %.0f s left",
            step,
            num_steps,
            fields["reward"],
            fields["score"],
            update.get("loss"),
            agreement.max_diff,
            fields["tokens_per_s"],
            fields["step_s"],
            left_s,
        )

    def _tell(self, kind: Kind, fleet: Fleet, reports: Sequence[Any], step: int) -> None:
        for member, report in zip(fleet.members, reports, strict=True):
            log = EventLog(self.events.path, member.node)
            log.append(kind, actor=member.name, step=step, **report)

    def _phase(self, phase: str, step: int) -> None:
        self.events.append(Kind.PHASE, phase=phase, step=step)

    def _warn(self, step: int, text: str) -> None:
        _log.warning("step %d: %s", step, text)
        self.events.append(Kind.WARNING, step=step, message=text)


def adapter_config(spec: JobSpec) -> AdapterConfig:
    """Return the shape of the adapter that the spec asks for.

    Raises:
        DriverError: if there is no [lora] table.
    """
    if spec.lora is None:
        raise DriverError(
            "lora: found no [lora] table; expected one, since the native engine trains adapters only. Add [lora]."
        )
    return AdapterConfig(
        rank=spec.lora.rank, alpha=spec.lora.alpha, target_modules=spec.lora.target_modules
    )


def _count_zero_groups(samples: Sequence[Sample], advantages: Sequence[float]) -> int:
    taught = {
        sample.group
        for sample, advantage in zip(samples, advantages, strict=True)
        if advantage != 0.0
    }
    return len({sample.group for sample in samples} - taught)


def _only(results: Sequence[_T | None]) -> _T:
    """Return the result of the first rank that has one; ranks that hold no part of it return None."""
    for result in results:
        if result is not None:
            return result
    raise DriverError(
        "driver: found no rank with a result; expected one of each collective call. This is a fault of the trainer."
    )
