"""Tiny models of many vision-language families of transformers: configuration, random weights, tokenizer and processor.

A row of `family_table.FAMILIES` says in what a family differs from the others. Sizes are odd on purpose: no width is a
power of two, and few lengths divide evenly.
"""

import functools
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from family_parts import TEMPLATES, Family, Token
from family_table import FAMILIES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "What is in this image? A red square on a blue ground.",
    "user assistant system model human\n\n\n how many dogs are there in the first image and in the second one?",
]
COMMON = ["<pad>", "<s>", "</s>", "<unk>"]
NOISE = 0.05
"""Standard deviation of what is added to each parameter. transformers starts some from zeros or ones, and errors in
their gradients or places would not be seen."""


def make_family(family: str | Family) -> tuple[Any, Any]:
    """Return (configuration, processor) of a family, or of the one of this name. Raise ImportError if it needs
    torchvision and there is none."""
    row = FAMILIES[family] if isinstance(family, str) else family
    tokenizer = make_tokenizer(row)
    config = transformers.CONFIG_MAPPING[row.kind](**resolve(row.config, tokenizer))
    return config, make_processor(row, tokenizer)


def write_family(family: str | Family, folder: Path, seed: int = 0) -> Path:
    """Write a family as a folder with random weights in float32, tokenizer, processor and chat template."""
    config, processor = make_family(family)
    make_model(config, seed).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def make_model(config: Any, seed: int = 0, **settings: Any) -> Any:
    """transformers' own class with random weights in float32, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32, **settings)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * NOISE)
    return model.eval()


def make_processor(row: Family, tokenizer: Any) -> Any:
    parts = {"image_processor": make_image_processor(row), "tokenizer": tokenizer}
    if row.video:
        name = VIDEO_PROCESSOR_MAPPING_NAMES[row.video]["torchvision"]
        if name is None:
            raise ImportError(f"the video processor of {row.video} needs torchvision")
        parts["video_processor"] = load("video_processing", row.video, name)(**row.video_fields)
    kind = row.processor or row.kind
    code = TEMPLATES[row.template].code.replace("IMAGE", row.image_text).replace("VIDEO", row.video_text)
    return load("processing", kind, PROCESSOR_MAPPING_NAMES[kind])(**parts, **row.fields, chat_template=code)


def make_image_processor(row: Family) -> Any:
    kind, fields = row.image
    names = IMAGE_PROCESSOR_MAPPING_NAMES[kind]
    own = load("image_processing_pil", kind, names["pil"]) if "pil" in names else None
    made = (own or load("image_processing", kind, names["torchvision"]))(**fields)
    for name, value in row.image_attributes.items():
        setattr(made, name, value)
    return made


def load(file: str, kind: str, name: str) -> Any:
    """Import a class from the module of a model type."""
    return getattr(importlib.import_module(f"transformers.models.{kind}.{file}_{kind}"), name)


def make_tokenizer(row: Family) -> Any:
    """A byte-level BPE of 400 tokens, with the special tokens of the family and of its template."""
    ends = TEMPLATES[row.template].tokens
    special = tuple(dict.fromkeys([*COMMON, *ends, *row.tokens.values(), *row.more_tokens]))
    made = Tokenizer.from_str(train(special))
    if row.adds_bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token=TEMPLATES[row.template].end,
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=dict(row.tokens),
    )


@functools.cache
def train(special: Sequence[str]) -> str:
    """A tokenizer as JSON."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(SENTENCES * 20, trainer)
    return made.to_str()


def resolve(value: Any, tokenizer: Any) -> Any:
    """Fields of a configuration with the ids of special tokens in place of `Token`."""
    if isinstance(value, Token):
        return tokenizer.convert_tokens_to_ids(str(value))
    if isinstance(value, Mapping):
        return {key: resolve(own, tokenizer) for key, own in value.items()}
    return [resolve(own, tokenizer) for own in value] if isinstance(value, list) else value
