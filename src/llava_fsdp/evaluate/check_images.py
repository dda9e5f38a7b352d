"""Check that the images of a benchmark's questions exist, before a model is loaded."""

import os
from collections.abc import Iterable
from pathlib import Path

from llava_fsdp.config import DataConfig, is_remote
from llava_fsdp.data.containers.data_files import CacheFolder, DataFiles, RemoteFolder, open_folder
from llava_fsdp.data.containers.remote import RemoteStorage
from llava_fsdp.data.images.check import check_links
from llava_fsdp.data.records.record import IMAGE_TAG
from llava_fsdp.evaluate.question import BenchmarkQuestion
from llava_fsdp.runtime.errors import DataError


def check_images(questions: Iterable[BenchmarkQuestion], cfg: DataConfig) -> None:
    """Check that every question has an `<image>` tag for each of its images, and that the images exist in the folder of
    `data.images` or of the question's data source. Damaged images are only detected when they are read.

    Raises:
        DataError: a question has more or fewer tags than images, or an image does not exist or is outside its folder.
        SourceError: the storage of a remote folder does not answer, or refuses.
    """
    if cfg.images is not None and not is_remote(cfg.images) and not Path(cfg.images).is_dir():
        raise DataError(f"data.images={cfg.images} is not a folder; give the one that the questions' images are in")
    remote: dict[str, str] = {}
    folders: dict[str | None, tuple[Path | RemoteFolder, str]] = {}
    for question in (question for question in questions if question.images):
        images = question.images_folder or cfg.images
        if images not in folders:
            folders[images] = folder_of(cfg, images), os.path.realpath(images or ".")
        folder, real_folder = folders[images]
        outside = [name for name in question.images if name not in question.inline]
        if images is None and outside:
            raise DataError(f"{question.where} has image {outside[0]}, and data.images is not set")
        tags = question.text.count(IMAGE_TAG)
        if tags != len(question.images):
            raise DataError(
                f"{question.where}: {tags} {IMAGE_TAG} tags for {len(question.images)} images; give each one tag"
            )
        if isinstance(folder, RemoteFolder):
            remote |= {folder.location(name).file: question.where for name in outside}
            continue
        for path in (folder / name for name in outside):
            check_links(path, question.where, real_folder, cfg.allow_links)
            if not path.is_file():
                raise not_there(question.where, path)
    for url, file in RemoteStorage().stat_files(remote).items():
        if file is None:
            raise not_there(remote[url], url)


def folder_of(cfg: DataConfig, images: str | None = None) -> Path | RemoteFolder:
    """Return a folder of images, local or remote. `images` is its path or URL; None: `data.images`. If that is not set
    either, questions have no images, and the current folder is returned."""
    cache = CacheFolder(cfg.cache_folder / "images", cfg.cache_gb)
    return open_folder(images or cfg.images or ".", DataFiles(cache=cache))


def not_there(where: str, image: Path | str) -> DataError:
    return DataError(f"{where}: image {image} does not exist; is its folder of images right?")
