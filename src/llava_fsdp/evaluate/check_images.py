"""Check the images of benchmark questions before a model is loaded."""

from pathlib import Path

from llava_fsdp.config import BadRecords, DataConfig
from llava_fsdp.data.images.check import check_links, look_at, real
from llava_fsdp.data.text.templates import IMAGE_TAG
from llava_fsdp.evaluate.question import BenchmarkQuestion
from llava_fsdp.runtime.errors import DataError, ImageError
from llava_fsdp.runtime.launch import env_rank
from llava_fsdp.runtime.log import log

MAX_LISTED = 5
"""Greatest number of questions that an error message lists."""


def check_images(questions: list[BenchmarkQuestion], cfg: DataConfig) -> list[BenchmarkQuestion]:
    """Check the images of all questions, and return the questions without bad images.

    With data.bad_records=fail only the images' existence is checked; damaged ones are found later, when they are read.
    With data.bad_records=skip every image is read, as far as data.examine says, and questions with bad ones are left
    out.

    Raises:
        DataError: data.images is not set, or a question has not one tag for each image; with fail, an image is missing
            or outside data.images; with skip, more questions are bad than data.max_bad_records allows.
    """
    if cfg.images is not None and not Path(cfg.images).is_dir():
        raise DataError(f"data.images={cfg.images} is not a folder; give the one that the questions' images are in")
    folder = real(cfg.images or ".")
    bad = {q.number: problem for q in questions if (problem := first_problem(q, cfg, folder)) is not None}
    if not bad:
        return questions
    listed = "\n".join(["", *list(bad.values())[:MAX_LISTED], *(["..."] if len(bad) > MAX_LISTED else [])])
    count = f"{len(bad)} of {len(questions)} questions have an image that cannot be shown"
    if cfg.bad_records is BadRecords.fail:
        raise DataError(f"{count}; is data.images right? data.bad_records=skip leaves them out:{listed}")
    if len(bad) > cfg.budget(len(questions)) or len(bad) == len(questions):
        raise DataError(
            f"{count}, and data.max_bad_records={cfg.max_bad_records} allows {cfg.budget(len(questions))}; fix them, "
            f"or raise it:{listed}"
        )
    if env_rank() == 0:
        log().warning("%d of %d questions are left out, also of the scores:%s", len(bad), len(questions), listed)
    return [q for q in questions if q.number not in bad]


def first_problem(question: BenchmarkQuestion, cfg: DataConfig, real_folder: str) -> str | None:
    """Return a message about the first bad image of a question; None if all its images are good."""
    if question.images and cfg.images is None:
        raise DataError(f"{question.where} has image {question.images[0]}, and data.images is not set")
    tags = question.text.count(IMAGE_TAG)
    if question.images and tags != len(question.images):
        raise DataError(
            f"{question.where}: {tags} {IMAGE_TAG} tags for {len(question.images)} images; give each one tag"
        )
    folder = Path(cfg.images or ".")
    try:
        for name in question.images:
            if cfg.bad_records is BadRecords.skip:
                look_at(folder, name, real_folder, cfg.examine, scaled=True, allow_links=cfg.allow_links)
                continue
            check_links(folder / name, real_folder, cfg.allow_links)
            if not (folder / name).is_file():
                raise ImageError(f"image {folder / name} does not exist")
    except ImageError as error:
        return f"  {question.where}: {error}"
    return None
