"""A processor of transformers: it replaces the placeholders of images in a text by the images' tokens, and makes the
inputs of the vision part.

The processor of a model is the authority on both. What it does to a text is learnt by running it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from llava_fsdp.data.images.anyres import Size
from llava_fsdp.data.text.tokenizer import read_optional
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.safe_load import library_errors, refuse_model_code

FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json")
"""Files in which a model folder could name Python code of its own."""
SETTINGS = ("preprocessor_config.json", "processor_config.json")
NEEDS = "pip install 'llava-fsdp[any]'"
TYPES = "token_type_ids"
"""Ending of the names of the processor's outputs that say of each token what it stands for, such as
`mm_token_type_ids`."""
TEXT_OUTPUTS = ("input_ids", "attention_mask", "labels", "offset_mapping", "text_replacement_offsets")


class Recorder:
    """Stands in the place of a processor's tokenizer, and remembers the text that it was last called with: the text in
    which the processor has replaced the placeholders of images."""

    def __init__(self, tokenizer: Any):
        self.inner = tokenizer
        self.last: Any = None

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, while a copy is made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.last = text
        return self.inner(text, *args, **kwargs)


@dataclass(frozen=True)
class Processed:
    """What a processor makes of texts with images."""

    ids: list[np.ndarray]
    """Token ids of each text, int64 [length]."""
    types: list[dict[str, torch.Tensor]]
    """For each text, the types of its tokens by their names, int64 [length]."""
    pixels: dict[str, torch.Tensor]
    """The inputs of the vision part for all images together, by the processor's names; floats are float32."""


@dataclass(frozen=True)
class Processor:
    """The processor in a model's folder. A process opens it when it first needs it, so that copies for other processes
    are small."""

    folder: Path

    def __reduce__(self) -> tuple:
        return Processor, (self.folder,)

    @cached_property
    def opened(self) -> Any:
        """The processor, with a Recorder in the place of its tokenizer."""
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        tokenizer = processor.tokenizer
        if tokenizer.pad_token is None:  # the texts of a row are padded, and cut to their lengths again
            tokenizer.pad_token = tokenizer.eos_token
        processor.tokenizer = Recorder(tokenizer)
        return processor

    @cached_property
    def image_id(self) -> int:
        """Id of the tokens whose embeddings the model replaces by vision features."""
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        named = next((n for n in ("image_token_id", "image_token_index") if getattr(config, n, None) is not None), None)
        if named is None:
            raise ModelError(f"{self.folder / 'config.json'} names no image_token_id, the id of the tokens of images")
        return getattr(config, named)

    @cached_property
    def fingerprint(self) -> str:
        """Text that changes with every setting of the processor."""
        settings = [read_optional(self.folder / name) for name in SETTINGS]
        parts = [type(self.opened).__name__, type(self.opened.image_processor).__name__, self.image_id]
        return hashlib.sha256(json.dumps([*settings, *parts], sort_keys=True).encode()).hexdigest()[:32]

    def expand(self, text: str, sizes: Sequence[Size]) -> str:
        """Return the `text` of one sample with the tokens of images in the places of its placeholders, as the processor
        writes them. `sizes`: (width, height) in pixels of each image; black images of these sizes are prepared, on
        the assumption that the tokens depend on the sizes alone."""
        self([text], [[Image.new("RGB", size) for size in sizes]])
        last = self.opened.tokenizer.last
        return last if isinstance(last, str) else last[0]

    def tokenize(self, text: str) -> np.ndarray:
        """Return the token ids of a text without images, int64 [length]."""
        found = self.opened.tokenizer(text, add_special_tokens=self.adds_special(text))["input_ids"]
        return np.array(found, dtype=np.int64)

    def adds_special(self, text: str) -> bool:
        """Return whether the tokenizer adds its special tokens to a text: unless the chat template has written the BOS
        token (transformers processing_utils.py, `apply_chat_template`)."""
        bos = self.opened.tokenizer.bos_token
        return bos is None or not text.startswith(bos)

    def __call__(self, texts: Sequence[str], images: Sequence[Sequence[Image.Image]]) -> Processed:
        """Prepare the texts and the images of some samples, each with at least one image. All texts get the tokenizer's
        special tokens, or none, as `adds_special` says of the first one."""
        made = self.opened(
            text=list(texts),
            images=[list(own) for own in images],
            padding=True,
            return_tensors="pt",
            add_special_tokens=self.adds_special(texts[0]),
        )
        mask = made["attention_mask"].bool()
        names = [name for name in made if name.endswith(TYPES)]
        return Processed(
            [row[own].numpy() for row, own in zip(made["input_ids"], mask, strict=True)],
            [{name: made[name][row][own] for name in names} for row, own in enumerate(mask)],
            {
                name: values.float() if values.is_floating_point() else values
                for name, values in made.items()
                if name not in TEXT_OUTPUTS and not name.endswith(TYPES) and isinstance(values, torch.Tensor)
            },
        )


def open_processor(folder: Path) -> Processor:
    """Open the processor in a model's folder.

    Raises:
        ModelError: the processor cannot be opened, or needs files or packages that are missing; or its files name
            Python code.
    """
    for name in FILES:
        refuse_model_code(read_optional(folder / name), folder / name)
    if not any((folder / name).is_file() for name in SETTINGS):
        raise ModelError(
            f"{folder} has no {' or '.join(SETTINGS)}, so no image can be prepared: copy the files of the model's "
            "processor from its makers; transformers' processor.save_pretrained writes them"
        )
    processor = Processor(folder)
    lacks = importlib.util.find_spec("torchvision") is None
    why = f": most processors need torchvision, which is not installed; {NEEDS}" if lacks else ""
    with library_errors(f"{folder}: transformers cannot open the processor of this model{why}"):
        opened = processor.opened
        if not hasattr(opened, "image_processor"):
            raise ModelError(
                f"{folder}: its processor prepares no images; copy preprocessor_config.json from the model"
            )
        _ = processor.image_id
    return processor
