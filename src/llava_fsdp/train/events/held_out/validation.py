"""Validate a model during its training: compute the loss on held-out records, and score answers to questions from them.

A validation runs between two steps, on all ranks, with the sharded model. It does not change the training: with and
without validation, the trained weights are the same to the bit.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_64_hexdigest

from llava_fsdp.config import FULL_WEIGHT, BestBy, Config, Metric
from llava_fsdp.data.validation_prompts import HeldOutQuestion
from llava_fsdp.data.validation_set import HeldOut
from llava_fsdp.model.generation import check_answers
from llava_fsdp.parallel.eval_mode import evaluating
from llava_fsdp.parallel.ranks.consensus import on_first_rank
from llava_fsdp.parallel.ranks.mesh import own_rank
from llava_fsdp.report.run_reader import VALIDATION_FILE
from llava_fsdp.report.shown_answers import choose_answers
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.files.heartbeat import Phase
from llava_fsdp.runtime.files.jsonl import RowWriter
from llava_fsdp.runtime.files.run_dir import FOLDER, list_checkpoints, step_of
from llava_fsdp.runtime.files.scores_file import QUESTIONS, scores_text
from llava_fsdp.runtime.process.watchdog import Watchdog
from llava_fsdp.runtime.text.log import log
from llava_fsdp.train.events.held_out.answer_metric import AnswerMetric, choose_metric
from llava_fsdp.train.events.held_out.best import MEASURED, BestValidation, best_validation
from llava_fsdp.train.events.held_out.task_answers import TaskAnswers
from llava_fsdp.train.events.held_out.validation_answers import Answered, AnswerGenerator
from llava_fsdp.train.events.reporting.metrics import drop_later_rows, finite, pair_columns, rows_of, storage_errors
from llava_fsdp.train.events.run_events import RunEvents, RunStart
from llava_fsdp.train.pipeline_step import PipelinedModel, evaluate
from llava_fsdp.train.state import PairNumbers, StepResult, TrainState
from llava_fsdp.train.sums.pair_step import PairStep
from llava_fsdp.train.sums.pair_sums import means_of_all_sources, numbers_by_source
from llava_fsdp.train.sums.source_sums import sum_over_ranks

TITLES = {Metric.exact.value: "exact match", Metric.vqa.value: "VQA accuracy"}
"""Value of `val.metric` -> its name in a line of text."""


@dataclass(frozen=True)
class LossSum:
    """Sum of the losses of a validation's label tokens (tokens that are in the loss), each times its weight, the number
    of these tokens, and the sum of their weights in units of 1 / FULL_WEIGHT."""

    total: float
    label_tokens: int
    weight: int
    pairs: PairNumbers | None = None
    """Means over the pairs, if samples are pairs: their mean loss is then the loss of the validation."""

    @property
    def row(self) -> dict[str, Any]:
        """Loss, number of label tokens and means over pairs as columns of `validation.jsonl`. The loss is the mean over
        the weights of label tokens, where a weight of 1 is stored as FULL_WEIGHT; if samples are pairs, it is the mean
        over pairs. If it is not finite, or there are no labels, it is None."""
        mean = self.total / (self.weight / FULL_WEIGHT) if self.weight else math.nan
        mean = mean if self.pairs is None else self.pairs.loss
        return {"loss": finite(mean), "label_tokens": self.label_tokens, **pair_columns(self.pairs)}


class Validation(RunEvents):
    """Validates the model after the steps at which that is due. Rank 0 writes the results."""

    def __init__(
        self,
        state: TrainState,
        held_out: HeldOut,
        cfg: Config,
        watchdog: Watchdog,
        events: RunEvents,
        metric: AnswerMetric | None = None,
    ):
        """Prepare the validation. Rank 0 removes rows of later steps from `validation.jsonl`. Collective.

        Args:
            events: observers that are told of progress, results, and pauses, in which the run is saved or stopped if
                this was requested on any rank.
            metric: scores the answers; None: `val.metric`.
        """
        self.state = state
        self.held_out = held_out
        self.cfg = cfg
        self.metric = metric or choose_metric(cfg, None)
        self.last_step = state.loader.total_steps
        self.watchdog = watchdog
        self.events = events
        self.rows = RowWriter(Path(cfg.output_dir) / VALIDATION_FILE)
        model = state.model if state.pipeline is None else PipelinedModel(state.model, state.pipeline)

        def make_generator(asked: HeldOut, task_cfg: Config, metric: AnswerMetric) -> AnswerGenerator:
            return AnswerGenerator(model, asked, task_cfg, watchdog.wants_stop, self.pause, metric)

        self.generator = make_generator(held_out, cfg, self.metric)
        self.tasks = TaskAnswers(held_out, cfg, make_generator) if cfg.val.tasks else None
        self.found: list[dict[str, Any]] = []
        """On rank 0, all rows of `validation.jsonl`; those that an earlier start has written have no answers."""
        self.saved_steps: set[int] = set()
        """Steps whose checkpoints this start of the run has begun to save because their validation was the best."""
        self.measured = measured(held_out, cfg, self.metric)
        self.is_done_already = on_first_rank(self.begin_file, f"cannot begin {self.rows.path}")
        if held_out.questions:
            with evaluating(state.model, held_out.loader.device, state.roots):
                # find out now, and not at the first validation, whether the model can generate answers
                check_answers(model, self.generator.language, self.generator.prompt_of([]))

    def begin_file(self) -> bool:
        """Remove rows of later steps, which a resumed run repeats. Return whether the current step has a row."""
        with storage_errors(self.rows.path):
            drop_later_rows(self.rows.path, self.state.step)
        kept = rows_of(self.rows.path, range(self.state.step + 1)) if self.rows.path.is_file() else []
        self.found = [{**json.loads(line), "answers": []} for line in kept]
        return bool(self.found) and self.found[-1]["step"] == self.state.step

    def is_due(self) -> bool:
        """Return whether there is a validation after the current step: every `val.every` steps and after the last."""
        step, every = self.state.step, self.cfg.val.every
        return every is not None and step > 0 and (step % every == 0 or step >= self.last_step)

    def on_start(self, run: RunStart) -> None:
        """Run the validation after the current step, if the run stopped before it was finished; else repeat what
        follows from the last one: mark the best checkpoint, or end the training early (`compare`). Collective."""
        if self.is_due() and not self.is_done_already:
            log().info("the validation of step %d is still to be done", self.state.step)
            self.measure()
        else:
            self.compare()

    def after_step(self, result: StepResult) -> None:
        if self.is_due():
            self.measure()

    def pause(self) -> None:
        """Save or stop the run, between two batches, if this was requested on any rank. Collective."""
        self.events.on_pause()
        self.watchdog.at(Phase.VALIDATION, self.state.step)

    def measure(self) -> None:
        """Run a validation and report its results. Collective.

        Raises:
            Stopped: a stop was requested. When the run resumes, it begins with this validation.
            DataError: a held-out record became unreadable after the run began, and `data.bad_records` is `fail`.
        """
        began_at = time.perf_counter()
        self.watchdog.at(Phase.VALIDATION, self.state.step)
        device = self.held_out.loader.device
        try:
            with evaluating(self.state.model, device, self.state.roots):
                losses = self.measure_losses()
                answers = self.generator.answers()
                task_scores = {} if self.tasks is None else self.tasks.measure()
        except RuntimeError:  # the DataLoader's signal handler raises it at any place when a worker dies
            self.held_out.loader.status.check()
            raise
        if own_rank() == 0:
            self.report(losses, answers, task_scores, time.perf_counter() - began_at)
        self.compare()

    def compare(self) -> None:
        """Tell the observers which validation is the best so far (`checkpoint.best`), and end the training if too many
        in a row were not better (`val.patience`). While updates are skipped, the current step cannot be the best,
        because its weights are those of an earlier step. Collective."""
        by, patience, step = self.cfg.checkpoint.best, self.cfg.val.patience, self.state.step
        if by is None:
            return

        def find() -> BestValidation:
            # steps that have a checkpoint, or get one: only their validations can be the best
            kept = {step_of(folder) or 0 for folder in list_checkpoints(Path(self.cfg.output_dir) / FOLDER)}
            kept |= self.saved_steps | (set() if self.state.consecutive else {step})
            return best_validation(self.found, by, kept)

        best = on_first_rank(find, "the validations cannot be compared")
        if best.step is not None:
            self.saved_steps.add(best.step)
        self.events.on_best(best.step)
        if patience is not None and best.validations_since >= patience and step < self.last_step:
            self.state.ends_early = True
            log().info(
                "the training ends after step %d: in %d validations, %s was not better than after step %s (%.4g); a "
                "larger val.patience continues it", step, best.validations_since, by.value, best.step, best.value,
            )  # fmt: skip

    def measure_losses(self) -> list[LossSum]:
        """Return, for each data source, the sum of the losses over all its records and all ranks or, if samples are
        pairs of a chosen and a rejected answer, the means over its pairs. Collective."""
        loader, sampler = self.held_out.loader, self.held_out.sampler
        label_counts, weights = ([0] * len(self.held_out.names) for _ in range(2))
        sums = torch.zeros(len(label_counts), dtype=torch.float64, device=loader.device)
        pairs = None
        if self.cfg.data.pairs:
            pairs = PairStep(self.cfg.held_out, loader.device, self.state.held_out_pair_reference)
        steps = loader.steps_from(0, self.watchdog.wants_stop)
        for number, step in enumerate(steps):
            self.pause()
            assert step is not None, "pause raises on every rank when one of them was asked to stop"
            step = loader.agree(step)  # leaves out the samples that any rank could not read
            source = sampler.source(number)
            for micro in step.micro_batches:
                if pairs is not None:
                    pairs.evaluate(self.state.model, loader.to_device(micro))
                    continue
                loss = evaluate(self.state, micro, loader)
                if loss is not None:  # only the last stage of a pipeline has it
                    sums[source] += loss
            label_counts[source] += step.facts.label_tokens
            weights[source] += step.facts.weight
            for left_out in step.facts.skipped if own_rank() == 0 else ():
                log().warning("the validation is done without %s", left_out.reason)
            self.events.on_progress(f"validating: {number + 1} of {sampler.per_epoch}")
        if pairs is not None:
            values = sum_over_ranks(pairs.sums.values).flatten().tolist()
            numbers = numbers_by_source(values, self.held_out.names)
            return [
                LossSum(0.0, count, 0, numbers[name])
                for name, count in zip(self.held_out.names, label_counts, strict=True)
            ]
        return [
            LossSum(total, count, weight)
            # `ranks_per_loss` ranks have each added the same losses
            for total, count, weight in zip(
                sum_over_ranks(sums / self.state.parallelism.ranks_per_loss).tolist(),
                label_counts,
                weights,
                strict=True,
            )
        ]

    def report(
        self, losses: list[LossSum], answers: list[Answered], task_scores: dict[str, Any], seconds: float
    ) -> None:
        """Write and log the results of a validation.

        Args:
            losses: sums of the losses of each data source, in the order of the sources.
            answers: the generated answers with their scores; empty without questions.
            task_scores: scores of the tasks of lmms-eval, by task and name.
            seconds: duration of the validation.
        """
        names, questions = self.held_out.names, self.held_out.questions
        scores: dict[str, list[float]] = {name: [] for name in names}
        answer_rows = []
        for answer in answers:
            question = questions[answer.number]
            scores[names[question.source]].append(answer.score)
            answer_rows.append({"source": names[question.source], **answer_row(question, answer)})
        row = row_of(self.state.step, dict(zip(names, losses, strict=True)), scores, seconds)
        row["metric"] = self.metric.name if questions else None
        row[MEASURED] = self.measured  # digest of records, encoding and scoring: only equal ones are compared
        if questions and self.metric.name == Metric.exact.value:
            row["blind_guess"] = blind_guess(
                [question.question for question in questions], [question.reference for question in questions]
            )
        row["answers"] = choose_answers(answer_rows, self.cfg.val.shown)
        # answers that `val.max_new_tokens` ended within their reasoning
        cut = sum(answer.is_thought_cut for answer in answers)
        if cut:
            row["thoughts_cut"] = cut
            log().warning(
                "%d of %d answers have no text, because val.max_new_tokens=%d ended their thought; raise it",
                cut, len(answers), self.cfg.val.max_new_tokens,
            )  # fmt: skip
        if task_scores:
            row["tasks"] = task_scores
        self.rows.add(row)
        self.found.append(row)
        self.events.after_validation(row)
        log().info("%s", line_of(row))
        for task, scores_of_task in task_scores.items():
            log().info("task %s: %s, of %s questions", task, scores_text(scores_of_task), scores_of_task.get(QUESTIONS))
        if row["loss"] is None:
            log().warning("validation after step %d: the loss is no number", self.state.step)


def row_of(step: int, losses: dict[str, LossSum], scores: dict[str, list[float]], seconds: float) -> dict[str, Any]:
    """Return the results of a validation as a row of `validation.jsonl`; the caller sets its `metric` and `answers`.
    `losses` and `scores`, one for each answer, are by name of the data source. `seconds`: the validation's duration."""
    total, labels, weight = (
        sum(getattr(loss_sum, name) for loss_sum in losses.values()) for name in ("total", "label_tokens", "weight")
    )
    all_sources = LossSum(total, labels, weight, means_of_all_sources(loss_sum.pairs for loss_sum in losses.values()))
    return {
        "step": step,
        **all_sources.row,
        "sources": {name: loss_sum.row | score_row(scores[name]) for name, loss_sum in losses.items()},
        "metric": None,
        **score_row([score for source_scores in scores.values() for score in source_scores]),
        "seconds": seconds,
        "answers": [],
    }


def measured(held_out: HeldOut, cfg: Config, metric: AnswerMetric) -> str:
    """Return a digest of what a validation measures: the records, their encoding, and how answers are scored."""
    val, facts = cfg.val, held_out.loader.fingerprints
    return xxh3_64_hexdigest(json.dumps([*facts, val.limit, val.answers, val.max_new_tokens, metric.name]).encode())


def blind_guess(questions: Sequence[str], answers: Sequence[str]) -> float:
    """Return the greatest share of questions that a model can answer correctly without images: to each text of a
    question it gives the most frequent of the right answers (`answers`) to this text."""
    counts: dict[str, Counter[str]] = {}
    for question, answer in zip(questions, answers, strict=True):
        counts.setdefault(question, Counter())[answer.strip().lower()] += 1
    return sum(max(counts_of_answers.values()) for counts_of_answers in counts.values()) / len(questions)


def score_row(scores: list[float]) -> dict[str, Any]:
    """Return values for a row of `validation.jsonl`: the mean score of some answers (None without answers), and their
    number."""
    return {"score": sum(scores) / len(scores) if scores else None, "questions": len(scores)}


def answer_row(question: HeldOutQuestion, answered: Answered) -> dict[str, Any]:
    """Return an answer as an entry of `answers` in a row of `validation.jsonl`. The key `picture` has the path of the
    first image, if that is a file, else None."""
    return {
        "record": question.record,
        "question": question.question,
        "answer": answered.text,
        "references": [question.reference],
        "score": answered.score,
        "picture": next((str(image.absolute()) for image in question.images[:1] if isinstance(image, Path)), None),
    }


def line_of(row: dict[str, Any]) -> str:
    """Format a row of `validation.jsonl` as one line of text."""

    def loss(source_row: dict[str, Any]) -> str:
        return "none" if source_row["loss"] is None else f"{source_row['loss']:.4f}"

    of = f"{row['label_tokens']:,} label tokens" if "pairs" not in row else f"{row['pairs']:,} pairs"
    text = f"validation after step {row['step']}: loss {loss(row)} of {of}"
    if row.get("accuracy") is not None:
        text += f", {row['accuracy']:.1%} of them the right way round"
    if len(row["sources"]) > 1:
        text += f" ({', '.join(f'{name} {loss(source_row)}' for name, source_row in row['sources'].items())})"
    if row["score"] is not None:
        kind = TITLES.get(row["metric"], row["metric"])
        text += f", {kind} {row['score']:.1%} of {row['questions']} questions"
        if row.get("blind_guess") is not None:
            text += f" (the best guess without images: {row['blind_guess']:.1%})"
        if len(row["sources"]) > 1:
            asked = {name: source_row for name, source_row in row["sources"].items() if source_row["questions"]}
            scores = [
                f"{name} {source_row['score']:.1%} of {source_row['questions']}" for name, source_row in asked.items()
            ]
            text += f" ({', '.join(scores)})"
    return f"{text}, {row['seconds']:.1f} s"


def open_validation(
    state: TrainState,
    cfg: Config,
    watchdog: Watchdog,
    events: RunEvents,
    metric: AnswerMetric,
) -> Validation | None:
    """Create the validation of a training; None with `val.every=null`. A warning is logged if the program gives a
    metric (`metric.is_own`) or the configuration names held-out records, and they are not used.

    Raises:
        ConfigError: the model cannot generate answers, or `checkpoint.best=score` and no question is answered.
        StorageError: output_dir cannot be written.
    """
    if cfg.checkpoint.best is BestBy.score and state.held_out is not None and not state.held_out.questions:
        raise ConfigError(
            "checkpoint.best=score compares answers, and the held-out records have no question to score; set "
            "checkpoint.best=loss"
        )
    if metric.is_own and (state.held_out is None or not state.held_out.questions) and own_rank() == 0:
        log().warning("the metric %s scores nothing: that needs val.every and val.answers above 0", metric.name)
    if state.held_out is None:
        if cfg.val.is_named and own_rank() == 0:
            log().warning("held-out records are given, but with val.every=null they are not used; set val.every=STEPS")
        return None
    return Validation(state, state.held_out, cfg, watchdog, events, metric)
