"""Models that transformers has saved are read, trained and written as transformers does it.

Read: with the bits of `from_pretrained`. Trained: as a plain loop on transformers' own classes with torch's AdamW, on
1, 2 and 4 ranks, packed and padded. Written: with the names and bits of `save_pretrained`."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness import RankPool
from reference import EXPORTED, assert_near, difference, outcome, plain_loop, train_on
from safetensors.torch import load_file
from small import make_config
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlavaForConditionalGeneration

from llava_fsdp.config import Config

TEXT: dict[str, Any] = {
    "hidden_size": 40, "intermediate_size": 51, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
"""Their kernels take rows of a multiple of 16 bytes, in bf16 too."""
IMAGE: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 31, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
WINDOW = 9
"""Number of tokens of a sliding window; every sample is longer."""


class Pair(NamedTuple):
    """A language model and a vision tower: their types, and values of their configurations."""

    language: str
    language_values: dict[str, Any]
    vision: str
    vision_values: dict[str, Any]


PAIRS = {
    "qwen3_moe, dinov2": Pair(
        "qwen3_moe", {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
        "dinov2", {"hidden_size": 22, "use_swiglu_ffn": True},
    ),
    "mistral, siglip": Pair("mistral", {"sliding_window": WINDOW}, "siglip_vision_model", {"hidden_size": 22}),
    "mixtral, dinov3": Pair("mixtral", {**EXPERTS, "intermediate_size": 24}, "dinov3_vit", {}),
    "gemma3, aimv2": Pair(
        "gemma3_text", {"sliding_window": WINDOW, "sliding_window_pattern": 2},
        "aimv2_vision_model", {"hidden_size": 26},
    ),
}  # fmt: skip
TRAINED = ["model.random_weights=false", "model.select_feature=auto", "model.train=[projector,language,vision]"]
SHARDED = ["sharding=zero3", *EXPORTED, *TRAINED]


def save_parts(pair: Pair, parts: Path, folder: Path) -> None:
    """Let transformers draw and save a language model and a vision tower of these types."""
    for part in ("language", "vision"):
        (folder / part).mkdir(parents=True)
        for file in (parts / part).iterdir():
            (folder / part / file.name).write_bytes(file.read_bytes())
    vocabulary = AutoConfig.from_pretrained(parts / "language").vocab_size
    torch.manual_seed(1)
    language = AutoConfig.for_model(pair.language, **(TEXT | pair.language_values | {"vocab_size": vocabulary}))
    vision = AutoConfig.for_model(pair.vision, **(IMAGE | pair.vision_values))
    for part, model in (
        ("language", AutoModelForCausalLM.from_config(language, dtype=torch.float32)),
        ("vision", AutoModel.from_config(vision, dtype=torch.float32)),
    ):
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "query.weight", "key.weight")):
                # as large as in a trained model: with scores near 0 a wrong attention would hardly show, and the
                # gradients of queries and keys would be rounding noise
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder / part)


def whole_of(folder: Path, export: Path, to: Path) -> dict[str, torch.Tensor]:
    """Let transformers read the two parts, put them into the model that it reads from an export, and save that; the
    tensors that it has written. Of the export remain the projector, the rows of the vocabulary that nothing trains, and
    whether a vision tower's names have the `vision_model.` of earlier releases."""
    whole: Any = LlavaForConditionalGeneration.from_pretrained(export, dtype=torch.float32)
    language: Any = AutoModelForCausalLM.from_pretrained(folder / "language", dtype=torch.float32)
    tower = AutoModel.from_pretrained(folder / "vision", dtype=torch.float32)
    pairs = (
        (whole.model.language_model, language.model),
        (whole.lm_head, language.lm_head),
        (whole.model.vision_tower, tower),
    )
    with torch.no_grad():
        for ours, theirs in pairs:
            own = dict(ours.named_parameters())
            assert own.keys() == dict(theirs.named_parameters()).keys()
            for name, value in theirs.named_parameters():
                own[name][: len(value)] = value
    whole.save_pretrained(to)
    return load_file(to / "model.safetensors")


def check(pair: Pair, steps: int, sizes: tuple[int, ...], parts: Path, dataset: Path, folder: Path, pools: Any) -> None:
    """Compare reading and writing bit by bit, and a training of so many steps on these numbers of ranks.

    The bounds are those of the Llama and CLIP that tests/parallel/test_equality.py trains: 1e-5 for each loss and
    norm of gradients, and for the norm of the difference of all weights together, relative to theirs."""
    save_parts(pair, parts, folder / "parts")

    def configure(name: str, *values: str) -> Config:
        return make_config(folder / "parts", dataset, folder / name, *SHARDED, f"max_steps={steps}", *values)

    start = configure("start", "max_steps=1", "optim.lr=0", "optim.projector_lr=0")
    train_on(2, start, pools)
    read = load_file(folder / "start" / "export" / "model.safetensors")
    theirs = whole_of(folder / "parts", folder / "start" / "export", folder / "theirs")
    assert read.keys() == theirs.keys()
    assert all(torch.equal(read[name], theirs[name]) for name in theirs)
    wanted = plain_loop(configure("none"), folder / "theirs", to=folder / "trained")
    vocabulary = AutoConfig.from_pretrained(folder / "parts" / "language").vocab_size
    runs = [(f"{size} ranks", size, []) for size in sizes] + [("padded", 1, ["pack=false", "micro_batch_size=5"])]
    for name, size, values in runs:
        got = outcome(train_on(size, configure(name, "pack=true", *values), pools, timeout=300))
        assert_near(got, wanted, vocabulary, name)
        assert difference(got.weights, outcome(folder / "start").weights, vocabulary) > 1e-3, "nothing was trained"


@pytest.mark.slow
@pytest.mark.ranks
def test_two_models_on_two_ranks(parts: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]) -> None:
    check(PAIRS["qwen3_moe, dinov2"], 3, (2,), parts, dataset, tmp_path, pools)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_every_model(pair: str, parts: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]) -> None:
    check(PAIRS[pair], 20, (1, 2, 4), parts, dataset, tmp_path, pools)
