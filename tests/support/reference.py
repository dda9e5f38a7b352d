"""LLaVA's training as a plain loop, to compare everything with; and what a run of ours came to."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import CPU, RankPool, single_world
from plain_muon import PlainMuon
from safetensors.torch import load_file
from small import make_config
from torch.nn import functional
from transformers import LlavaConfig, LlavaForConditionalGeneration

from llava_fsdp.checkpoint.reader import saved_weights
from llava_fsdp.checkpoint.verify import newest_alone
from llava_fsdp.config import FULL_WEIGHT, Config, DType, Part, QuantizeConfig, Quantizer
from llava_fsdp.data.batching.batch import SkippedSample
from llava_fsdp.data.batching.step_dataset import Steps
from llava_fsdp.data.batching.tile_inputs import normalize
from llava_fsdp.data.text.sample import Sample
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.load_weights import find_weights
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.weights.weight_names import ours
from llava_fsdp.parallel.precision.precision import DTYPES
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.files.run_dir import FOLDER
from llava_fsdp.runtime.seeds import derive
from llava_fsdp.train import main as train

TOLERANCE = 1e-5
# Adding one number to every key changes no attention weight, so the true gradient of a key bias is exactly zero, and
# Adam turns its rounding noise into full steps.
ZERO_GRADIENT = "self_attn.k_proj.bias", "attention.key.bias"
EXPORTED = ["export.enabled=true", "export.dtype=fp32", "export.verify=false"]


@dataclass
class Outcome:
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]


def run_ranks(world: World, cfg: Config) -> None:
    train.train(cfg)


def train_on(size: int, cfg: Config, pools: dict[int, RankPool], timeout: float = 120) -> Path:
    """Train on so many ranks; the run's folder."""
    if size == 1:
        train.train(cfg)
    else:
        pools[size].run(run_ranks, cfg, timeout=timeout)
    return Path(cfg.output_dir)


def assert_near(got: Outcome, wanted: Outcome, rows: int, which: str) -> None:
    """Losses, gradient norms and weights (of the first `rows` rows of a vocabulary) within the tolerance."""
    assert got.losses == pytest.approx(wanted.losses, rel=TOLERANCE), which
    assert got.grad_norms == pytest.approx(wanted.grad_norms, rel=TOLERANCE), which
    assert difference(got.weights, wanted.weights, rows) < TOLERANCE, which


def assert_same_bits(got: Outcome, wanted: Outcome, which: str) -> None:
    assert (got.losses, got.grad_norms) == (wanted.losses, wanted.grad_norms), which
    assert all(torch.equal(got.weights[n], wanted.weights[n]) for n in wanted.weights), which


def outcome(folder: Path) -> Outcome:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights = {ours(n): t for n, t in load_file(folder / "export" / "model.safetensors").items()}
    return Outcome([r["loss"] for r in rows], [r["grad_norm"] for r in rows], weights)


def trained(folder: Path) -> Outcome:
    """A run's losses, gradient norms, and trained weights of its newest checkpoint."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Outcome([r["loss"] for r in rows], [r["grad_norm"] for r in rows], trained_weights(folder))


def plain_loop(cfg: Config, start: Path, adapters: "Adapters | None" = None, to: Path | None = None) -> Outcome:
    """LLaVA's training without any of our model, cutting or sharding: one sample at a time, one process, AdamW.

    Starts from the weights that a run exported; takes nothing but the choice of samples and their ids from us.

    Args:
        adapters: train instead of the whole language model.
        to: folder in which transformers saves the trained model, whose names in files the weights then have.

    With `model.quantize.mode` the language model's linear layers are bitsandbytes' own.
    """
    config = LlavaConfig.from_pretrained(start)
    model = LlavaForConditionalGeneration.from_pretrained(start, dtype=torch.float32, attn_implementation="eager")
    parts = {
        Part.projector: model.model.multi_modal_projector,
        Part.language: model.model.language_model,
        Part.vision: model.model.vision_tower,
    }
    model.requires_grad_(False)
    for part in cfg.model.train:
        name, _, blocks = part.partition(":")
        own = parts[Part[name]]
        if blocks:  # such as language:-2 or vision:1:3
            stack = own.layers if name == "language" else own.encoder.layers[: cfg.model.select_layer + 1 or None]
            own = stack[slice(*(int(end) if end else None for end in [*blocks.split(":"), ""][:2]))]
        own.requires_grad_(True)
    model.lm_head.requires_grad_("language" in cfg.model.train)
    if cfg.model.quantize.mode is not Quantizer.none:
        quantize(model.model.language_model.layers, cfg.model.quantize)
        model.train()  # else bitsandbytes' layers change their weights' bits on a CPU
    if adapters is not None:
        adapters.put_into(model, cfg)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = plain_optimizers(model, cfg)
    assert cfg.max_steps is not None and cfg.optim.schedule.value == "cosine"
    total, warmup = cfg.max_steps, math.ceil(cfg.optim.warmup_ratio * cfg.max_steps)
    steps = open_steps(cfg)
    losses, norms = [], []
    for step in range(total):
        factor = step / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
        for group in (*optimizers[0].param_groups, *optimizers[1].param_groups):
            group["lr"] = cfg.optim.lr * factor
        for p in trained:
            p.grad = torch.zeros_like(p)
        read = [(i, steps.read(i)) for i in steps.sampler.samples(step)]
        rows = [(i, row) for i, row in read if not isinstance(row, SkippedSample)]
        count = sum(float(weights_of(sample).sum()) for _, (sample, _) in rows)
        loss_sum = 0.0
        for number, (sample, pictures) in rows:
            if adapters is not None:
                adapters.tell(step, number)
            ids = torch.from_numpy(sample.input_ids)[None]
            ids = torch.where(ids == IMAGE_ID, config.image_token_id, ids)
            table = torch.from_numpy(steps.image_reader.preprocessor.pixel_table())
            pixels = normalize(torch.from_numpy(np.concatenate(pictures)), table) if pictures else None
            logits = model(input_ids=ids, pixel_values=pixels).logits[0, :-1, : vocabulary(cfg)]
            singles = functional.cross_entropy(logits, torch.from_numpy(sample.labels[1:]), reduction="none")
            loss = (singles * weights_of(sample)).sum() / count
            if loss.requires_grad:  # stage 1 trains nothing on a sample without a picture
                loss.backward()
            loss_sum += float(loss.detach())
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in trained if p.grad is not None)))
        optimizers[0].step()
        optimizers[1].step()
        losses.append(loss_sum)
    weights = dict(model.named_parameters())
    if to is not None:
        model.save_pretrained(to)
        weights = load_file(to / "model.safetensors")
    return Outcome(losses, norms, {ours(n): p.detach() for n, p in weights.items()})


def plain_optimizers(model: LlavaForConditionalGeneration, cfg: Config) -> tuple[torch.optim.Optimizer, PlainMuon]:
    """AdamW and Muon. Muon has nothing unless it is asked for; else the weights of linear layers but the output's."""
    linear = (m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.lm_head)
    matrices = {module.weight for module in linear} if cfg.optim.is_muon else set()
    trained = [p for p in model.parameters() if p.requires_grad]
    of_adamw, of_muon = ([p for p in trained if (p in matrices) == is_matrix] for is_matrix in (False, True))
    adamw = torch.optim.AdamW([{"params": of_adamw}], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    return adamw, PlainMuon(of_muon, cfg.optim.momentum, weight_decay=0.0)


def weights_of(sample: Sample) -> torch.Tensor:
    """The weight of each label, float32, without the first token's; 0 where there is no label."""
    weights = np.ones(len(sample.labels)) if sample.weights is None else sample.weights / FULL_WEIGHT
    return torch.from_numpy(np.where(sample.labels != IGNORE, weights, 0)[1:]).float()


def quantize(module: torch.nn.Module, cfg: QuantizeConfig) -> None:
    """bitsandbytes' layers in place of all linear ones."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear):
            setattr(module, name, bitsandbytes_layer(child, cfg))
        else:
            quantize(child, cfg)


def bitsandbytes_layer(linear: torch.nn.Linear, cfg: QuantizeConfig, device: torch.device = CPU) -> torch.nn.Module:
    """As transformers makes it of a loaded one; its weight takes part in no training."""
    import bitsandbytes

    sizes = linear.in_features, linear.out_features, linear.bias is not None
    if cfg.mode is Quantizer.int8:
        layer = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
    else:
        layer = bitsandbytes.nn.Linear4bit(*sizes, compress_statistics=cfg.double, quant_type=cfg.mode.value)
    layer.load_state_dict(linear.state_dict())
    layer.requires_grad_(False)
    return layer.to(device)  # which quantises


def bitsandbytes_values(weight: torch.Tensor, cfg: QuantizeConfig) -> torch.Tensor:
    """A weight after bitsandbytes has quantized it to 4 bits and dequantized it."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(weight, compress_statistics=cfg.double, quant_type=cfg.mode.value)
    return dequantize_4bit(packed, state)


class Adapters:
    """peft's adapters in transformers' model, begun as ours are, with dropout by an arithmetic of its own."""

    def __init__(self, first: dict[str, torch.Tensor]):
        """
        Args:
            first: values to begin with, by our names.
        """
        self.first = first
        self.seed = 0
        self.place = (0, 0)

    def put_into(self, model: LlavaForConditionalGeneration, cfg: Config) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        lora = cfg.model.lora
        modules = {n.rpartition(".lora_A")[0] for n in self.first if ".lora_A" in n}
        inside = [n for n, _ in model.named_modules() if ours(f"{n}.weight").removesuffix(".weight") in modules]
        assert len(inside) == len(modules) > 0
        settings = LoraConfig(
            r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=inside,
            use_dora=lora.use_dora, use_rslora=lora.use_rslora,
        )  # fmt: skip
        inject_adapter_in_model(settings, model)
        named = {ours(n): p for n, p in model.named_parameters()}
        for name, parameter in named.items():
            parameter.requires_grad_(name in self.first)
            if name in self.first:
                parameter.data.copy_(self.first[name])
        self.seed = cfg.seed
        for name in inside:
            layer = model.get_submodule(name)
            layer.lora_dropout["default"] = Mask(self, ours(f"{name}.weight").removesuffix(".weight"), lora.dropout)
        model.train()

    def tell(self, step: int, number: int) -> None:
        """Which sample of which step runs next."""
        self.place = step, number


class Mask(torch.nn.Module):
    """The dropout of one sample, in Python's own whole numbers."""

    def __init__(self, adapters: Adapters, name: str, p: float):
        super().__init__()
        self.adapters, self.name, self.p = adapters, name, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.p:
            return x
        seed = derive("dropout", self.adapters.seed, *self.adapters.place) % 2**31
        salt = derive("dropout", self.name) % 2**31
        tower = self.name.startswith("vision_tower.")
        rows = [(seed + 1 + tile) % 2**31 if tower else seed for tile in range(len(x))]
        own = [[joined(row, place) for place in range(x.shape[1])] for row in rows]
        channels = [joined(channel, salt) for channel in range(x.shape[2])]
        kept = [[[mixed(k + c) % 2**24 >= int(self.p * 2**24) for c in channels] for k in row] for row in own]
        return x * torch.tensor(kept) * (1 / (1 - self.p))


def joined(first: int, second: int) -> int:
    return mixed((first * 0x9E3779B1 + second * 0x85EBCA77) % 2**32 - 2**31)


def mixed(value: int) -> int:
    """As 32 bits with a sign, whose shifts to the right keep it."""
    value = signed(value)
    value = signed((value ^ (value >> 16)) * 0x7FEB352D)
    value = signed((value ^ (value >> 15)) * 0x2C1B3C6D)
    return value ^ (value >> 16)


def signed(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def trained_weights(run: Path) -> dict[str, torch.Tensor]:
    """What the newest checkpoint of a run holds of its model."""
    newest = newest_alone(run / FOLDER)
    assert newest is not None
    return {name: saved.rows(0, saved.shape[0]) for name, saved in saved_weights(newest).items()}


def vocabulary(cfg: Config) -> int:
    return json.loads((Path(cfg.model.language) / "config.json").read_text())["vocab_size"]


def open_steps(cfg: Config) -> Steps:
    model = build_llava(find_parts(cfg.model), cfg.model, DTYPES[DType.fp32])
    return train.open_data(cfg, single_world(), model).steps


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], vocab: int) -> float:
    """Norm of the difference over the norm, over all parameters together."""
    names = [n for n in a if not n.endswith(ZERO_GRADIENT)]
    assert set(a) == set(b)
    squares = [((a[n][:vocab] - b[n][:vocab]).square().sum(), b[n][:vocab].square().sum()) for n in names]
    return math.sqrt(sum(float(d) for d, _ in squares) / sum(float(n) for _, n in squares))


def check_continued(size: int, got: Outcome, expected: Outcome, cfg: Config) -> None:
    """A resumed run ends as one that was not interrupted: on one rank to the bit."""
    if size == 1:
        assert got.losses == expected.losses
        assert all(torch.equal(got.weights[n], expected.weights[n]) for n in expected.weights)
    else:
        assert got.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert difference(got.weights, expected.weights, vocabulary(cfg)) < TOLERANCE


def first_values(cfg: Config) -> dict[str, torch.Tensor]:
    """What trains, as it begins."""
    found = find_parts(cfg.model)
    model = build_llava(found, cfg.model, torch.float32)
    sources = find_weights(model, found, cfg.model, seed=cfg.seed)
    return {n: sources[n].rows(0, sources[n].shape[0]) for n, p in model.named_parameters() if p.requires_grad}


def plain_outcomes(
    parts: Path, dataset: Path, folder: Path, common: Sequence[str], variants: Mapping[str, Sequence[str]]
) -> Callable[[str], Outcome]:
    """The plain loop's outcome with a variant's overrides, of what trains; computed when it is first asked for."""
    train.train(make_config(parts, dataset, folder, "max_steps=1", "optim.lr=0", *common, *EXPORTED))

    @cache
    def of_variant(name: str) -> Outcome:
        cfg = make_config(parts, dataset, folder / "none", *common, *variants[name])
        first = first_values(cfg) if cfg.model.lora.enabled else None
        found = plain_loop(cfg, folder / "export", None if first is None else Adapters(first))
        if first is not None:
            found.weights = {key: found.weights[key] for key in first}
        return found

    return of_variant
