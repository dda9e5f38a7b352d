"""Ask the model in training the tasks of lmms-eval at each validation (`val.tasks`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llava_fsdp.config import Config
from llava_fsdp.data.images.check import ImageBytes
from llava_fsdp.data.records.record import Record, Turn
from llava_fsdp.data.validation_prompts import HeldOutQuestion, ask
from llava_fsdp.data.validation_set import HeldOut
from llava_fsdp.evaluate.lmms_tasks import AskedTasks, score_tasks
from llava_fsdp.evaluate.question import BenchmarkQuestion
from llava_fsdp.parallel.ranks.mesh import own_rank
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
    """Asks the tasks of lmms-eval. All ranks read the tasks, answer a share of the questions, and score all answers:
    lmms-eval has a barrier where it reads the datasets, so no rank may do it alone."""

    def __init__(self, held_out: HeldOut, cfg: Config, make_generator: MakeGenerator):
        """Read the tasks' questions, with their images. Collective.

        Raises:
            ConfigError: lmms-eval is not installed, or there is no such task.
            DataError: lmms-eval fails, or a task asks for something else than answers about images.
        """
        val = cfg.val
        self.scratch = TemporaryDirectory(prefix="llava_fsdp-")
        output = cfg.output_dir if own_rank() == 0 else self.scratch.name  # for files that tasks write
        self.asked = AskedTasks(tuple(val.tasks), val.tasks_folder, val.answers, val.max_new_tokens, Path(output))
        self.groups: list[TaskGroup] = []

        def collect(task: str, questions: list[BenchmarkQuestion], max_new_tokens: int) -> list[str]:
            """Keep the questions of a task. Nothing is answered yet."""
            own = replace(cfg, val=replace(val, max_new_tokens=max_new_tokens))
            asked = replace(held_out, questions=[question_of(question, held_out, own) for question in questions])
            self.groups.append(TaskGroup(task, max_new_tokens, make_generator(asked, own, UNSCORED)))
            return []

        score_tasks(self.asked, collect)

    def measure(self) -> dict[str, Any]:
        """Return lmms-eval's scores of the model's present answers: task -> {name of a score: its value}. Collective.
        Raises DataError if lmms-eval fails."""
        texts = {
            (group.task, group.max_new_tokens): [answered.text for answered in group.generator.answers()]
            for group in self.groups
        }
        return score_tasks(self.asked, lambda task, _, length: texts[task, length]) or {}


def question_of(question: BenchmarkQuestion, held_out: HeldOut, cfg: Config) -> HeldOutQuestion:
    """Return a question of a task as a prompt that is encoded as in training."""
    content = {name: question.inline[name] for name in question.images}
    record = Record(
        file=question.where,
        index=question.number,
        id=str(question.id),
        images=question.images,
        turns=(Turn("human", question.text), Turn("gpt", "")),
        has_image_key=bool(question.images),
        inline={name: image.data for name, image in content.items() if isinstance(image, ImageBytes)},
    )
    steps = held_out.loader.steps
    return ask(record, steps.encoder, steps.image_reader, cfg)
