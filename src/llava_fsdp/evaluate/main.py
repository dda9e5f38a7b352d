"""Evaluate a trained model on a benchmark: `python -m llava_fsdp.evaluate model.checkpoint=outputs/finetune`.

Under torchrun every process loads the model and answers its share of the questions.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_128_hexdigest

from llava_fsdp.chat.answerer import Answerer, Question
from llava_fsdp.chat.open_assistant import open_assistant
from llava_fsdp.chat.open_model import open_model
from llava_fsdp.checkpoint.manifest import MANIFEST_FILE
from llava_fsdp.config import AUTO, DataConfig, EvaluateConfig, Format, Task, is_remote
from llava_fsdp.data.containers.data_files import RemoteFolder
from llava_fsdp.data.containers.file_reader import reading
from llava_fsdp.data.images.check import image_in
from llava_fsdp.data.index.find_files import find_images
from llava_fsdp.data.records.record import IMAGE_TAG
from llava_fsdp.data.text.chat_template.jinja_template import OWN, is_own
from llava_fsdp.data.text.conversation import asking
from llava_fsdp.data.text.templates import template
from llava_fsdp.data.toy_shapes import draw_shapes
from llava_fsdp.evaluate.answers_file import AnswersFile, QuestionShard, blank_file, storage_errors
from llava_fsdp.evaluate.blind_guess import count_texts, score_blind_guess
from llava_fsdp.evaluate.check_images import check_images, folder_of
from llava_fsdp.evaluate.lmms_tasks import LmmsTasks, configuration_of, tasks_of
from llava_fsdp.evaluate.pairs import evaluate_pairs, table_of_pairs
from llava_fsdp.evaluate.question import BenchmarkQuestion
from llava_fsdp.evaluate.read_questions import read_questions
from llava_fsdp.evaluate.record_scores import public_names, record_scores
from llava_fsdp.evaluate.results import (
    BLANK,
    BLIND,
    put_beside,
    score_all,
    submission_of,
    table_of,
    table_of_tasks,
)
from llava_fsdp.export.source_model import Opened
from llava_fsdp.model.adapters.lora_files import FOLDER as ADAPTER
from llava_fsdp.model.sources.pretrained import resolve_model
from llava_fsdp.parallel.ranks.world import read_world
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError
from llava_fsdp.runtime.files.digests import digest_of_file
from llava_fsdp.runtime.files.jsonl import replace_lines
from llava_fsdp.runtime.files.run_dir import FOLDER, list_checkpoints
from llava_fsdp.runtime.files.unfinished import EXPORT
from llava_fsdp.runtime.launch import env_rank
from llava_fsdp.runtime.text.console import TextConsole
from llava_fsdp.runtime.text.log import log
from llava_fsdp.runtime.text.progress import watch, watch_silently
from llava_fsdp.runtime.text.terminal_text import shown_name


def evaluate(cfg: EvaluateConfig) -> None:
    """Let a model answer the questions of a benchmark by greedy decoding, and print the scores. If torchrun has started
    several processes, they divide the questions, and the first one prints. The questions are asked again with blank
    images if the configuration says so, to compare the accuracy. With task=pairs, the model answers nothing; it is
    computed how probable it finds the two answers of each pair."""
    shard = open_shard(cfg)
    if cfg.tasks:
        return evaluate_tasks(cfg, shard)
    if cfg.task in (Task.conversations, Task.pairs):
        draw_shapes(cfg.data)
    if cfg.data.images is not None and is_remote(cfg.data.images):
        cfg = replace(cfg, data=replace(cfg.data, images=find_images(cfg.data.images, "data.images")))
    if cfg.task is Task.pairs:
        opened = open_model(cfg.model.checkpoint, AUTO)
        scores = evaluate_pairs(cfg, opened)
        console = TextConsole(width=None if sys.stdout.isatty() else 120)
        print(json.dumps(scores)) if cfg.format is Format.json else console.print(table_of_pairs(scores))
        return record_scores(cfg, cfg.task.value, public_names(cfg), scores, opened.source.history)
    questions = read_questions(cfg)
    check_images(questions, cfg.data)
    generator = BenchmarkAnswerer(cfg, questions, shard)
    answers = generator.answers(blank=False)
    scores = score_all(cfg.task, questions, answers) if shard.rank == 0 and questions[0].references else {}
    if asks_blank(cfg) and "accuracy" in scores:
        log().info("accuracy: %.2f %%; the same questions follow with blank images", 100 * scores["accuracy"])
    blank_answers = generator.answers(blank=True) if asks_blank(cfg) else None
    if shard.rank != 0:
        return
    result: dict[str, Any] = {
        "checkpoint": cfg.model.checkpoint,
        "task": cfg.task.value,
        "data": conversations_of(cfg.data) if cfg.task is Task.conversations else cfg.questions,
        "questions": len(questions),
    }
    if generator.thoughts_cut:
        result["thoughts_cut"] = generator.thoughts_cut
        log().warning(
            "%d of %d answers have no text, because max_new_tokens=%d ended their thought; raise it",
            generator.thoughts_cut, len(questions), cfg.max_new_tokens,
        )  # fmt: skip
    if scores:
        result |= scores
        put_comparisons(result, cfg.task, questions, blank_answers)
    if cfg.submission is not None:
        with storage_errors(f"submission={cfg.submission}"):
            Path(cfg.submission).parent.mkdir(parents=True, exist_ok=True)
            replace_lines(Path(cfg.submission), [json.dumps(submission_of(questions, answers))])
    if cfg.format is Format.json:
        print(json.dumps(result))
    else:
        print_result(cfg.show, questions, answers, result)
    record_scores(cfg, cfg.task.value, public_names(cfg), result, generator.opened.source.history)


def evaluate_tasks(cfg: EvaluateConfig, shard: QuestionShard) -> None:
    """Let a model answer the tasks of lmms-eval, print their scores, and record them in the folder of the model's run.
    `shard`: the questions that this process answers, if several divide them."""
    generators: list[BenchmarkAnswerer] = []
    cfg = replace(cfg, data=replace(cfg.data, images=None))  # lmms-eval gives the images with the questions

    def answer(task: str, questions: list[BenchmarkQuestion], max_new_tokens: int) -> list[str]:
        """Answer the questions of a task; the model is loaded once for all of them."""
        log().info("task %s: %d questions", task, len(questions))
        check_images(questions, cfg.data)
        generator = BenchmarkAnswerer(configuration_of(cfg, task, max_new_tokens), questions, shard)
        generator.assistant = generators[-1].assistant if generators else None
        generators.append(generator)
        return generator.answers(blank=False)  # with their own images, not with blank ones

    scores = LmmsTasks(tasks_of(cfg)).score(answer)
    if scores is None:  # another process prints and records them
        return
    if cfg.format is Format.json:
        print(json.dumps({"checkpoint": cfg.model.checkpoint, "tasks": scores}))
    else:
        TextConsole(width=None if sys.stdout.isatty() else 120).print(table_of_tasks(scores))
    for task, numbers in scores.items() if generators else ():
        record_scores(cfg, f"lmms-eval {task}", task, numbers, generators[-1].opened.source.history)


def conversations_of(cfg: DataConfig) -> str | dict[str, str] | None:
    """Return the paths of the records that questions are taken from: by name of the data source, or one text."""
    return {name: source.path for name, source in cfg.sources.items()} or cfg.path


def put_comparisons(
    result: dict[str, Any], task: Task, questions: list[BenchmarkQuestion], blank_answers: list[str] | None
) -> None:
    """Add to a model's scores, in place, the number of different question texts and two accuracies, of all questions
    and of every group: that of its answers to blank images, if there are any, and that of the best blind guess."""
    if blank_answers is not None:
        blank = score_all(task, questions, blank_answers)
        of_groups = {
            (kind, name): numbers["accuracy"]
            for kind, groups in blank.get("groups", {}).items()
            for name, numbers in groups.items()
        }
        put_beside(result, BLANK, blank["accuracy"], of_groups)
    accuracy, of_groups = score_blind_guess(task, questions)
    put_beside(result, BLIND, accuracy, of_groups)
    result["question_texts"] = count_texts(questions)


def open_shard(cfg: EvaluateConfig) -> QuestionShard:
    """Select this process's GPU and its share of the questions by torchrun's environment variables.

    Raises:
        ConfigError: several processes without a file for the answers, or more processes than GPUs on this machine.
    """
    shard = QuestionShard(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    if shard.size > 1 and cfg.answers is None:
        raise ConfigError(f"{shard.size} processes collect their answers in a file; name it with answers=FILE.jsonl")
    device = read_world().device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return shard


def asks_blank(cfg: EvaluateConfig) -> bool:
    """Return whether the questions are also asked with blank images."""
    return cfg.task is Task.conversations if cfg.blank is None else cfg.blank


class BenchmarkAnswerer:
    """Generates answers, except those that the answers file already contains. The model is only loaded if answers are
    missing."""

    def __init__(self, cfg: EvaluateConfig, questions: list[BenchmarkQuestion], shard: QuestionShard):
        """Open the model's folder without loading the weights. `shard` says which questions this process answers."""
        self.cfg, self.questions, self.shard = cfg, questions, shard
        self.folders = {images: folder_of(cfg.data, images) for images in {q.images_folder for q in questions}}
        self.assistant: Answerer | None = None
        self.thoughts_cut = 0
        """Number of answers to the questions, with their own images, that ended within a thought."""
        self.opened = open_as_trained(cfg)
        self.settings: dict[str, Any] = {}  # only recorded in the answers file, which is continued with equal settings
        if cfg.answers is not None:
            self.settings = {
                "model": model_digest(cfg.model.checkpoint),
                "max_new_tokens": cfg.max_new_tokens,
                **self.opened.source.prompting,
            }

    def answers(self, blank: bool) -> list[str]:
        """Return the answers to all questions on rank 0, when all processes have written theirs, and an empty list on
        other ranks. Without `blank`, also count in `thoughts_cut` the answers that ended within a thought. With
        `blank`, every image is replaced by one whose pixels all have the mean color."""
        if self.cfg.answers is None:
            found = [answer for _, answers in self.batches(self.questions, blank) for answer in answers]
            if not blank:
                self.thoughts_cut = sum(is_cut for _, is_cut in found)
            return [text for text, _ in found]
        path = Path(self.cfg.answers)
        file = AnswersFile(
            path=blank_file(path) if blank else path,
            questions=self.questions,
            settings=self.settings | {"blank": blank},
            model_id=Path(self.cfg.model.checkpoint).resolve().name,
            shard=self.shard,
        )
        pending = file.missing_questions()
        if file.texts and self.shard.rank == 0:
            log().info("%s has %d of %d answers; continuing", file.path, len(file.texts), len(self.questions))
        if pending:
            with file.open_for_writing() as add:
                for batch, answers in self.batches(pending, blank):
                    file.thoughts_cut |= {q.number for q, (_, is_cut) in zip(batch, answers, strict=True) if is_cut}
                    add(batch, [text for text, _ in answers])
        if self.shard.rank != 0:
            return []
        file.wait()
        if not blank:
            self.thoughts_cut = len(file.thoughts_cut)
        return file.finish()

    def batches(
        self, questions: list[BenchmarkQuestion], blank: bool
    ) -> Iterator[tuple[list[BenchmarkQuestion], list[tuple[str, bool]]]]:
        """Generate answers, and yield batches: (questions, [(answer, whether it ended within a thought)]). The model is
        loaded before the first one. `blank` replaces the images by images of the mean color."""
        cfg = self.cfg
        if self.assistant is None:
            self.assistant = open_assistant(cfg.model.checkpoint, self.opened)
        show = watch_silently if env_rank() != 0 else watch
        with show("questions with blank images" if blank else "questions", len(questions)) as advance:
            for start in range(0, len(questions), cfg.batch_size):
                batch = questions[start : start + cfg.batch_size]
                paths = [with_paths(question, self.folders[question.images_folder]) for question in batch]
                try:
                    texts = self.assistant.answers(paths, cfg.max_new_tokens, blank)
                except LlavaFsdpError as error:
                    error.on_every_rank = False  # no other process has this error, so this one reports it
                    raise
                yield batch, list(zip(texts, self.assistant.thoughts_cut, strict=True))
                advance(len(batch))


def open_as_trained(cfg: EvaluateConfig) -> Opened:
    """Find the model; return its settings and files, without loading weights. Its template and image aspect ratio are
    those of its training; `data.template` and `data.image_aspect_ratio` are used only if its folder lacks them.

    Raises:
        ConfigError: `data.template` is not the template that the model was trained with.
    """
    requested, name = cfg.data.template, cfg.model.checkpoint
    opened = open_model(name, requested, cfg.data.image_aspect_ratio)
    source = opened.source
    if requested != AUTO and not same_template(requested, source.template):
        raise ConfigError(
            f"data.template={requested}: {name} was trained with data.template={source.template}, and is asked with "
            "it; leave data.template out"
        )
    settings = [f"{key}={value}" for key, value in source.prompting.items()]
    log().info("%s is asked with %s", name, " and ".join(settings))
    return opened


def same_template(requested: str, trained: str) -> bool:
    """Return whether two values of `data.template` mean the same template. `chat_template` in `requested` equals any
    chat template that comes with a model."""
    if is_own(requested) or is_own(trained):
        return requested == trained or (requested == OWN and is_own(trained))
    return template(requested) == template(trained)


def with_paths(question: BenchmarkQuestion, folder: Path | RemoteFolder) -> Question:
    """Return a question as the model is asked it, with its images: those in the record itself, others in `folder`."""
    files = [question.inline.get(name) or image_in(folder, name) for name in question.images]
    return Question(asking(question.system, question.text), files, question.where, question.tools)


def model_digest(checkpoint: str) -> str:
    """Return a digest of the names and contents of a model's files. This takes a few seconds for each 10 GB.

    In the folder of a training run, only the model is digested, because logs may still grow: the `export` folder; else
    the manifest of the newest checkpoint, which contains digests of its files; else the adapter folder.
    """
    path = Path(checkpoint)
    checkpoints = list_checkpoints(path / FOLDER)
    parts = [path / EXPORT, checkpoints[-1] if checkpoints else path, path / ADAPTER]
    folder = next((p for p in parts if p.is_dir() and (p != path or (p / MANIFEST_FILE).is_file())), path)
    if not folder.is_dir():
        folder = resolve_model(checkpoint, "model.checkpoint")
    with reading(folder):
        if (folder / MANIFEST_FILE).is_file():
            return digest_of_file(folder / MANIFEST_FILE).xxh128
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        lines = [f"{p.relative_to(folder)} {digest_of_file(p).xxh128}" for p in files]
        return xxh3_128_hexdigest("\n".join(lines).encode())


def print_result(show: int, questions: list[BenchmarkQuestion], answers: list[str], result: dict[str, Any]) -> None:
    """Print the first `show` questions with their answers, and the scores; without scores, a remark."""
    for question, answer in list(zip(questions, answers, strict=True))[:show]:
        image = shown_name(question.images[0]) if question.images else "no image"
        text, reply = (t.strip().replace("\n", "\n    ") for t in (question.text.replace(IMAGE_TAG, ""), answer))
        print(f"{image}: {text}\n  answer: {reply}")
        if question.references:
            print(f"  right:  {' | '.join(map(shown_name, dict.fromkeys(question.references)))}")
    if "accuracy" not in result:
        print(f"{len(questions)} questions answered; without right answers there are no scores")
    else:
        TextConsole(width=None if sys.stdout.isatty() else 120).print(table_of(result))
    if "mean_f1" in result:
        print(f"mean F1 of the categories: {result['mean_f1']:.2%}")
    if BLIND in result:
        print(
            "best blind guess (the answer that is right most often for each of "
            f"{result['question_texts']:,} question texts): {result[BLIND]:.2%}"
        )
    if BLANK in result:
        print(f"accuracy with blank images: {result[BLANK]:.2%}")
