"""Before the first step, a language model whose tokens depend on later ones is refused; and one whose tokens depend on
padding answers each prompt alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import make_config
from tiers import slow_after
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLTextModel

from llava_fsdp.export.prove.check_causal import answers_alone, check_causal, padding_changes, what_is_seen
from llava_fsdp.export.prove.small_copy import NoSmallCopy, shrink
from llava_fsdp.model.config_key import ConfigKey
from llava_fsdp.model.llava.llava import Llava, build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.train import main as train

SIZES = {"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 6,
    "num_key_value_heads": 2, "vocab_size": 640, "pad_token_id": 0}  # fmt: skip
LATER = {"gemma": {}, "gemma2": {}, "gemma3_text": {"sliding_window": 9}}


def model_of(kind: str, parts: Path, dataset: Path, tmp_path: Path, *keys: str, **values: Any) -> Llava:
    AutoConfig.for_model(kind, **values).save_pretrained(tmp_path / "language")
    own = [f"model.language={tmp_path / 'language'}", "pack=false", *keys]
    cfg = make_config(parts, dataset, tmp_path / "run", *own)
    return build_llava(find_parts(cfg.model), cfg.model, torch.float32)


@pytest.mark.parametrize("kind", LATER)
@pytest.mark.parametrize("sees", [True, False])
def test_attention_in_both_directions(kind: str, sees: bool, parts: Path, dataset: Path, tmp_path: Path) -> None:
    values = {**SIZES, **LATER[kind], "use_bidirectional_attention": sees}
    model, state = model_of(kind, parts, dataset, tmp_path, **values), torch.get_rng_state()
    if sees:
        with pytest.raises(ModelError, match=rf"{kind}.*use_bidirectional_attention=True"):
            check_causal(model)
    else:
        check_causal(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_experts_that_mix_tokens(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Doge's router reads the scores of one half of a batch's tokens as those of the other half."""
    with pytest.raises(ModelError, match=r"doge.*later tokens, because of .*is_moe=True"):
        check_causal(model_of("doge", parts, dataset, tmp_path, **SIZES, is_moe=True))


@pytest.mark.parametrize("mixed", [True, False])
def test_rows_that_change_one_another(
    mixed: bool, parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, inputs_embeds: torch.Tensor, **_: Any) -> Any:
        found = inputs_embeds.cumsum(1) + self.norm.weight
        return SimpleNamespace(last_hidden_state=found + inputs_embeds.mean(0) if mixed else found)

    model = model_of("llama", parts, dataset, tmp_path, **SIZES, max_position_embeddings=77)
    monkeypatch.setattr(LlamaModel, "forward", forward)
    what_is_seen.cache_clear()
    if mixed:
        with pytest.raises(ModelError, match="other rows"):
            check_causal(model)
    else:
        check_causal(model)
    what_is_seen.cache_clear()


@pytest.mark.parametrize("kind", slow_after(2, ["llama", "gpt_oss", "lfm2", "biogpt", "llama4_text", "bloom", "mamba"]))
def test_causal_models_pass_in_their_real_sizes(kind: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    check_causal(model_of(kind, parts, dataset, tmp_path))


@pytest.mark.parametrize("pack", ["auto", "false"])
def test_a_training_is_refused_before_its_first_step(pack: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    vocabulary = AutoConfig.from_pretrained(parts / "language").vocab_size
    language = tmp_path / "language"
    values = {**SIZES, "vocab_size": vocabulary, "use_bidirectional_attention": True}
    for file in (parts / "language").iterdir():
        (language / file.name).parent.mkdir(exist_ok=True)
        (language / file.name).write_bytes(file.read_bytes())
    AutoConfig.for_model("gemma", **values).save_pretrained(language)
    keys = [f"model.language={language}", f"pack={pack}", "max_steps=1"]
    with pytest.raises(ModelError, match="use_bidirectional_attention"):
        train.train(make_config(parts, dataset, tmp_path / "run", *keys))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_small_copy_that_cannot_run_refuses_nothing(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """OPT's embeddings have a width of their own, which a small copy keeps."""
    sizes = {**SIZES, "word_embed_proj_dim": 40, "ffn_dim": 56}
    model = model_of("opt", parts, dataset, tmp_path, **sizes)
    with pytest.raises(NoSmallCopy):
        what_is_seen(ConfigKey(shrink(model.parts.language, 2)))
    check_causal(model)


@pytest.mark.parametrize("sparse", [True, False])
def test_attention_that_counts_padding(sparse: bool) -> None:
    """MiniMax-M3 chooses blocks of keys by their places in the row."""
    kinds = ["full_attention", "minimax_m3_sparse"] if sparse else ["full_attention"] * 2
    config = AutoConfig.for_model("minimax_m3_vl", text_config={"num_hidden_layers": 2, "layer_types": kinds})
    small = shrink(config.text_config, 2)
    assert padding_changes(MiniMaxM3VLTextModel, ConfigKey(small)) is sparse


@pytest.mark.parametrize("kind", slow_after(2, ["llama", "lfm2", "biogpt", "llama4_text", "qwen3_5_text", "doge"]))
def test_padding_that_is_left_out_allows_batches(kind: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    assert not answers_alone(model_of(kind, parts, dataset, tmp_path).parts)


def test_a_model_that_cannot_be_tried_answers_each_prompt_alone(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """No small copy is made of a Mamba, which has no heads."""
    assert answers_alone(model_of("mamba", parts, dataset, tmp_path).parts)
