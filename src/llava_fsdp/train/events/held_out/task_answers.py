"""Ask the model in training the tasks of lmms-eval at each validation (`val.tasks`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llava_fsdp.config import Config
from llava_fsdp.data.images.check import ImageBytes
from llava_fsdp.data.records.record import Record, Turn
from llava_fsdp.data.validation_prompts import ask
from llava_fsdp.data.validation_set import HeldOut
from llava_fsdp.evaluate.lmms_tasks import AskedTasks, LmmsTasks
from llava_fsdp.evaluate.question import BenchmarkQuestion
from llava_fsdp.parallel.ranks.consensus import on_first_rank
from llava_fsdp.train.events.held_out.answer_metric import AnswerMetric
from llava_fsdp.train.events.held_out.validation_answers import AnswerGenerator

MakeGenerator = Callable[[HeldOut, Config, AnswerMetric], AnswerGenerator]
"""Makes what answers the questions of a HeldOut with the model in training."""
UNSCORED = AnswerMetric("lmms-eval", lambda *_: 0.0)
"""Stands in for a metric: lmms-eval scores the answers."""


@dataclass(frozen=True)
class TaskGroup:
    """The questions of a task that want equally long answers, and what answers them."""

    task: str
    max_new_tokens: int
    generator: AnswerGenerator


class TaskAnswers:
    """Asks the tasks of lmms-eval. Rank 0 reads them and lets lmms-eval score; all ranks answer."""

    def __init__(self, held_out: HeldOut, cfg: Config, make_generator: MakeGenerator):
        """Read the tasks' questions, with their images, and give them to all ranks. Collective.

        Raises:
            ConfigError: lmms-eval is not installed, or there is no such task.
            DataError: a task asks for something else than answers about images, or cannot be loaded.
        """
        self.tasks: LmmsTasks | None = None
        """None on ranks other than 0."""
        val, found = cfg.val, []

        def collect(task: str, questions: list[BenchmarkQuestion], max_new_tokens: int) -> list[str]:
            """Keep the questions of a task. Nothing is answered yet."""
            found.append((task, max_new_tokens, [record_of(question) for question in questions]))
            return []

        def read() -> list[tuple[str, int, list[Record]]]:
            asked = AskedTasks(
                tuple(val.tasks), val.tasks_folder, val.answers, val.max_new_tokens, Path(cfg.output_dir)
            )
            self.tasks = LmmsTasks(asked)
            self.tasks.score(collect)
            return found

        self.groups: list[TaskGroup] = []
        steps = held_out.loader.steps
        for task, max_new_tokens, records in on_first_rank(read, "the tasks of lmms-eval cannot be read"):
            task_cfg = replace(cfg, val=replace(val, max_new_tokens=max_new_tokens))
            questions = [ask(record, steps.encoder, steps.image_reader, task_cfg) for record in records]
            generator = make_generator(replace(held_out, questions=questions), task_cfg, UNSCORED)
            self.groups.append(TaskGroup(task, max_new_tokens, generator))

    def measure(self) -> dict[str, Any]:
        """Return lmms-eval's scores of the model's present answers: task -> {name of a score: its value}. Collective.
        Raises DataError if lmms-eval fails."""
        texts = {
            (group.task, group.max_new_tokens): [answered.text for answered in group.generator.answers()]
            for group in self.groups
        }

        def score() -> dict[str, Any]:
            assert self.tasks is not None
            scores = self.tasks.score(lambda task, _, length: texts[task, length])
            assert scores is not None, "every question has an answer: its image is in memory, and was read before"
            return scores

        return on_first_rank(score, "the tasks of lmms-eval cannot be scored")


def record_of(question: BenchmarkQuestion) -> Record:
    """Return a question of a task as a record with its images. The answer is not known."""
    content = {name: question.inline[name] for name in question.images}
    return Record(
        file=question.where,
        index=question.number,
        id=str(question.id),
        images=question.images,
        turns=(Turn("human", question.text), Turn("gpt", "")),
        has_image_key=bool(question.images),
        inline={name: image.data for name, image in content.items() if isinstance(image, ImageBytes)},
    )
