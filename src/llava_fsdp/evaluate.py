"""Ask a trained model questions with known answers: `llava_fsdp.evaluate model.checkpoint=outputs/finetune`."""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from llava_fsdp import cli
from llava_fsdp.log import leave_noise_out, log

if __name__ == "__main__":  # before transformers is imported
    leave_noise_out()

from llava_fsdp.answer import Assistant, Question
from llava_fsdp.config import EvaluateConfig, Format
from llava_fsdp.data.conversation import asked_turns, image_first
from llava_fsdp.data.recordfile import RecordFile
from llava_fsdp.data.source import Record, Turn
from llava_fsdp.data.templates import IMAGE_TAG
from llava_fsdp.data.texts import sources_of
from llava_fsdp.errors import ConfigError, DataError
from llava_fsdp.opening import draw_shapes


def main() -> None:
    cli.run("evaluate", EvaluateConfig, evaluate)


def evaluate(cfg: EvaluateConfig) -> None:
    """Print the share of first questions whose greedy answer is the record's, with pictures and with blank ones."""
    draw_shapes(cfg.data)
    if cfg.data.sources:
        raise ConfigError("evaluate asks the questions of one file: name it with data.path, without data.sources")
    (source,) = sources_of(cfg.data)
    records = RecordFile(Path(source.path))
    asked = [records[i] for i in range(min(len(records), cfg.limit or len(records)))]
    questions, references = zip(*(first_question(r, source.images) for r in asked), strict=True)
    assistant = Assistant(cfg.model.checkpoint, cfg.data.template, cfg.data.image_aspect_ratio)

    answers = ask_all(assistant, list(questions), cfg, blank=False)
    result: dict[str, object] = {"checkpoint": cfg.model.checkpoint, "data": source.path, "questions": len(asked)}
    result["accuracy"] = share_right(answers, list(references))
    if cfg.blank:
        blank = ask_all(assistant, list(questions), cfg, blank=True)
        result["accuracy_blank_pictures"] = share_right(blank, list(references))
    if cfg.format is Format.json:
        print(json.dumps(result))
        return
    for question, answer, reference in list(zip(questions, answers, references, strict=True))[: cfg.show]:
        shown = question.turns[-1].text.replace(IMAGE_TAG, "").strip()
        picture = question.images[0].name if question.images else "no picture"
        print(f"{picture}: {shown}\n  answer: {answer}\n  right:  {reference}")
    print(f"held-out accuracy with pictures:       {result['accuracy']:.1%} of {len(asked)} questions")
    if cfg.blank:
        print(f"held-out accuracy with blank pictures: {result['accuracy_blank_pictures']:.1%}")


def first_question(record: Record, images: str | None) -> tuple[Question, str]:
    turns = asked_turns(record)
    if [t.role for t in turns[:2]] != ["human", "gpt"]:
        raise DataError(f"{record.where}: it must begin with a question (human) and its answer (gpt)")
    if record.images and images is None:
        raise DataError(f"{record.where} has picture {record.images[0]}, and data.images is not set")
    text = image_first(turns[0].text, bool(record.images))
    paths = [Path(images or ".") / name for name in record.images[: text.count(IMAGE_TAG)]]
    return Question([Turn("human", text)], paths, record.where), turns[1].text


def ask_all(assistant: Assistant, questions: list[Question], cfg: EvaluateConfig, blank: bool) -> list[str]:
    starts = range(0, len(questions), cfg.batch_size)
    label = "asking, blank pictures" if blank else "asking"
    if sys.stderr.isatty():
        starts = track(starts, description=label, console=Console(stderr=True), transient=True)
    else:
        log().info("%s: %d questions", label, len(questions))
    return [
        answer
        for start in starts
        for answer in assistant.answers(questions[start : start + cfg.batch_size], cfg.max_new_tokens, blank)
    ]


def share_right(answers: list[str], references: list[str]) -> float:
    right = sum(a.strip().lower() == r.strip().lower() for a, r in zip(answers, references, strict=True))
    return right / len(answers)


if __name__ == "__main__":
    main()
