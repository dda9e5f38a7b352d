"""Every field of every model's configuration, set to another legal value: what a training computes with files of
transformers is what the source's own class computes, or the run is refused before its first step by naming the field.

The fields are those of transformers' configuration classes. A text's logits (of a packed row, where the model can be
packed) and an image's features are compared within 1e-5 of the largest."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from config_fields import other_values
from fuzzed import EQUAL, NOTHING, REFUSED, Fuzz, Languages, Table, Towers, changed_outcomes, drops, legal
from test_any_model import IMAGE, LANGUAGE, TEXT, VISION
from test_any_model import REFUSED as REFUSED_KINDS
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from llava_fsdp.model.vision_tower import AUGMENTS

SMALL_TEXT = {"hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2}
"""Sizes of the text part of a whole CLIP or SigLIP."""
WHOLE = {
    kind: {"vision_config": {**IMAGE}, "text_config": {**SMALL_TEXT, "vocab_size": 60, "projection_size": 24,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}} for kind in ("clip", "siglip")
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MORE: dict[str, dict[str, Any]] = {
    "olmo": {}, "olmo3": {"sliding_window": 9}, "ministral": {"sliding_window": 9}, "ministral3": {}, "seed_oss": {},
    "arcee": {}, "helium": {"head_dim": 10}, "apertus": {}, "ernie4_5": {}, "hunyuan_v1_dense": {}, "cohere": {},
    "glm": {}, "nanochat": {}, "vaultgemma": {"sliding_window": 9}, "diffllama": {}, "gpt_neox": {}, "bloom": {},
    "gptj": {"rotary_dim": 4}, "opt": {"word_embed_proj_dim": 40, "ffn_dim": 56}, "granitemoe": {},
    "persimmon": {"num_attention_heads": 5}, "codegen": {"rotary_dim": 4}, "olmoe": {**EXPERTS, "head_dim": 10},
    "phimoe": {**EXPERTS, "num_key_value_heads": 4},
    "minicpm3": {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
                 "head_dim": 8, "num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
}  # fmt: skip
"""Further language models of transformers."""
FAST = [
    (Languages, "gemma2", "final_logit_softcapping"), (Languages, "granite", "residual_multiplier"),
    (Languages, "gemma3_text", "use_bidirectional_attention"), (Languages, "llama", "rope_type=longrope"),
    (Towers, "clip_vision_model", "layer_norm_eps"), (Towers, "dinov3_vit", "num_register_tokens"),
]  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    """The outcomes of all tests of this file. They are written as a table into pytest's folder."""
    found = Table()
    yield found
    path = tmp_path_factory.getbasetemp() / "config_fields.md"
    found.write(path)
    print(f"\nthe fields of all configurations: {path}")


@pytest.fixture(scope="module")
def with_weights(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    for part, auto in (("language", AutoModelForCausalLM), ("vision", AutoModel)):
        shutil.copytree(parts / part, folder / part)
        config = AutoConfig.from_pretrained(folder / part)
        auto.from_config(config, dtype=torch.float32).save_pretrained(folder / part)
    return folder


def values_of(kind: str, folder: Path) -> dict[str, Any]:
    if kind in WHOLE:
        return WHOLE[kind]
    if kind in VISION:
        return IMAGE | VISION[kind]
    own = LANGUAGE[kind] if kind in LANGUAGE else REFUSED_KINDS[kind][0]
    return TEXT | {"vocab_size": AutoConfig.from_pretrained(folder / "language").vocab_size} | own


def check(table: Table, begin: int) -> None:
    silent = [row for row in table.silent() if row in table.rows[begin:]]
    assert not silent, "\n".join(f"{row.kind}.{row.field}={row.value}: {row.why}" for row in silent)


@pytest.mark.parametrize(("fuzz", "kind", "field"), FAST)
def test_a_field(fuzz: type[Fuzz], kind: str, field: str, with_weights: Path, dataset: Path, tmp_path: Path) -> None:
    found = Table()
    own = fuzz(with_weights, dataset, tmp_path)
    changed_outcomes(own, kind, values_of(kind, with_weights), found, only=field)
    check(found, 0)
    assert len(found.rows) == 2
    refused = field in ("use_bidirectional_attention", "rope_type=longrope")
    assert found.rows[1].result == (REFUSED if refused else EQUAL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*LANGUAGE, "phi"])
def test_language_models(kind: str, table: Table, with_weights: Path, dataset: Path, tmp_path: Path) -> None:
    begin = len(table.rows)
    changed_outcomes(Languages(with_weights, dataset, tmp_path), kind, values_of(kind, with_weights), table)
    check(table, begin)
    assert table.rows[begin].result == (REFUSED if kind in REFUSED_KINDS else EQUAL)
    assert len({row.field for row in table.rows[begin:]}) > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
def test_further_language_models(kind: str, table: Table, with_weights: Path, dataset: Path, tmp_path: Path) -> None:
    """Equal or refused, with the values that they have and with every other one."""
    values = TEXT | {"vocab_size": AutoConfig.from_pretrained(with_weights / "language").vocab_size} | MORE[kind]
    begin = len(table.rows)
    changed_outcomes(Languages(with_weights, dataset, tmp_path), kind, values, table)
    check(table, begin)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*VISION, *WHOLE])
def test_vision_towers(kind: str, table: Table, with_weights: Path, dataset: Path, tmp_path: Path) -> None:
    begin = len(table.rows)
    changed_outcomes(Towers(with_weights, dataset, tmp_path), kind, values_of(kind, with_weights), table)
    check(table, begin)
    assert table.rows[begin].result == EQUAL


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*LANGUAGE, *VISION])
def test_dropout_is_applied_as_transformers_applies_it(
    kind: str, with_weights: Path, dataset: Path, tmp_path: Path
) -> None:
    """In training mode, or the run is refused: never ignored where transformers' class has it. The positions that
    DINOv3 moves in its pretraining stay, as docs/models.md says."""
    fuzz = (Towers if kind in VISION else Languages)(with_weights, dataset, tmp_path)
    values = values_of(kind, with_weights)
    for name, _ in other_values(AutoConfig.for_model(kind, **values)):
        if name in AUGMENTS:
            continue
        if any(word in name for word in ("drop", "jitter", "noise")):
            for _, config in legal(kind, values, name, [0.4]):
                theirs, ours = drops(fuzz, config)
                assert ours in (theirs, None), f"{name}: transformers drops: {theirs}, a training: {ours}"


def test_a_silent_difference_is_found(with_weights: Path, dataset: Path, tmp_path: Path) -> None:
    """The comparison itself: weights that were saved for another model."""

    class Wrong(Languages):
        def ours(self, model: Any) -> torch.Tensor:
            return super().ours(model) * (1 + 1e-4)

    found = Table()
    own = Wrong(with_weights, dataset, tmp_path)
    changed_outcomes(own, "llama", values_of("llama", with_weights), found, only="rms_norm_eps")
    assert [row.field for row in found.silent()] == ["(unchanged)", "rms_norm_eps"]
    found.write(tmp_path / "table.md")
    assert "| `llama` | 2 | 0 | 0 | 0 |" in (tmp_path / "table.md").read_text()
    assert NOTHING not in {row.result for row in found.rows}
