"""The pictures of questions, looked at before a model is loaded."""

from pathlib import Path

from llava_fsdp.config import BadRecords, DataConfig
from llava_fsdp.data.images.check import check_links, look_at, real
from llava_fsdp.data.text.templates import IMAGE_TAG
from llava_fsdp.evaluate.question import Asked
from llava_fsdp.runtime.errors import DataError, ImageError
from llava_fsdp.runtime.launch import env_rank
from llava_fsdp.runtime.log import log

NAMED = 5
"""Records named in a message."""


def check_pictures(asked: list[Asked], cfg: DataConfig) -> list[Asked]:
    """The questions whose pictures can be shown.

    With data.bad_records=fail it is looked whether every picture is there,
    and what it holds when it is asked about. With
    data.bad_records=skip every picture is read, by data.examine, and questions whose pictures are bad are left out.

    Raises:
        DataError: data.images is not set, or a question has not one tag for every picture; with fail, a picture is
            missing or outside; with skip, more are bad than data.max_bad_records allows.
    """
    if cfg.images is not None and not Path(cfg.images).is_dir():
        raise DataError(f"data.images={cfg.images} is not a folder; give the one that the questions' pictures are in")
    folder = real(cfg.images or ".")
    bad = {a.number: why for a in asked if (why := problem_of(a, cfg, folder)) is not None}
    if not bad:
        return asked
    listed = "\n".join(["", *list(bad.values())[:NAMED], *(["..."] if len(bad) > NAMED else [])])
    if cfg.bad_records is BadRecords.fail:
        raise DataError(
            f"{len(bad)} of {len(asked)} questions have a picture that cannot be shown; is data.images right? "
            f"data.bad_records=skip leaves them out:{listed}"
        )
    if len(bad) > cfg.budget(len(asked)) or len(bad) == len(asked):
        raise DataError(
            f"{len(bad)} of {len(asked)} questions have a picture that cannot be shown, and data.max_bad_records="
            f"{cfg.max_bad_records} allows {cfg.budget(len(asked))}; mend them, or raise it:{listed}"
        )
    if env_rank() == 0:
        log().warning("%d of %d questions are left out, also of the scores:%s", len(bad), len(asked), listed)
    return [a for a in asked if a.number not in bad]


def problem_of(asked: Asked, cfg: DataConfig, real_folder: str) -> str | None:
    """What is wrong with the first bad picture of a question."""
    if asked.images and cfg.images is None:
        raise DataError(f"{asked.where} has picture {asked.images[0]}, and data.images is not set")
    tags = asked.text.count(IMAGE_TAG)
    if asked.images and tags != len(asked.images):
        raise DataError(f"{asked.where}: {tags} {IMAGE_TAG} tags for {len(asked.images)} pictures; give each one tag")
    try:
        for name in asked.images:
            look(Path(cfg.images or "."), name, cfg, real_folder)
    except ImageError as error:
        return f"  {asked.where}: {error}"
    return None


def look(folder: Path, name: str, cfg: DataConfig, real_folder: str) -> None:
    if cfg.bad_records is BadRecords.skip:
        look_at(folder, name, real_folder, cfg.examine, scaled=True, allow_links=cfg.allow_links)
        return
    check_links(folder / name, real_folder, cfg.allow_links)
    if not (folder / name).is_file():
        raise ImageError(f"picture {folder / name} does not exist")
