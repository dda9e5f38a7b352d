"""Published weights and records for the tests of tests/real: where they lie, shortened copies, and what transformers'
own classes make of them."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from reference import first_values
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from llava_fsdp.config import Config
from llava_fsdp.data.text.tokens.constants import IGNORE
from llava_fsdp.model.weights.weight_names import ours

LANGUAGE, VISION = "smollm2-135m", "dinov2-small-56"
RECORDS = "easy_train.json"
"""Questions about coloured shapes, of the package easy-vqa."""
IMAGE = "<image>"
PRETRAINED = [
    "model.random_weights=false", "model.select_feature=auto", "data.template=chat_template",
    "global_batch_size=6", "micro_batch_size=3", "optim.lr=1e-4", "optim.warmup_ratio=0", "max_steps=3",
]  # fmt: skip
"""Settings of every training on published weights, behind those of `small.make_config`."""


def real_folder() -> Path:
    """Return the folder into which examples/real/fetch.py puts parts and records; LLAVA_FSDP_REAL names another."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("LLAVA_FSDP_REAL") or cache / "llava_fsdp" / "real")


def lacks(folder: Path) -> list[str]:
    """Return the files that the tests need and that the folder has not."""
    needed = [f"parts/{LANGUAGE}/model.safetensors", f"parts/{VISION}/model.safetensors", f"data/{RECORDS}"]
    return [name for name in [*needed, "data/images"] if not (folder / name).exists()]


def write_shortened(parts: Path, to: Path, blocks: int = 4) -> Path:
    """Write copies of the parts that have only the first `blocks` blocks of each model, with the published weights."""
    for part, auto in (("language", AutoModelForCausalLM), ("vision", AutoModel)):
        model: Any = auto.from_pretrained(parts / part, num_hidden_layers=blocks)
        model.save_pretrained(to / part)
        config = json.loads((to / part / "config.json").read_text())
        for key in ("out_features", "out_indices", "stage_names"):  # they name blocks that are gone
            config.pop(key, None)
        (to / part / "config.json").write_text(json.dumps(config))
        for file in (parts / part).iterdir():
            if not (to / part / file.name).exists() and file.suffix != ".safetensors":
                shutil.copy(file, to / part)
    return to


def write_records(real: Path, to: Path) -> Path:
    """Write `mixed.json`, records of every kind about the published images: one image, two, none; one question, several
    questions. Also a link `images` to them."""
    rows = json.loads((real / "data" / RECORDS).read_text())[:80]
    records = []
    for number in range(0, len(rows) - 1, 2):
        first, second = rows[number], rows[number + 1]
        turns = first["conversations"][:2]
        record: dict[str, Any] = {"id": f"r{number // 2}", "image": first["image"]}
        match number // 2 % 5:
            case 1:  # text alone
                del record["image"]
                turns = [{**turn, "value": turn["value"].replace(f"{IMAGE}\n", "")} for turn in turns]
            case 2:  # two images in one question
                record["image"] = [first["image"], second["image"]]
                turns = [{"from": "human", "value": f"{IMAGE}\n{IMAGE}\nDo they show the same shape?"}, turns[1]]
            case 3:  # a second question, about another image
                record["image"] = [first["image"], second["image"]]
                turns = turns + second["conversations"][:2]
        records.append({**record, "conversations": turns})
    to.mkdir(parents=True, exist_ok=True)
    (to / "mixed.json").write_text(json.dumps(records))
    (to / "images").symlink_to(real / "data" / "images")
    return to


def whole_model(cfg: Config, to: Path | None = None) -> LlavaForConditionalGeneration:
    """Return transformers' LLaVA class in fp32, of a language model and a vision tower that transformers reads from
    their own folders; the projector has the values with which this project's training begins.

    Args:
        to: a folder into which transformers saves the model.
    """
    language: Any = AutoModelForCausalLM.from_pretrained(cfg.model.language, dtype=torch.float32)
    vision = AutoModel.from_pretrained(cfg.model.vision, dtype=torch.float32)
    rows = language.config.vocab_size
    language.resize_token_embeddings(rows + 1, mean_resizing=False)  # a row for the image token
    config = LlavaConfig(
        vision_config=vision.config, text_config=language.config, image_token_index=rows,
        vision_feature_layer=-2, vision_feature_select_strategy="default", image_seq_length=16,
        tie_word_embeddings=language.config.tie_word_embeddings,
    )  # fmt: skip
    model = LlavaForConditionalGeneration._from_config(config, dtype=torch.float32)
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.model.vision_tower.load_state_dict(vision.state_dict())
    values = first_values(cfg)
    for name, parameter in model.named_parameters():
        if "multi_modal_projector" in name:
            parameter.data.copy_(values[ours(name)])
    model.tie_weights()
    if to is not None:
        model.save_pretrained(to)
    return model.eval()


@dataclass(frozen=True)
class Theirs:
    """A record as transformers' tokenizer, chat template and image processor make it."""

    id: str
    ids: torch.Tensor
    """int64 [length]"""
    labels: torch.Tensor
    """int64 [length], not shifted: a supervised token's own id, else IGNORE."""
    pixels: torch.Tensor | None
    """float32 [images, 3, size, size]"""


def open_processor(parts: Path) -> Any:
    """Return transformers' LlavaProcessor of the published tokenizer, chat template and image processor; `<image>` is
    one more token."""
    tokenizer: Any = AutoTokenizer.from_pretrained(parts / "language")
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    images: Any = AutoImageProcessor.from_pretrained(parts / "vision")
    return LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template, image_token=IMAGE, num_additional_image_tokens=1,
    )  # fmt: skip


def write_like_transformers(parts: Path, dataset: Path) -> list[Theirs]:
    """Return all records of `mixed.json` as transformers' LlavaProcessor makes them. Labels are on the answers and what
    ends them: they begin where the template's own prompt for an answer ends."""
    processor = open_processor(parts)
    return [one_record(record, processor, dataset) for record in json.loads((dataset / "mixed.json").read_text())]


def one_record(record: dict[str, Any], processor: Any, dataset: Path) -> Theirs:
    names = record.get("image", [])
    names = [names] if isinstance(names, str) else names
    shown = [Image.open(dataset / "images" / name).convert("RGB") for name in names]
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in record["conversations"]]

    def ids_of(turns: list[dict[str, str]], asks: bool) -> Any:
        text = processor.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=asks)
        count = text.count(IMAGE)
        return processor(text=text, images=shown[:count] or None, add_special_tokens=False, return_tensors="pt")

    whole = ids_of(messages, asks=False)
    ids = whole["input_ids"][0]
    labels = torch.full_like(ids, IGNORE)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            begin = ids_of(messages[:number], asks=True)["input_ids"].shape[1]
            end = begin + int((ids[begin:] == processor.tokenizer.eos_token_id).nonzero()[0]) + 1
            labels[begin:end] = ids[begin:end]
    return Theirs(record["id"], ids, labels, whole.get("pixel_values"))
