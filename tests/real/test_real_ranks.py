"""Trainings of published weights on 1, 2 and 4 ranks are one training, and the one of a plain loop around transformers'
own classes: all weights, adapters (peft's in the loop), and adapters over a base in 4 bits (there with the base that
transformers has dequantized). On the first 4 blocks of each model: four ranks would hold four whole models."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from harness import RankPool
from real_parts import PRETRAINED, whole_model
from reference import TOLERANCE, Adapters, Outcome, difference, first_values, plain_loop, train_on, trained
from small import make_config
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from llava_fsdp.config import Config, QuantizeConfig

LORA = ["model.lora.r=8", "model.lora.alpha=16", "model.lora.dropout=0", "optim.lr=1e-3"]
MODES: dict[str, tuple[str, list[str]]] = {
    "full": ("finetune", ["model.train=[projector,language,vision]"]),
    "lora": ("finetune_lora", LORA),
    "qlora": ("finetune_qlora", LORA),
}
"""Stage, and more overrides."""
CASES: list[tuple[str, int, str, list[str]]] = [
    ("full", 1, "zero3", ["pack=false"]),
    ("full", 1, "zero2", []),
    ("full", 2, "zero2", []),
    ("full", 2, "zero3", ["activation_checkpointing=full"]),
    ("full", 4, "zero3", ["micro_batch_size=1"]),
    ("lora", 1, "zero3", []),
    ("lora", 2, "zero2", ["pack=false"]),
    ("lora", 4, "zero3", ["micro_batch_size=1"]),
    ("qlora", 1, "zero3", []),
    ("qlora", 2, "zero3", ["activation_checkpointing=full"]),
    ("qlora", 4, "zero2", ["micro_batch_size=1"]),
]
"""Mode, ranks, strategy, and more overrides."""
EVERY_ROW = 1 << 30
CLOSE_WEIGHTS = 1e-4
"""Adam divides each gradient by its size, and so makes a whole step of those that are nothing but rounding noise."""


@pytest.fixture(scope="module")
def run(short: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    folder = tmp_path_factory.mktemp("ranks")

    def make(mode: str, name: str, *values: str) -> Config:
        stage, own = MODES[mode]
        common = ["sharding=zero3", "checkpoint.every=3"]
        return make_config(short, dataset, folder / name, *PRETRAINED, *common, *own, *values, stage=stage)

    return make


@pytest.fixture(scope="module")
def of_transformers(run: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """Three steps of the plain loop, for each mode when it is first asked for."""

    @cache
    def of_mode(mode: str) -> Outcome:
        cfg, start = run(mode, "none"), tmp_path_factory.mktemp("start")
        model = whole_model(cfg)
        if mode == "qlora":
            dequantize(model.model.language_model, cfg)
            cfg = replace(cfg, model=replace(cfg.model, quantize=QuantizeConfig()))
        model.save_pretrained(start)
        first = None if mode == "full" else first_values(cfg)
        found = plain_loop(cfg, start, None if first is None else Adapters(first))
        if first is not None:
            found.weights = {name: found.weights[name] for name in first}
        return found

    return of_mode


def dequantize(language_model: torch.nn.Module, cfg: Config) -> None:
    """Put weights into transformers' language model that transformers has read in 4 bits and dequantized."""
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=cfg.model.quantize.mode.value,
        bnb_4bit_use_double_quant=cfg.model.quantize.double, bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    packed = AutoModelForCausalLM.from_pretrained(cfg.model.language, dtype=torch.float32, quantization_config=settings)
    layers = packed.dequantize().model.layers
    before = language_model.get_submodule("layers")
    assert not torch.equal(layers[0].mlp.up_proj.weight, before.get_parameter("0.mlp.up_proj.weight"))
    before.load_state_dict(layers.state_dict())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mode", "size", "strategy", "more"), CASES, ids=[f"{case[0]}-{case[1]}-{case[2]}" for case in CASES]
)
def test_three_steps_are_those_of_transformers(
    mode: str,
    size: int,
    strategy: str,
    more: list[str],
    run: Callable[..., Config],
    of_transformers: Callable[[str], Outcome],
    pools: dict[int, RankPool],
) -> None:
    cfg = run(mode, f"{mode}-{size}-{strategy}", f"sharding={strategy}", *more)
    got, wanted = trained(train_on(size, cfg, pools, timeout=550)), of_transformers(mode)
    assert len(got.losses) == 3 and got.losses[2] < got.losses[0], "it learns"
    assert got.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
    assert got.grad_norms == pytest.approx(wanted.grad_norms, rel=10 * TOLERANCE)
    names = got.weights.keys() & wanted.weights.keys()
    assert len(names) == len(got.weights) > 50
    theirs = {name: wanted.weights[name][: len(got.weights[name])] for name in names}
    assert difference(got.weights, theirs, EVERY_ROW) < CLOSE_WEIGHTS
