"""Records of pairs of answers, and what transformers' LLaVA makes of the same pairs, one answer at a time."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small import sentence
from transformers import AutoConfig, LlavaConfig, LlavaForConditionalGeneration

from llava_fsdp.config import Config, PairForm, PrefConfig
from llava_fsdp.data.batching.step_dataset import Steps
from llava_fsdp.data.batching.tile_inputs import normalize
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.model.weights.weight_names import ours

IMAGE_TOKEN = 3
"""Token id that stands for an image in transformers' class; no text has it."""
Weights = dict[str, torch.Tensor]


def write_pairs(folder: Path, count: int = 22, name: str = "pairs.json") -> Path:
    """Write records in LLaVA's and trl's form by turns, with no, one or two of the images of `write_dataset`."""
    dice = random.Random(5)
    path = folder / name
    path.write_text(json.dumps([pair(dice, number) for number in range(count)]))
    return path


def pair(dice: random.Random, number: int) -> dict[str, Any]:
    images = [f"{n % 12}.{'png' if n % 12 % 2 else 'jpg'}" for n in range(number, number + (1, 0, 2, 1)[number % 4])]
    question = "<image>\n" * len(images) + sentence(dice, 2, 20)
    chosen, rejected = f"a {sentence(dice, 1, 9)}", f"the {sentence(dice, 1, 15)}"
    raw: dict[str, Any] = {"id": f"p{number}", **({"images": images} if images else {})}
    if number % 2:  # another answer before the two
        turns = [("human", question), ("gpt", sentence(dice, 1, 5)), ("human", sentence(dice, 1, 5))]
        raw["conversations"] = [{"from": who, "value": text} for who, text in turns]
        return raw | {"chosen": {"from": "gpt", "value": chosen}, "rejected": {"from": "gpt", "value": rejected}}
    raw["prompt"] = [{"role": "user", "content": question}]
    answers = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
    return raw | dict(zip(("chosen", "rejected"), answers, strict=True))


def class_of(cfg: Config, weights: Weights) -> LlavaForConditionalGeneration:
    """transformers' class in float64 with these weights, by our names; adapters are merged into theirs. In float32 its
    own rounding would be as large as that of what is compared: gradients of both answers nearly cancel each other."""
    language, vision = (AutoConfig.from_pretrained(own) for own in (cfg.model.language, cfg.model.vision))
    config = LlavaConfig(vision_config=vision, text_config=language, image_token_id=IMAGE_TOKEN)
    config.text_config.vocab_size = language.vocab_size
    config.text_config._experts_implementation = "eager"  # the grouped product takes no float64
    with torch.device("cpu"):
        model = LlavaForConditionalGeneration._from_config(config, dtype=torch.float64, attn_implementation="eager")
    weights = {name: value.double() for name, value in weights.items()}
    merged = {name.replace(".base_layer", ""): value for name, value in weights.items() if ".lora_" not in name}
    for name in (name for name in weights if ".lora_B" in name):
        scale = cfg.model.lora.alpha / cfg.model.lora.r
        product = weights[name] @ weights[name.replace("lora_B", "lora_A")]
        own = f"{name.partition('.lora_B')[0]}.weight"
        merged[own] = merged[own] + scale * product
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(merged[ours(name)])
    return model


@dataclass
class PlainPairs:
    """The loss of pairs and its gradients, by transformers' class without anything of ours but the token ids."""

    cfg: Config
    steps: Steps
    model: LlavaForConditionalGeneration
    reference: LlavaForConditionalGeneration | None
    """None: none."""

    def log_probabilities(self, model: torch.nn.Module, sample: Sample, pictures: Sequence[np.ndarray]) -> torch.Tensor:
        """Of the tokens of one answer, [tokens]."""
        table = torch.from_numpy(self.steps.image_reader.preprocessor.pixel_table())
        pixels = normalize(torch.from_numpy(np.concatenate(pictures)), table).double() if pictures else None
        ids = torch.from_numpy(sample.input_ids)[None]
        logits = model(input_ids=torch.where(ids == IMAGE_ID, IMAGE_TOKEN, ids), pixel_values=pixels).logits[0, :-1]
        labels = torch.from_numpy(sample.labels[1:])
        logs = logits.log_softmax(-1)[torch.arange(len(labels)), labels.clamp(min=0)]
        return logs[labels != IGNORE]

    def step(self, numbers: Sequence[int], pref: PrefConfig) -> tuple[float, Weights]:
        """The mean loss of the pairs of records, and its gradients by our names."""
        self.model.zero_grad()
        total = 0.0
        for number in numbers:
            sample, pictures = self.steps.read_row(number)
            mine = [self.log_probabilities(self.model, part, pictures) for part in sample.parts]
            others = [torch.zeros(1)] * 2
            if self.reference is not None:
                with torch.no_grad():
                    others = [self.log_probabilities(self.reference, part, pictures) for part in sample.parts]
            loss = pair_loss(mine, others, pref) / len(numbers)
            loss.backward()
            total += float(loss.detach())
        return total, {ours(n): p.grad for n, p in self.model.named_parameters() if p.grad is not None}


def of_adapters(gradients: Weights, weights: Weights, cfg: Config) -> Weights:
    """The gradients of adapters from those of the weights into which they were merged: of W = base + scale * B A."""
    scale, found = cfg.model.lora.alpha / cfg.model.lora.r, {}
    for name in (name for name in weights if ".lora_B" in name):
        other = name.replace("lora_B", "lora_A")
        own = gradients[f"{name.partition('.lora_B')[0]}.weight"]
        found |= {name: scale * own @ weights[other].to(own).t(), other: scale * weights[name].to(own).t() @ own}
    return found


def pair_loss(mine: list[torch.Tensor], others: list[torch.Tensor], cfg: PrefConfig) -> torch.Tensor:
    """The published loss of one pair, from the log-probabilities of the tokens of both answers."""
    scores = [own.sum() - other.sum() for own, other in zip(mine, others, strict=True)]
    if cfg.per_token:
        scores = [score / len(own) for score, own in zip(scores, mine, strict=True)]
    margin, share = scores[0] - scores[1], cfg.label_smoothing
    wins, loses = torch.sigmoid(cfg.beta * margin - cfg.gamma), torch.sigmoid(cfg.gamma - cfg.beta * margin)
    losses = {
        PairForm.sigmoid: -(1 - share) * wins.log() - share * loses.log(),
        PairForm.robust: ((1 - share) * -wins.log() - share * -loses.log()) / (1 - 2 * share),
        PairForm.hinge: torch.clamp(1 - cfg.beta * margin + cfg.gamma, min=0),
        PairForm.ipo: (margin - 1 / (2 * cfg.beta)) ** 2,
    }
    return cfg.weight * losses[cfg.form] - cfg.sft_weight * mine[0].mean()
