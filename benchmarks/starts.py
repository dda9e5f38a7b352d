"""One start for two libraries: a LLaVA's weights and every rank's samples, as ours and as transformers read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import LlavaConfig, PretrainedConfig

from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import MicroBatch
from llava_fsdp.data.batching.sampler import Sampler
from llava_fsdp.data.text.tokens.constants import IGNORE
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.load_weights import find_weights
from llava_fsdp.model.sources.pretrained import NOTES, find_parts
from llava_fsdp.parallel.precision.precision import DTYPES
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.train.setup.build_state import open_data


def write_llava(folder: Path, cfg: Config, tokenizer: Path, preprocessor: Path) -> None:
    """The model of a configuration with weights drawn from its seed, as transformers writes a LLaVA.

    They are rounded to bf16 and stored in fp32: DeepSpeed makes its fp32 weights of the bf16 ones, so that
    otherwise the bf16 curves would not start from the same point.

    Args:
        tokenizer, preprocessor: folders whose files to copy.
    """
    parts = find_parts(cfg.model)
    model = build_llava(parts, cfg.model, torch.float32)
    sources = find_weights(model, parts, cfg.model, seed=cfg.seed)
    weights = {
        name if name.startswith("lm_head.") else f"model.{name}": s.rows(0, s.shape[0]).bfloat16().float()
        for name, s in sources.items()
    }
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    LlavaConfig(
        vision_config=parts.vision,
        text_config=parts.language,
        image_token_index=image_id(parts.language),
        image_seq_length=model.image_tokens,
        vision_feature_layer=cfg.model.select_layer,
        vision_feature_select_strategy="default",
        architectures=["LlavaForConditionalGeneration"],
        dtype="float32",
    ).save_pretrained(folder)
    (folder / NOTES).write_text(json.dumps({"vocab_size": parts.language.vocab_size}))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(tokenizer / name, folder / name)
    shutil.copy(preprocessor / "preprocessor_config.json", folder)


def write_samples(
    folder: Path, cfg: Config, ranks: int, steps: int, accumulation: int, order: Sampler | None = None
) -> None:
    """Every rank's micro-batches, as our loader cuts them, under the names that transformers' model takes.

    Args:
        order: of samples and of their cuts; None: that of the configuration.
    """
    model = build_llava(find_parts(cfg.model), cfg.model, DTYPES[cfg.precision.param_dtype])
    folder.mkdir(parents=True)
    for rank in range(ranks):
        loader = open_data(cfg, World(rank, ranks, rank, ranks, torch.device("cpu")), model)
        loader.steps.sampler = order or loader.steps.sampler
        tensors = {}
        for number in range(steps):
            step = loader.steps.prepare(number)
            assert len(step.micro_batches) == accumulation
            tensors[f"{number}.label_tokens"] = torch.tensor(step.facts.label_tokens)
            for micro_number, micro in enumerate(step.micro_batches):
                given = loader.to_device(micro)
                inputs = transformers_inputs(given, image_id(model.parts.language), model.image_tokens)
                tensors |= {f"{number}.{micro_number}.{name}": value for name, value in inputs.items()}
        save_file(tensors, folder / f"rank{rank}.safetensors")


def image_id(language: PretrainedConfig) -> int:
    """The last row of the model's vocabulary, which no token of its tokenizer has."""
    return language.vocab_size - 1


def transformers_inputs(micro: MicroBatch, image: int, image_tokens: int) -> dict[str, torch.Tensor]:
    """A padded micro-batch with normalised images as LlavaForConditionalGeneration takes it: labels beside ids.

    Rows without images get a row of a blank image and no label: the original shows its tower a blank image there
    (train.py:735-738), because a rank that leaves modules out goes wrong in DeepSpeed's collectives.
    """
    ids = micro.input_ids.clone()
    ids.view(-1)[micro.images["positions"]] = image
    labels = torch.full_like(ids, IGNORE)
    labels.view(-1)[micro.label_positions + 1] = micro.label_ids  # ours is where a label is predicted
    # rows are padded on the right with id 0, which no text has
    mask = ids.flip(1).cumsum(1).flip(1).ne(0).long()
    images = micro.images["tiles"]
    if not len(images):
        width = max(0, image_tokens - ids.shape[1])
        ids, mask = (functional.pad(rows, (0, width, 0, 1)) for rows in (ids, mask))
        labels = functional.pad(labels, (0, width, 0, 1), value=IGNORE)
        ids[-1, :image_tokens] = image
        mask[-1, :image_tokens] = 1
        images = images.new_zeros((1, *images.shape[1:]))
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "pixel_values": images}
