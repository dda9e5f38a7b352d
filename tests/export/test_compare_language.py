"""A language model has the loss, the gradients and the logits of its own `...ForCausalLM` class in transformers, or its
training is refused before the first step."""

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from reference import train_on
from small import make_config
from tiers import slow_after
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, CLIPVisionConfig

from llava_fsdp.config import LossConfig, LossKernel, Normalize
from llava_fsdp.export.prove.compare_language import UnlikeOwnClass, check_text, text_difference
from llava_fsdp.export.prove.verify_logits import load_copy
from llava_fsdp.model import logit_change
from llava_fsdp.model.llava.llava import Llava, build_llava
from llava_fsdp.model.load_weights import find_weights
from llava_fsdp.model.logit_change import LogitChange
from llava_fsdp.model.sources.pretrained import find_parts, parts_of
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.train import main as train

TEXT: dict[str, Any] = {
    "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FACTORS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 9},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "tie_word_embeddings": True},
    "cohere": {"logit_scale": 0.8333, "tie_word_embeddings": False},
    "hyperclovax": {"logits_scaling": 0.125},
    "granitemoe": {**EXPERTS, "logits_scaling": 6.0},
    "granite_swa": {"logits_scaling": 3.0, "sliding_window": 9, "tie_word_embeddings": True},
}
"""Language models whose logits are multiplied or divided."""
CAPS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 9, "final_logit_softcapping": 3.0}, "nanochat": {"final_logit_softcapping": 2.0},
    "vaultgemma": {"sliding_window": 9, "final_logit_softcapping": 3.0, "tie_word_embeddings": False},
}  # fmt: skip
"""Language models whose logits are capped."""
FILES = "metrics.jsonl", "validation.jsonl"
KINDS = sorted({*FACTORS, *CAPS}, key=lambda kind: (kind not in ("granite", "gemma2"), kind))
BOTH = ["model.random_weights=false", "model.select_feature=auto", "model.train=[projector,language]"]


@pytest.fixture
def saved(parts: Path, tmp_path: Path) -> Callable[..., Path]:
    """Parts with a language model of the named kind, as transformers saves it. Logits are about as large as a cap."""

    def save(kind: str, **more: Any) -> Path:
        folder = tmp_path / kind
        shutil.copytree(parts, folder)
        vocabulary = json.loads((parts / "language" / "config.json").read_text())["vocab_size"]
        values = TEXT | FACTORS.get(kind, {}) | CAPS.get(kind, {}) | more
        torch.manual_seed(1)
        config = AutoConfig.for_model(kind, **values, vocab_size=vocabulary)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        torch.nn.init.normal_(model.lm_head.weight, std=0.6)
        model.save_pretrained(folder / "language")
        vision = AutoConfig.from_pretrained(parts / "vision")
        AutoModel.from_config(vision, dtype=torch.float32).save_pretrained(folder / "vision")
        return folder

    return save


def read(folder: Path, dataset: Path, loss: LossConfig | None, dtype: torch.dtype = torch.float32) -> Llava:
    """The model as a training reads it from the folder, on the CPU."""
    cfg = make_config(folder, dataset, folder / "run", *BOTH).model
    parts = find_parts(cfg)
    shapes = build_llava(parts, cfg, dtype)
    model = load_copy(shapes, find_weights(shapes, parts, cfg), dtype)
    model.lm_head.label_loss = build_llava(parts, cfg, dtype, None, loss).lm_head.label_loss
    return model.requires_grad_(True)


def text_loss(model: Llava, ids: torch.Tensor) -> torch.Tensor:
    """The summed loss of all tokens of texts but the first of each."""
    nothing, (rows, length) = torch.zeros(0, dtype=torch.int64), ids.shape
    places = (torch.arange(rows)[:, None] * length + torch.arange(length - 1)).flatten()
    return model(ids, None, {}, nothing, places, ids[:, 1:].flatten())


@pytest.mark.parametrize(
    ("kind", "kernel"), slow_after(4, itertools.product(KINDS, [LossKernel.chunked, LossKernel.torch]))
)
def test_loss_gradients_and_logits_are_those_of_the_own_class(
    kind: str, kernel: LossKernel, saved: Callable[..., Path], dataset: Path
) -> None:
    folder = saved(kind)
    loss = LossConfig(normalize=Normalize.step, chunk_tokens=5, kernel=kernel)
    if kernel is LossKernel.torch and kind in CAPS:
        with pytest.raises(ConfigError, match=r"loss\.kernel"):
            read(folder, dataset, loss)
        return
    ours, ids = read(folder, dataset, loss), torch.randint(4, 400, (2, 13), generator=torch.Generator().manual_seed(3))
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder / "language", dtype=torch.float32)
    expected, found = theirs(input_ids=ids, labels=ids).loss * 24, text_loss(ours, ids)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    found.backward()
    own = {name: p.grad for name, p in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        mine = own[name.replace("model.", "language_model.", 1)]
        assert mine is not None and parameter.grad is not None
        assert float((mine - parameter.grad).norm()) < 1e-5 * float(parameter.grad.norm()) + 1e-9, name
    nothing = torch.zeros(0, dtype=torch.int64)
    with torch.no_grad():
        logits = ours(ids, None, {}, nothing, torch.arange(26), return_logits=True)
        assert torch.allclose(logits, theirs(input_ids=ids).logits.flatten(0, 1), atol=1e-5)


@pytest.mark.parametrize("kind", slow_after(1, KINDS))
def test_a_model_without_its_factor_or_cap_is_refused(
    kind: str, saved: Callable[..., Path], dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model whose key is not in the table. The error names the key."""
    folder = saved(kind)
    monkeypatch.setattr(logit_change, "TABLE", ())
    text_difference.cache_clear()
    try:
        with pytest.raises(UnlikeOwnClass, match=r"logit_scale|logits_scaling|final_logit_softcapping"):
            train.train(make_config(folder, dataset, tmp_path / "run", *BOTH, "max_steps=1"))
    finally:
        text_difference.cache_clear()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("kind", "is_equal"),
    slow_after(0, [("granitemoehybrid", True), ("bamba", True), ("gemma4_text", True), ("gemma3n_text", False)]),
)
def test_a_small_copy_of_a_real_size_is_compared(kind: str, is_equal: bool) -> None:
    """Models with state-space layers, values of single layers, and kinds of layers that come late. Gemma 3n gives each
    layer embeddings of the token ids, which its language model does not get here."""
    config = AutoConfig.for_model(kind, pad_token_id=0)
    with contextlib.nullcontext() if is_equal else pytest.raises(UnlikeOwnClass, match=kind):
        check_text(config, kind)


@pytest.mark.parametrize(
    ("kind", "text", "factor", "cap"),
    slow_after(
        0,
        [
            ("llava", {"model_type": "cohere2"}, 1.0, None),
            ("internvl", {"model_type": "gemma2"}, 1.0, None),
            ("paligemma", {"model_type": "gemma2", "final_logit_softcapping": 2.0}, 1.0, 2.0),
            ("granite_docling", {}, 1 / 4, None),
            ("muse_glimmer", {"output_multiplier": 0.5}, 0.5, 20.0),
            ("gemma4", {"final_logit_softcapping": 3.0}, 1.0, 3.0),
        ],
    ),
)
def test_a_language_model_inside_is_compared_with_the_class_around_it(
    kind: str, text: dict[str, Any], factor: float, cap: float | None
) -> None:
    """The class of a vision-language model decides whether its language model's keys are applied."""
    config: Any = AutoConfig.for_model(kind)
    values = {"pad_token_id": 0, **({} if "model_type" in text else config.text_config.to_dict()), **text}
    config.text_config = AutoConfig.for_model(values.pop("model_type"), **values)
    parts = parts_of(config, CLIPVisionConfig())
    assert parts.logit_change == LogitChange(factor, cap)
    if kind != "granite_docling":  # its class needs its whole image part for text, too
        check_text(config, kind)


@pytest.mark.parametrize(("key", "value"), [("logit_scale", 0), ("logit_scale", "0.5"), ("logit_scale", float("inf"))])
def test_a_value_that_no_logits_can_be_computed_with_is_named(key: str, value: Any) -> None:
    config = AutoConfig.for_model("cohere2")
    object.__setattr__(config, key, value)
    with pytest.raises(ModelError, match=key):
        logit_change.logit_change(config)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["cohere2", "gemma2"])
def test_ranks_that_divide_the_model_have_the_losses_of_one(
    kind: str, saved: Callable[..., Path], dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """Ranks that share the vocabulary, stages, and shards; with the losses of validation."""
    folder, found = saved(kind, tie_word_embeddings=False), {}
    held = ["val.every=2", f"val.path={dataset / 'text.json'}", f"val.images={dataset / 'images'}"]
    more = [*BOTH, *held, "pack=true", "tokens_per_micro_batch=256", "max_steps=3", "global_batch_size=12"]
    for name, keys in {
        "one": [], "shards": ["sharding=zero3"], "tensor": ["parallel.tensor=2"], "stages": ["parallel.pipeline=2"],
    }.items():  # fmt: skip
        run = train_on(1 if name == "one" else 2, make_config(folder, dataset, tmp_path / name, *more, *keys), pools)
        rows = [json.loads(line) for file in FILES for line in (run / file).read_text().splitlines()]
        found[name] = [row[key] for row in rows for key in ("loss", "grad_norm") if key in row]
    assert len(found["one"]) > 6
    for name, numbers in found.items():
        assert numbers == pytest.approx(found["one"], rel=1e-5), name
