"""Ask a trained model the tasks of lmms-eval (https://github.com/EvolvingLMMs-Lab/lmms-eval), with prompts of its
training: `llava-fsdp evaluate 'tasks=[mme,gqa]'`.

lmms-eval reads the datasets, makes the questions and scores the answers, in the same process. The answers are generated
as those of every other evaluation: in batches, by several processes, and continued from a file.
"""

import argparse
import importlib.util
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from llava_fsdp.config import EvaluateConfig
from llava_fsdp.data.images.check import ImageBytes, ImageFile
from llava_fsdp.data.records.record import IMAGE_TAG
from llava_fsdp.evaluate.question import BenchmarkQuestion
from llava_fsdp.runtime.errors import ConfigError, DataError
from llava_fsdp.runtime.files.safe_load import library_errors
from llava_fsdp.runtime.files.scores_file import QUESTIONS
from llava_fsdp.runtime.files.unfinished import run_of
from llava_fsdp.runtime.text.log import log

GENERATE = "generate_until"
"""The kind of lmms-eval's requests that are answered here: a question with images, and an answer of free text."""
FEWSHOT_SEED = 1234
"""lmms-eval's own seed for choosing examples that stand before a question."""
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""torchrun's variables, by which lmms-eval would divide the questions itself."""


class AnswersTask(Protocol):
    """Answers questions of one task of lmms-eval. It returns one answer for each question on the ranks that score them,
    and an empty list on others."""

    def __call__(self, task: str, questions: list[BenchmarkQuestion], max_new_tokens: int, /) -> list[str]: ...


@dataclass(frozen=True)
class AskedTasks:
    """Which tasks of lmms-eval are asked."""

    names: tuple[str, ...]
    """Names or patterns, such as `mme*`."""
    folder: str | None
    """Folder with tasks of the user; None without any."""
    limit: int | None
    """Greatest number of documents of each task; None: all are asked."""
    max_new_tokens: int
    """Length of the answers of tasks that name none."""
    output: Path
    """Folder in which some tasks write files for a benchmark's server, below `submissions`."""


class AnsweredElsewhere(Exception):
    """Ends lmms-eval in a process that does not score the answers."""


@dataclass(frozen=True)
class DocumentImages(Mapping[str, ImageFile]):
    """The images of a document of lmms-eval's dataset, by name. They are decoded at each access and not kept, because
    those of all documents may not fit into memory."""

    names: tuple[str, ...]
    request: Any
    """lmms-eval's request (`lmms_eval.api.instance.Instance`)."""
    documents: Mapping[str, Any]
    """lmms-eval's datasets: task -> split -> documents."""

    def __getitem__(self, name: str) -> ImageFile:
        if name not in self:
            raise KeyError(name)
        visual = visuals_of(self.request, self.documents)[self.names.index(name)]
        return image_file(visual, name)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def visuals_of(request: Any, documents: Mapping[str, Any]) -> list[Any]:
    """Return the images, videos or sounds of a request."""
    _, _, doc_to_visual, number, task, split = request.args
    visuals = doc_to_visual(documents[task][split][number])
    return [] if visuals is None else [visual for visual in visuals if visual is not None]


def image_file(visual: Any, name: str) -> ImageFile:
    """Return an image of lmms-eval as a file in memory. Raises DataError if it is a video or a sound."""
    if not isinstance(visual, Image.Image):
        raise DataError(f"{name} is a {type(visual).__name__}, not an image; leave this task out")
    buffer = io.BytesIO()
    (visual if visual.mode in ("L", "LA", "RGB", "RGBA") else visual.convert("RGB")).save(buffer, "PNG")
    return ImageBytes(name, buffer.getvalue())


def question_of(number: int, request: Any, documents: Mapping[str, Any]) -> BenchmarkQuestion:
    """Return a request of lmms-eval as a question to the model. If the text has one tag for each image, it is kept.
    Otherwise all tags are removed, and the images come first, as in lmms-eval's models/simple/llava_hf.py."""
    text, _, _, document, task, _ = request.args
    where = f"task {task}, document {document}"
    names = tuple(f"{where}, image {index}" for index in range(len(visuals_of(request, documents))))
    asked = text
    if text.count(IMAGE_TAG) != len(names):
        asked = " ".join([IMAGE_TAG] * len(names)) + "\n" * bool(names) + text.replace(IMAGE_TAG, "")
    inline = DocumentImages(names, request, documents)
    return BenchmarkQuestion(number, f"{task}:{document}:{number}", text, asked, names, where, inline=inline)


class LmmsTasks:
    """The tasks of lmms-eval that are asked, with their datasets."""

    def __init__(self, asked: AskedTasks):
        """Load the tasks.

        Raises:
            ConfigError: lmms-eval is not installed, or there is no such task.
            DataError: a task asks for something else than answers to questions about images, or cannot be loaded.
        """
        if importlib.util.find_spec("lmms_eval") is None:
            raise ConfigError("tasks need lmms-eval: pip install lmms-eval (docs/evaluation.md)")
        with library_errors("lmms-eval, or a package that it needs, cannot be imported", ConfigError):
            from lmms_eval.evaluator_utils import get_task_list  # pyright: ignore[reportMissingImports]
            from lmms_eval.tasks import TaskManager, get_task_dict  # pyright: ignore[reportMissingImports]

        self.asked, self.names = asked, ", ".join(asked.names)
        with library_errors(f"tasks={self.names}: lmms-eval cannot read its tasks", ConfigError):
            manager = TaskManager(include_path=asked.folder)
            matches = {name: manager.match_tasks([name]) for name in asked.names}
        unknown = [name for name, found in matches.items() if not found]
        if unknown:
            raise ConfigError(f"tasks={unknown[0]}: lmms-eval has no such task; for one of your own give tasks_folder")
        names = list(dict.fromkeys(name for found in matches.values() for name in found))
        with library_errors(f"tasks={self.names}: lmms-eval cannot load them", DataError):
            self.by_group: dict[Any, Any] = get_task_dict(names, manager, "simple")
            self.by_name = {found.task_name: found.task for found in get_task_list(self.by_group)}
        for name, task in self.by_name.items():
            if task.OUTPUT_TYPE != GENERATE:
                raise DataError(
                    f"tasks: {name} asks for {task.OUTPUT_TYPE}, and only {GENERATE} is answered; leave it out"
                )
            # as lmms-eval's own command does
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)

    def score(self, answer: AnswersTask) -> dict[str, Any] | None:
        """Return lmms-eval's scores of a model's answers: task -> {`questions`: their number, name of a score: its
        value}. None in processes that only answer. Raises DataError if lmms-eval fails."""
        from lmms_eval.evaluator import evaluate  # pyright: ignore[reportMissingImports]

        with one_process() as variables:
            model = model_of(answer, self.asked, variables)
            model.task_dict = {name: task.dataset for name, task in self.by_name.items()}
            try:
                with library_errors(f"tasks={self.names}: lmms-eval failed", DataError):
                    found = evaluate(
                        lm=model, task_dict=self.by_group, limit=self.asked.limit, bootstrap_iters=0, log_samples=False,
                        distributed_executor_backend="torchrun", process_docs_parallel=1,
                        cli_args=arguments_of(self.asked),
                    )  # fmt: skip
            except DataError as error:
                if isinstance(error.__cause__, AnsweredElsewhere):  # this process only answers, and another one scores
                    return None
                raise
        return {
            task: {QUESTIONS: found["n-samples"].get(task, {}).get("effective"), **numbers_in(scores)}
            for task, scores in found["results"].items()
        }


def numbers_in(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores of a task, whose names are `METRIC,FILTER` in lmms-eval. Standard errors are left out, and in
    names `,none`, the default filter."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in scores.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "_stderr" not in name and "," in name
    }


@contextmanager
def one_process() -> Iterator[dict[str, str]]:
    """Context manager in which torchrun's variables are not set, so that lmms-eval makes all questions in each process;
    the processes then divide them themselves. Yields these variables."""
    before = {name: os.environ.pop(name) for name in TORCHRUN_VARIABLES if name in os.environ}
    try:
        yield before
    finally:
        os.environ.update(before)


def arguments_of(asked: AskedTasks) -> argparse.Namespace:
    """Return what tasks of lmms-eval read from its command line."""
    return argparse.Namespace(
        output_path=str(asked.output), tasks=",".join(asked.names), model="llava_fsdp", model_args="",
        log_samples=False, limit=asked.limit, process_with_media=True, reasoning_tags=None,
    )  # fmt: skip


def model_of(answer: AnswersTask, asked: AskedTasks, variables: Mapping[str, str]) -> Any:
    """Return a model of lmms-eval's kind (`lmms_eval.api.model.lmms`), which answers questions with `answer`.
    `variables`: torchrun's environment variables, set only while it answers: lmms-eval must take this for one process.
    """
    from lmms_eval.api.model import lmms  # pyright: ignore[reportMissingImports]

    class TrainedModel(lmms):
        """A model that llava_fsdp trained. An error while it answers ends the evaluation."""

        is_simple, device = True, "cpu"

        def generate_until(self, requests: list[Any]) -> list[str]:
            os.environ.update(variables)
            try:
                return answer_requests(requests, self.task_dict, answer, asked.max_new_tokens)
            finally:
                for name in variables:
                    del os.environ[name]

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            raise NotImplementedError  # an abstract method; such tasks were refused before

        def generate_until_multi_round(self, requests: list[Any]) -> list[str]:
            raise NotImplementedError  # likewise

    return TrainedModel()


def answer_requests(
    requests: list[Any], documents: Mapping[str, Any], answer: AnswersTask, max_new_tokens: int
) -> list[str]:
    """Return the answers to lmms-eval's requests, in their order. Those of one task that want equally long answers are
    asked together. Raises AnsweredElsewhere in a process that does not score the answers, because it has not got all.

    Args:
        documents: lmms-eval's datasets: task -> split -> documents.
        max_new_tokens: length of answers for tasks that name none.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    for index, request in enumerate(requests):
        wanted = request.args[1]  # the settings of generation; args[4] is the name of the task
        groups.setdefault((request.args[4], int(wanted.get("max_new_tokens", max_new_tokens))), []).append(index)
    texts = [""] * len(requests)
    is_scoring_rank = True
    for (task, length), indices in groups.items():
        if requests[indices[0]].args[1].get("do_sample"):
            log().warning("task %s asks for sampled answers; llava_fsdp decodes greedily", task)
        questions = [question_of(number, requests[index], documents) for number, index in enumerate(indices)]
        found = answer(task, questions, length)
        is_scoring_rank = is_scoring_rank and len(found) == len(questions)
        for index, text in zip(indices, found, strict=False):
            texts[index] = cut_at(text, requests[index].args[1].get("until") or [])
    if not is_scoring_rank:
        raise AnsweredElsewhere
    return texts


def cut_at(text: str, ends: str | Sequence[str]) -> str:
    """Return an answer up to the first of the texts `ends` in it. An empty line, which lmms-eval gives to tasks that
    name no end, ends nothing, as in its own models (models/simple/qwen2_5_vl.py)."""
    for end in [ends] if isinstance(ends, str) else ends:
        if end and end != "\n\n":
            text = text.partition(end)[0]
    return text


def tasks_of(cfg: EvaluateConfig) -> AskedTasks:
    """Return the tasks that a configuration of the command `evaluate` names."""
    run = run_of(Path(cfg.model.checkpoint))
    # folder for files that some tasks write; `run`: output folder of the training that made the model, if any
    folder = Path(cfg.answers).parent if cfg.answers is not None else run or Path.cwd()
    return AskedTasks(tuple(cfg.tasks), cfg.tasks_folder, cfg.limit, cfg.max_new_tokens, folder)


def configuration_of(cfg: EvaluateConfig, task: str, max_new_tokens: int) -> EvaluateConfig:
    """Return the configuration for a task's questions; a file of answers gets the task and their length in its name."""
    answers = None
    if cfg.answers is not None:
        path = Path(cfg.answers)
        answers = str(path.with_name(f"{path.stem}_{task}_{max_new_tokens}{path.suffix}"))
    return replace(cfg, max_new_tokens=max_new_tokens, answers=answers)
