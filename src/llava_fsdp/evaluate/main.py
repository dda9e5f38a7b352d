"""Ask a trained model a benchmark's questions: `python -m llava_fsdp.evaluate model.checkpoint=outputs/finetune`.

Under torchrun every process has a model of its own and asks its share of the questions.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from xxhash import xxh3_128_hexdigest

from llava_fsdp.chat.assistant import Assistant, Question
from llava_fsdp.checkpoint.manifest import MANIFEST_FILE
from llava_fsdp.config import EvaluateConfig, Format, Task, cli
from llava_fsdp.data.records.record import Turn, reading
from llava_fsdp.data.text.templates import IMAGE_TAG
from llava_fsdp.data.toy_shapes import draw_shapes
from llava_fsdp.evaluate.answers_file import Answers, Place, blank_file, check_answers_file, storing
from llava_fsdp.evaluate.check_images import check_pictures
from llava_fsdp.evaluate.question import Asked
from llava_fsdp.evaluate.read_questions import read_asked
from llava_fsdp.evaluate.results import score_all, submission_of, table_of
from llava_fsdp.evaluate.vqa import warn_of_unreachable
from llava_fsdp.model.lora_files import FOLDER as ADAPTER
from llava_fsdp.model.pretrained import EXPORT, resolve_model
from llava_fsdp.runtime.console import TextConsole
from llava_fsdp.runtime.digests import digest_of_file
from llava_fsdp.runtime.errors import ConfigError, LlavaFsdpError
from llava_fsdp.runtime.jsonl import replace_lines
from llava_fsdp.runtime.log import log
from llava_fsdp.runtime.run_dir import FOLDER, list_checkpoints
from llava_fsdp.runtime.terminal_text import shown_name

MINUTE = 60.0


def main() -> None:
    cli.run("evaluate", EvaluateConfig, evaluate)


def evaluate(cfg: EvaluateConfig) -> None:
    """Ask every question, greedily, and print what share of the answers is right."""
    place = own_place(cfg)
    if cfg.submission is not None and not Path(cfg.submission).parent.is_dir():
        raise ConfigError(f"submission={cfg.submission} is in no folder that exists; make it first")
    if cfg.task is Task.conversations:
        draw_shapes(cfg.data)
    found = read_asked(cfg)
    asked = check_pictures(found, cfg.data)
    if cfg.task is Task.vqa and place.rank == 0:
        warn_of_unreachable(asked)
    asker = Asker(cfg, asked, place)
    blanks = [False, True] if blank_too(cfg) else [False]
    answers = [asker.ask(blank) for blank in blanks]
    if place.rank != 0:
        return
    result: dict[str, Any] = {
        "checkpoint": cfg.model.checkpoint,
        "task": cfg.task.value,
        "data": cfg.data.path if cfg.task is Task.conversations else cfg.questions,
        "questions": len(asked),
        "left_out": len(found) - len(asked),
    }
    if asked[0].references:
        result |= score_all(cfg.task, asked, answers[0])
        if len(answers) > 1:
            result["accuracy_blank_pictures"] = score_all(cfg.task, asked, answers[1])["accuracy"]
    if cfg.submission is not None:
        with storing(f"submission={cfg.submission}"):
            replace_lines(Path(cfg.submission), [json.dumps(submission_of(asked, answers[0]))])
    if cfg.format is Format.json:
        print(json.dumps(result))
    else:
        show(cfg, asked, answers[0], result)


def own_place(cfg: EvaluateConfig) -> Place:
    """Of this process among torchrun's; its GPU becomes the current one.

    Raises:
        ConfigError: several processes have no file of answers to meet in, or are more than the GPUs.
    """
    place = Place(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    if place.size > 1 and cfg.answers is None:
        raise ConfigError(
            f"{place.size} processes put their answers together in a file; name it with answers=FILE.jsonl"
        )
    if torch.cuda.is_available():
        processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if processes > gpus:
            raise ConfigError(f"{processes} processes are more than the {gpus} GPUs of this machine; start {gpus}")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return place


def blank_too(cfg: EvaluateConfig) -> bool:
    return cfg.task is Task.conversations if cfg.blank is None else cfg.blank


class Asker:
    """Asks what has no answer yet, and loads the model where there is such a question."""

    def __init__(self, cfg: EvaluateConfig, asked: list[Asked], place: Place):
        self.cfg, self.asked, self.place = cfg, asked, place
        self.assistant: Assistant | None = None
        self.how: dict[str, Any] = {}
        if cfg.answers is not None:
            check_answers_file(Path(cfg.answers))
            self.how = {
                "model": model_digest(cfg.model.checkpoint),
                "max_new_tokens": cfg.max_new_tokens,
                "template": cfg.data.template,
                "image_aspect_ratio": cfg.data.image_aspect_ratio.value,
            }

    def ask(self, blank: bool) -> list[str]:
        """The answers of all processes, of the first one; of the others none: they are done when they have written.

        Args:
            blank: show pictures of the mean colour instead.
        """
        if self.cfg.answers is None:
            return [text for _, texts in self.batches(self.asked, blank) for text in texts]
        path = Path(self.cfg.answers)
        name = Path(self.cfg.model.checkpoint).resolve().name
        how = self.how | {"blank": blank}
        answers = Answers(blank_file(path) if blank else path, self.asked, how, name, self.place)
        pending = answers.pending()
        if answers.texts and self.place.rank == 0:
            log().info("%s has %d of %d answers; going on", answers.path, len(answers.texts), len(self.asked))
        if pending:
            with answers.writing() as add, answers.told_when_interrupted():
                for batch, texts in self.batches(pending, blank):
                    add(batch, texts)
        if self.place.rank != 0:
            return []
        answers.wait()
        return answers.finish()

    def batches(self, asked: list[Asked], blank: bool) -> Iterator[tuple[list[Asked], list[str]]]:
        cfg = self.cfg
        if self.assistant is None:
            self.assistant = Assistant(cfg.model.checkpoint, cfg.data.template, cfg.data.image_aspect_ratio)
        for start in shown_progress(range(0, len(asked), cfg.batch_size), len(asked), blank):
            batch = asked[start : start + cfg.batch_size]
            questions = [question_of(a, cfg.data.images) for a in batch]
            with said_by_this_process():
                texts = self.assistant.answers(questions, cfg.max_new_tokens, blank)
            yield batch, texts


@contextlib.contextmanager
def said_by_this_process() -> Iterator[None]:
    """No other process asks these questions, and finds what is wrong with them."""
    try:
        yield
    except LlavaFsdpError as error:
        error.on_every_rank = False
        raise


def question_of(asked: Asked, folder: str | None) -> Question:
    return Question([Turn("human", asked.text)], [Path(folder or ".") / n for n in asked.images], asked.where)


def model_digest(checkpoint: str) -> str:
    """Of the names and the content of a model's files: a few seconds for each 10 GB. Of a run its export counts, else
    its newest checkpoint, whose manifest has the digests of its files, else its adapter: a log may grow meanwhile."""
    given = Path(checkpoint)
    kept = list_checkpoints(given / FOLDER)
    parts = [given / EXPORT, kept[-1] if kept else given, given / ADAPTER]
    folder = next((p for p in parts if p.is_dir() and (p != given or (p / MANIFEST_FILE).is_file())), given)
    if not folder.is_dir():
        folder = resolve_model(checkpoint, "model.checkpoint")
    if (folder / MANIFEST_FILE).is_file():
        with reading(folder):
            return digest_of_file(folder / MANIFEST_FILE).xxh128
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    with reading(folder):
        return xxh3_128_hexdigest(
            "\n".join(f"{p.relative_to(folder)} {digest_of_file(p).xxh128}" for p in files).encode()
        )


def shown_progress(starts: range, questions: int, blank: bool) -> Iterable[int]:
    label = "asking, blank pictures" if blank else "asking"
    if cli.is_later_rank():
        return starts
    if sys.stderr.isatty():
        return track(starts, description=label, console=TextConsole(on_stderr=True), transient=True)
    log().info("%s: %d questions", label, questions)
    return told(starts, questions, label)


def told(starts: range, questions: int, label: str) -> Iterator[int]:
    """The same, with a line about it every minute."""
    began = last = time.monotonic()
    for start in starts:
        now = time.monotonic()
        if start and now - last >= MINUTE:
            left = (now - began) / start * (questions - start)
            log().info("%s: %d of %d, about %.0f minutes to go", label, start, questions, left / MINUTE)
            last = now
        yield start


def show(cfg: EvaluateConfig, asked: list[Asked], answers: list[str], result: dict[str, Any]) -> None:
    for question, answer in list(zip(asked, answers, strict=True))[: cfg.show]:
        picture = shown_name(question.images[0]) if question.images else "no picture"
        text, said = (own.strip().replace("\n", "\n    ") for own in (question.text.replace(IMAGE_TAG, ""), answer))
        print(f"{picture}: {text}\n  answer: {said}")
        if question.references:
            print(f"  right:  {' | '.join(map(shown_name, dict.fromkeys(question.references)))}")
    if "accuracy" not in result:
        print(f"{len(asked)} questions asked; without right answers there are no scores")
    elif cfg.task is Task.conversations:
        print(f"held-out accuracy with pictures:       {result['accuracy']:.1%} of {len(asked)} questions")
    else:
        TextConsole(width=None if sys.stdout.isatty() else 120).print(table_of(result))
    if "mean_f1" in result:
        print(f"mean F1 of the categories: {result['mean_f1']:.2%}")
    if "accuracy_blank_pictures" in result:
        print(f"held-out accuracy with blank pictures: {result['accuracy_blank_pictures']:.1%}")
