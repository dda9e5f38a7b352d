"""Push an exported folder to the Hugging Face hub: `llava-fsdp export source=... push=USER/NAME`.

A push is one commit, so the hub never has a part of a model. After an interruption the same command sends only those
large files that the hub lacks. Endpoint and token are those of huggingface_hub (`HF_ENDPOINT`, `HF_TOKEN`, `hf auth
login`).
"""

import json
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llava_fsdp.export.card.history import BASE
from llava_fsdp.export.card.model_card import WRITTEN, model_card
from llava_fsdp.model.sources.pretrained import HUB_NAME, public_name
from llava_fsdp.runtime.errors import ConfigError, HubError, ModelError
from llava_fsdp.runtime.files.provenance import (
    FILES,
    LOADED_NAMES,
    NOTES,
    README,
    check_folder,
    files_of,
    is_older,
    read_notes,
    render,
)
from llava_fsdp.runtime.files.safe_load import SMALL
from llava_fsdp.runtime.files.scores_file import read_scores
from llava_fsdp.runtime.files.small_json import object_or_none
from llava_fsdp.runtime.text.humanize import readable
from llava_fsdp.runtime.text.log import log
from llava_fsdp.version import __version__

SHARD = re.compile(r"(model|pytorch_model|adapter_model)-\d+-of-\d+\.(safetensors|bin)")
SECRETS = re.compile(rb"\bhf_[A-Za-z0-9]{30,}|\bAKIA[0-9A-Z]{16}\b")
"""Tokens of the hub, and keys of Amazon's cloud."""
SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|API_KEY")
"""Pattern for the names of environment variables with secrets."""
LEAST_SECRET = 8
"""Least number of characters of a variable's value that counts as a secret."""
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "model.gguf")
"""Files with a vocabulary, which may contain any text."""
PATH = re.compile(r"(~|file://|[A-Za-z]:)?[/\\][^\n/\\]+[/\\][^\n]+")
"""Pattern for an absolute path of at least two parts, or of one in the home folder."""
MODEL_KEYS = ("language", "vision", "checkpoint", "projector")
"""Keys in the notes whose values name models."""
SEARCHED = 16 << 20
"""Number of bytes at the beginning of a file of more than `SMALL` bytes that are searched: its header is there."""
ACCESS_CODES = (401, 403, 404)


@dataclass(frozen=True)
class HubPlace:
    """A model repository on the hub, and a branch of it; None: the main branch."""

    name: str
    branch: str | None

    def __str__(self) -> str:
        return self.name if self.branch is None else f"{self.name}@{self.branch}"


def check_address(address: str) -> HubPlace:
    """Return the place on the hub that `push` names: USER/NAME or USER/NAME@BRANCH. Raises ConfigError."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    name, _, branch = address.partition("@")
    try:
        validate_repo_id(name)
        is_name = HUB_NAME.fullmatch(name) is not None and not address.endswith("@")
    except HFValidationError:
        is_name = False
    if not is_name:
        raise ConfigError(f"push={address} is not a name on the hub; give USER/NAME or USER/NAME@BRANCH")
    return HubPlace(name, branch or None)


def open_hub(place: HubPlace) -> Any:
    """Return the hub's client, after asking the hub who the user is. Raises ConfigError if the token may only read, or
    the place's owner is neither the user nor one of the user's organizations, and HubError if it fails."""
    from huggingface_hub import HfApi

    api = HfApi()
    with hub_errors(place, "nothing was written"):
        user = api.whoami()
    names = [user["name"], *(group["name"] for group in user.get("orgs", []))]
    owner = place.name.partition("/")[0]
    if owner not in names:
        raise ConfigError(f"push={place.name}: the token is of {names[0]}, who is not in {owner}; give one of {names}")
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ConfigError(f"push={place.name}: the token of {names[0]} may only read; make one that may write")
    return api


def push_folder(folder: Path, place: HubPlace, api: Any, private: bool, run: Path | None) -> None:
    """Push the files that the notes of an exported folder list, its model card and its notes. The card gets the name of
    the place and the scores in the run's `results.json`. Paths of this machine in the notes are cut to names.

    Args:
        api: client of the hub (`HfApi`).
        private: whether only the owner can see a repository that is new.
        run: output folder of the training that made the model; None if it is not known.

    Raises:
        ModelError: a file was changed, or holds a secret or a path of this machine.
        ConfigError: the hub refuses this user, or has another model at this place.
        HubError: the hub cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    check_folder(folder)
    files = files_to_push(folder, place, [] if run is None else read_scores(run))
    refuse_secrets(files, folder)
    words = [f"source={folder}", f"push={place}", *([] if private else ["push_private=false"])]
    again = f"{folder} is complete; to push it again: llava-fsdp export {' '.join(map(shlex.quote, words))}"
    size = readable(sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in files.values()))
    log().info("pushing %s (%s) to %s", folder, size, place.name)
    with hub_errors(place, again):
        api.create_repo(place.name, private=private, exist_ok=True)
        refuse_other_model(api.list_repo_files(place.name), place)
        if place.branch is not None:
            api.create_branch(place.name, branch=place.branch, exist_ok=True)
        stale = stale_files(api, place, files)
        if stale:
            log().info("removing files of an earlier push from %s: %s", place, ", ".join(stale))
        add = [CommitOperationAdd(name, file) for name, file in files.items()]
        commit = api.create_commit(
            place.name, [*add, *(CommitOperationDelete(name) for name in stale)], revision=place.branch,
            commit_message=f"Model exported by llava_fsdp {__version__}",
        )  # fmt: skip
    log().info("pushed %s (%s): %s", folder, size, commit.commit_url)


def files_to_push(folder: Path, place: HubPlace, scores: Sequence[Mapping[str, Any]]) -> dict[str, Path | bytes]:
    """Return the files of an exported folder as the hub gets them: name -> the file, or its content if that is made
    anew. `scores`: entries of the run's `results.json`. Raises ModelError if the folder's notes list no files."""
    notes = read_notes(folder)
    listed = files_of(notes, folder)
    if not listed or is_older(notes):
        raise ModelError(
            f"{folder / NOTES} does not list the files to push; to list them as they are now: "
            f"llava-fsdp export source={shlex.quote(str(folder))} 'accept=[{NOTES}]'"
        )
    bases = notes.get("recipe", {}).get(BASE)
    # `public` cuts paths of this machine to their last names; `bases` tells such paths from names on the hub
    shown = {key: public(value, key, bases) for key, value in notes.items() if key != FILES}
    files: dict[str, Path | bytes] = {name: folder / name for name in listed}
    card = (folder / README).read_text() if (folder / README).is_file() else WRITTEN
    if WRITTEN in card:  # the user has not edited the card
        card = model_card(folder, notes, place.name, scores)
    return {**files, README: card.encode(), NOTES: render(shown, listed)}


def public(value: Any, key: str, bases: list[str] | None) -> Any:
    """Return a value of the notes. Absolute paths, and local paths under MODEL_KEYS, are cut to their last name.

    Args:
        key: key of the value. The values of MODEL_KEYS name models, by folders or names on the hub.
        bases: public names of the models that a training began with, by which folders are told from names on the hub;
            None if they are not known.
    """
    if isinstance(value, dict):
        return {inner: public(part, inner, bases) for inner, part in value.items()}
    if isinstance(value, list):
        return [public(part, key, bases) for part in value]
    if not isinstance(value, str) or "/" not in value:
        return value
    if key in MODEL_KEYS:
        if bases is None:
            return public_name(value)
        return value if value in bases else Path(value).name
    return Path(value).name if is_path(value) else value


def is_path(text: str) -> bool:
    """Return whether a text is an absolute path of at least two parts."""
    return PATH.fullmatch(text) is not None


def refuse_other_model(there: Collection[str], place: HubPlace) -> None:
    """Raise ConfigError if the files `there`, of a repository on the hub, are of a model not pushed by llava_fsdp."""
    loaded = sorted(filter(is_loaded, there))
    if loaded and NOTES not in there:
        raise ConfigError(
            f"push={place} would change another model, which has {loaded[0]} and no {NOTES}; give another name"
        )


def is_loaded(name: str) -> bool:
    """Return whether programs would load a file as part of a model."""
    return name in LOADED_NAMES or SHARD.fullmatch(name) is not None


def stale_files(api: Any, place: HubPlace, files: Mapping[str, Any]) -> list[str]:
    """Return the names of files on the hub that an earlier push has written and this one does not write, or that
    programs would load with the pushed model, such as shards. Raise ConfigError if there is another model."""
    there = set(api.list_repo_files(place.name, revision=place.branch))
    refuse_other_model(there, place)
    before: set[str] = set()
    if NOTES in there:
        with TemporaryDirectory() as made:
            got = api.hf_hub_download(place.name, NOTES, revision=place.branch, local_dir=made)
            before = {*(object_or_none(Path(got)) or {}).get(FILES, {})}
    return sorted(name for name in there - files.keys() if name in before or is_loaded(name))


def refuse_secrets(files: Mapping[str, Path | bytes], folder: Path) -> None:
    """Raise ModelError if a file that is to be pushed holds a secret or a path of this machine.

    Secrets are tokens of the hub, keys of Amazon's cloud, and the values of environment variables with names like
    `..._TOKEN`. Paths are the folder, the one above it, the working directory, the home folder, and in JSON files any
    absolute path. Vocabularies can contain any text, so they are searched for tokens and keys alone.
    """
    secrets = {name: value for name, value in os.environ.items() if SECRET_NAMES.search(name.upper())}
    secrets = {name: in_files(value) for name, value in secrets.items() if len(value) >= LEAST_SECRET}
    paths = [str(path) for path in (folder.resolve(), folder.resolve().parent, Path.cwd()) if len(path.parts) > 2]
    paths += [f"{Path.home()}/"] if len(Path.home().parts) > 1 else []
    for name, file in files.items():
        content = file if isinstance(file, bytes) else beginning_of(file)
        held = "a token or a key of a cloud" if SECRETS.search(content) else None
        if held is None and name not in VOCABULARIES:
            variables = (key for key, forms in secrets.items() if any(form in content for form in forms))
            held = next((f"the value of {key}" for key in variables), None)
            held = held or next((path for path in paths if any(form in content for form in in_files(path))), None)
            held = held or (path_in_json(content) if name.endswith(".json") else None)
        if held is not None:
            accept = f", and accept the change: llava-fsdp export source={shlex.quote(str(folder))} 'accept=[{name}]'"
            raise ModelError(
                f"{folder / name} holds {held}, which readers of the repository would see; nothing was pushed. Take it "
                + "out"
                + ("" if name == README else accept)
            )


def in_files(text: str) -> set[bytes]:
    """Return the forms that a text has in files: as it is, and as in JSON."""
    return {text.encode(), json.dumps(text)[1:-1].encode()}


def path_in_json(content: bytes) -> str | None:
    """Return the first text in a JSON file that is an absolute path, and None without one."""
    try:
        left: list[Any] = [json.loads(content)]
    except (ValueError, RecursionError):
        return None
    while left:
        value = left.pop()
        if isinstance(value, str) and is_path(value):
            return value
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return None


def beginning_of(file: Path) -> bytes:
    """Return the content of a file, or the beginning of a large one."""
    with file.open("rb") as handle:
        return handle.read(SMALL if file.stat().st_size <= SMALL else SEARCHED)


@contextmanager
def hub_errors(place: HubPlace, again: str) -> Iterator[None]:
    """Context manager that converts errors of huggingface_hub. `again`: end of the message, which says what was written
    and what to do. Raises ConfigError if the hub refuses this user, else HubError."""
    from huggingface_hub import errors

    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise ConfigError(f"push={place.name}: HF_HUB_OFFLINE is set; {again}") from error
    except (OSError, ValueError, RuntimeError, errors.HTTPError) as error:
        answer = getattr(error, "response", None)
        code = None if answer is None else answer.status_code
        if isinstance(error, errors.LocalTokenNotFoundError) or code in ACCESS_CODES:
            raise ConfigError(
                f"push={place.name}: the hub refuses this user ({' '.join(str(error).split())[:300]}); log in with `hf "
                f"auth login`, or set HF_TOKEN to a token that may write there; {again}"
            ) from error
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise HubError(f"push={place.name}: the push failed ({why}); {again}") from error
