"""Read a GGUF file as a language model: transformers dequantizes it once, into a model folder in a cache."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import is_accelerate_available
from transformers.utils.import_utils import is_gguf_available
from xxhash import xxh3_128_hexdigest

from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.runtime.files.os_errors import why
from llava_fsdp.runtime.files.safe_load import library_errors
from llava_fsdp.runtime.text.log import log

LANGUAGE_KEYS = ("model.language", "language", "base")
"""Configuration keys that name a language model."""


def is_gguf(name: str) -> bool:
    """Return whether the value of a key is the path of a GGUF file."""
    return name.endswith(".gguf") and Path(name).is_file()


def folder_of_gguf(file: Path, key: str) -> Path:
    """Return a model folder of transformers with the language model and the tokenizer of a GGUF file, as transformers
    reads it (https://huggingface.co/docs/transformers/gguf). The weights are float32. The folder is written once, into
    `llava_fsdp/gguf` in `XDG_CACHE_HOME` (default: `~/.cache`); other processes of this machine wait for it.

    Args:
        key: the configuration key that names the file.

    Raises:
        ConfigError: `key` names no language model, a package is missing, or the folder cannot be written.
        ModelError: transformers cannot read the file.
    """
    if key not in LANGUAGE_KEYS:
        raise ConfigError(f"{key}={file}: a GGUF file is read as a language model alone ({LANGUAGE_KEYS[0]})")
    if not is_gguf_available() or not is_accelerate_available():
        raise ConfigError(f"{key}={file} needs the packages gguf and accelerate: pip install 'llava-fsdp[gguf]'")
    status = file.stat()
    version = xxh3_128_hexdigest(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}".encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llava_fsdp" / "gguf"
    final = folder / f"{file.stem}-{version[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f"{final.name}.lock"):
            if not final.is_dir():
                convert(file, final, key)
    except OSError as error:
        raise ConfigError(f"{key}={file}: {final} cannot be written: {why(error, folder)}") from error
    return final


def convert(file: Path, final: Path, key: str) -> None:
    """Write the model folder `final` for a GGUF file."""
    log().info("%s=%s: dequantizing it into %s, once", key, file, final)
    staged = final.with_name(f"{final.name}.tmp")
    shutil.rmtree(staged, ignore_errors=True)
    # a folder with the file alone: transformers would also load an adapter or a tokenizer that lies beside it
    with TemporaryDirectory(prefix="llava_fsdp-") as folder:
        (Path(folder) / file.name).symlink_to(file.resolve())
        with library_errors(f"{key}={file}: transformers cannot read this GGUF file", ModelError):
            tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, gguf_file=file.name, trust_remote_code=False, local_files_only=True
            )
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False, local_files_only=True,
                **dequantize_argument(),
            )  # fmt: skip
    try:
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        staged.rename(final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise ConfigError(f"{key}={file}: {staged} cannot be written: {error}") from error


def dequantize_argument() -> dict[str, Any]:
    """Return the keyword argument that makes transformers dequantize the weights; earlier versions always do."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context manager in which no other process of this machine holds the lock file `path`."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
