"""Find the files of records that ms-swift, LLaMA-Factory and TRL train on, as `data.path` takes them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from llava_fsdp.migrate.source.source_run import SourceRun
from llava_fsdp.migrate.source.trainers import Trainer

DATASET_INFO = "dataset_info.json"
"""Name of the file in which LLaMA-Factory describes its datasets."""
READ = frozenset([".json", ".jsonl", ".ndjson", ".parquet"])
"""Suffixes of files of records that are read here and by the trainers."""
SPEAKERS = frozenset(["human", "user", "gpt", "assistant", "model", "chatgpt", "bing", "bard"])
"""Names of speakers in records that are read here."""
HUB_FOLDER = "the folder to which push_to_hub writes; check it on the dataset's page"


@dataclass(frozen=True)
class RecordFiles:
    """Files of records of a run; or, in `problem`, why they are not known or not read."""

    paths: tuple[str, ...] = ()
    problem: str = ""
    image_column: str | None = None
    """Key of the images in a record, if it is neither `image` nor `images`."""
    note: str = ""


def records_of(run: SourceRun, is_held_out: bool = False) -> RecordFiles:
    """Return the files of records that the run of a trainer trains on; with `is_held_out`, those of its validation."""
    if run.trainer is Trainer.swift:
        return swift_records(run, "val_dataset" if is_held_out else "dataset")
    if run.trainer is Trainer.factory:
        return factory_records(run, "eval_dataset" if is_held_out else "dataset")
    return trl_records(run, is_held_out)


def image_folder(run: SourceRun) -> str | None:
    """Return the folder to which paths of images in records are relative; None for TRL, which has no such flag."""
    if run.trainer is Trainer.swift:  # docs of ms-swift: the environment variable, or the current folder
        return str(run.launch.flags.get("ROOT_IMAGE_DIR", "."))
    if run.trainer is Trainer.factory:
        return str(run.trainer_value("media_dir") or run.trainer_value("dataset_dir"))
    return None


def is_local(name: str) -> bool:
    """Whether a dataset's name is a path: with a suffix of a file of records, or one that no name of a hub has."""
    return PurePosixPath(name).suffix in READ or name.startswith(("/", ".", "~")) or name.count("/") != 1


def hub_path(name: str, split: str, subset: str | None = None) -> str:
    """Return the pattern of the Parquet files of a split of a dataset on Hugging Face's hub."""
    return f"hf://datasets/{name}/{subset or 'data'}/{split}-*"


def swift_records(run: SourceRun, flag: str) -> RecordFiles:
    """Return the files of records that ms-swift's flag `flag` names (--dataset or --val_dataset), by paths or by names
    of datasets as `NAME:SUBSET#COUNT`."""
    found = []
    for name in run.words(flag):
        if "#" in name:
            return RecordFiles(problem=f"{name}: a sample of {name.partition('#')[2]} records is not taken; write them "
                           "into a file of their own")  # fmt: skip
        if PurePosixPath(name).suffix in READ:
            found.append(name)
        elif is_local(name) and ":" not in name:
            return RecordFiles(problem=f"{name}: give files of records, .json, .jsonl or .parquet, as data.path")
        elif run.trainer_value("use_hf") or "USE_HF" in run.launch.flags:
            plain, _, subset = name.partition(":")
            found.append(hub_path(plain, "train", subset or None))
        else:
            elsewhere = hub_path(name.partition(":")[0], "train")
            return RecordFiles(problem=f"{name} is a name of ModelScope: download it and give data.path=FILE, or "
                           f"data.path='{elsewhere}' if Hugging Face has it")  # fmt: skip
    return RecordFiles(tuple(found), note=HUB_FOLDER if any(path.startswith("hf:") for path in found) else "")


def trl_records(run: SourceRun, is_held_out: bool) -> RecordFiles:
    """Return the records that TRL's --dataset_name names: a folder, or a split of a dataset on Hugging Face's hub."""
    name = run.trainer_value("dataset_name")
    if not name:
        return RecordFiles()
    split = str(run.trainer_value("dataset_test_split" if is_held_out else "dataset_train_split"))
    if not re.fullmatch(r"[\w.-]+", split):
        return RecordFiles(problem=f"the split {split} is a part of the records: write them into a file of their own")
    if is_local(str(name)):
        if is_held_out:
            return RecordFiles(problem=f"give val.path=FILE: which files of {name} are its split {split} is not known")
        return RecordFiles((str(name),))
    subset = run.trainer_value("dataset_config")
    return RecordFiles((hub_path(str(name), split, str(subset) if subset else None),), note=HUB_FOLDER)


def factory_records(run: SourceRun, flag: str) -> RecordFiles:
    """Return the files of records that LLaMA-Factory's flag `flag` names (--dataset or --eval_dataset), by their names
    in dataset_info.json, separated by commas."""
    names = [name.strip() for word in run.words(flag) for name in word.split(",") if name.strip()]
    if not names:
        return RecordFiles()
    if run.datasets is None:
        return RecordFiles(problem=f"{DATASET_INFO} was not found: give it as another PATH")
    folder = str(run.trainer_value("dataset_dir"))
    paths, columns = [], set()
    for name in names:
        entry = {
            key[len(name) + 1 :]: value for key, value in run.datasets.values.items() if key.startswith(f"{name}.")
        }
        if not entry:
            return RecordFiles(problem=f"{run.datasets.name} has no {name}")
        if problem := unread(entry):
            return RecordFiles(problem=f"{name}: {problem}")
        if hub := entry.get("hf_hub_url"):
            subset = entry.get("subset")
            paths.append(hub_path(str(hub), str(entry.get("split", "train")), str(subset) if subset else None))
        else:
            paths.append(str(PurePosixPath(folder) / str(entry["file_name"])))
        columns.add(entry.get("columns.images"))
    others = {str(column) for column in columns if column} - {"image", "images"}
    if len(others) > 1:
        return RecordFiles(problem=f"images are in the keys {', '.join(sorted(others))}; data.image_column names one")
    is_hub = any(path.startswith("hf:") for path in paths)
    return RecordFiles(tuple(paths), image_column=next(iter(others), None), note=HUB_FOLDER if is_hub else "")


def unread(dataset: Mapping[str, object]) -> str:
    """Return why the records that an entry of dataset_info.json describes are not read; empty if they are. The defaults
    are those of LLaMA-Factory's data/parser.py."""
    if not {"file_name", "hf_hub_url"} & dataset.keys():
        return "an entry needs file_name or hf_hub_url"
    form = dataset.get("formatting", "alpaca")
    if form not in ("sharegpt", "openai"):
        return f"{form} records (instruction, input, output) are not read; write them as messages"
    for key in ("ranking", "folder", "num_samples"):
        if dataset.get(key):
            return f"{key} has no equivalent; write the records that are to be trained on into a file of their own"
    for column in ("system", "tools", "videos", "audios", "chosen", "rejected", "kto_tag"):
        if dataset.get(f"columns.{column}"):
            return f"the column {dataset[f'columns.{column}']} for {column} is not read"
    messages = dataset.get("columns.messages", "conversations")
    if messages not in ("messages", "conversations"):
        return f"turns are read from the keys messages and conversations, not from {messages}"
    turn = (dataset.get("tags.role_tag", "from"), dataset.get("tags.content_tag", "value"))
    if form == "sharegpt" and turn not in (("from", "value"), ("role", "content")):
        return f"turns have the keys from and value, or role and content, not {turn[0]} and {turn[1]}"
    speakers = (dataset.get("tags.user_tag", "human"), dataset.get("tags.assistant_tag", "gpt"))
    strange = [str(name) for name in speakers if name not in SPEAKERS]
    return f"{', '.join(strange)}: speakers are named {', '.join(sorted(SPEAKERS))}" if strange else ""
