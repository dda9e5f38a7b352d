"""An export contains the factor of its language model's logits in the weight of the output layer: transformers' LLaVA
class, which has no such factor, computes the logits of the language model's own class from it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import conversion, make_config
from tiers import slow_after
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlavaForConditionalGeneration

from llava_fsdp.export.main import export
from llava_fsdp.export.prove.verify_logits import load_copy
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.load_weights import find_weights
from llava_fsdp.model.logit_change import logit_change
from llava_fsdp.model.sources import pretrained
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.train import main as train

TEXT: dict[str, Any] = {
    "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 6, "qk_nope_head_dim": 6,
    "v_head_dim": 6, "dim_model_base": 16, "hidden_size": 48,
}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], float]] = {
    "granite": ({"logits_scaling": 8.0, "embedding_multiplier": 12.0, "tie_word_embeddings": True}, 1 / 8),
    "cohere2": ({"sliding_window": 9, "tie_word_embeddings": False}, 1 / 16),
    "cohere": ({"logit_scale": 0.8333, "tie_word_embeddings": True}, 0.8333),
    "hyperclovax": ({"logits_scaling": 3.0, "tie_word_embeddings": False}, 3.0),
    "minicpm3": (MLA | {"tie_word_embeddings": True}, 1 / 3),
}
"""Language models: values of their configurations, and the factor of their logits."""
READ = ["model.random_weights=false", "model.select_feature=auto", "model.train=[projector,language]"]
STILL = ["export.enabled=true", "max_steps=1", "optim.lr=0", "optim.projector_lr=0"]


@pytest.fixture
def saved(parts: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Parts with a language model of the named kind, as transformers saves it."""

    def save(kind: str) -> Path:
        folder = tmp_path / "parts"
        shutil.copytree(parts, folder)
        vocabulary = json.loads((parts / "language" / "config.json").read_text())["vocab_size"]
        torch.manual_seed(1)
        config = AutoConfig.for_model(kind, **(TEXT | KINDS[kind][0]), vocab_size=vocabulary)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "language")
        vision = AutoConfig.from_pretrained(parts / "vision")
        AutoModel.from_config(vision, dtype=torch.float32).save_pretrained(folder / "vision")
        return folder

    return save


@torch.no_grad()
def own_logits(folder: Path, dtype: torch.dtype, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the language model's own class, with weights that are rounded to a dtype and computed with in fp32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.float()(input_ids=ids).logits


@torch.no_grad()
def read_again(key: str, folder: Path, parts: Path, dataset: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a folder that a training of ours reads."""
    keys = [f"model.vision={parts / 'vision'}", *(["model.projector=auto"] if "checkpoint" in key else [])]
    cfg = make_config(parts, dataset, parts / "unused", *READ, *keys, f"{key}={folder}").model
    found = find_parts(cfg)
    shapes = build_llava(found, cfg, torch.float32)
    model = load_copy(shapes, find_weights(shapes, found, cfg), torch.float32)
    nothing = torch.zeros(0, dtype=torch.int64)
    places = torch.arange(ids.numel())
    return model(ids, None, {}, nothing, places, return_logits=True).view(*ids.shape, -1)


@pytest.mark.parametrize(
    ("kind", "dtype"), slow_after(1, [(kind, dtype) for kind in KINDS for dtype in ("bf16", "fp32")])
)
def test_an_export_has_the_logits_of_the_own_class(
    kind: str, dtype: str, saved: Callable[[str], Path], dataset: Path, tmp_path: Path
) -> None:
    """In each way in which it is read again, and after another conversion. Powers of two change no digit in bf16."""
    folder, factor = saved(kind), KINDS[kind][1]
    rounded = torch.bfloat16 if dtype == "bf16" else torch.float32
    assert logit_change(AutoConfig.from_pretrained(folder / "language")).factor == pytest.approx(factor)
    train.train(make_config(folder, dataset, tmp_path / "run", *READ, *STILL, f"export.dtype={dtype}"))
    made = tmp_path / "run" / "export"
    before, after = load_file(folder / "language" / "model.safetensors"), load_file(made / "model.safetensors")
    old = before.get("lm_head.weight", before["model.embed_tokens.weight"]).to(rounded)
    head = after["language_model.lm_head.weight"][: len(old)]
    assert head.dtype == rounded and torch.equal(head, (old.float() * factor).to(rounded))
    is_exact = dtype == "fp32" or factor in (1 / 8, 1 / 16)
    ids = torch.randint(4, len(old) // 2, (2, 11), generator=torch.Generator().manual_seed(2))
    expected = own_logits(folder / "language", rounded, ids)
    bound = 1e-5 if is_exact else 1e-2
    theirs: Any = LlavaForConditionalGeneration.from_pretrained(made, dtype=torch.float32).requires_grad_(False)
    assert theirs.config.tie_word_embeddings is False and theirs.config.text_config.tie_word_embeddings is False
    assert logit_change(theirs.config.text_config).changes_nothing
    again = export(conversion(made, tmp_path / "again"))
    assert {n: t.tolist() for n, t in load_file(again / "model.safetensors").items()} == {
        n: t.tolist() for n, t in after.items()
    }
    found = {
        "transformers": theirs(input_ids=ids).logits[..., : len(old)],
        "checkpoint": read_again("model.checkpoint", made, folder, dataset, ids),
        "language": read_again("model.language", made, folder, dataset, ids)[..., : len(old)],
    }
    for which, logits in found.items():
        assert float((logits - expected).abs().max() / expected.abs().max()) < bound, which


@pytest.mark.parametrize("kind", slow_after(0, ["cohere2", "granite", "minicpm3"]))
def test_adapters_are_merged_into_an_export_with_the_factor(
    kind: str, saved: Callable[[str], Path], dataset: Path, tmp_path: Path
) -> None:
    """At the end of a training, and by the command, which compares the export with base and adapter."""
    folder = saved(kind)
    lora = ["model.lora.enabled=true", "model.lora.r=3", "export.enabled=true", "export.dtype=fp32", "max_steps=2"]
    train.train(make_config(folder, dataset, tmp_path / "run", *READ, *lora))
    made = export(conversion(tmp_path / "run" / "adapter", tmp_path / "made"))
    ids = torch.randint(4, 200, (2, 11), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = [
            LlavaForConditionalGeneration.from_pretrained(each, dtype=torch.float32)(input_ids=ids).logits
            for each in (made, tmp_path / "run" / "export")
        ]
    assert torch.allclose(*found, atol=1e-5 * float(found[0].abs().max()))
    with pytest.raises((ConfigError, ModelError)):
        export(conversion(made, tmp_path / "original", "format=llava"))


@pytest.mark.slow
def test_an_export_is_refused_whose_source_transformers_reads_otherwise(
    saved: Callable[[str], Path], dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read is compared with transformers' class for the source folder, not with what is written alone. Here the
    output layer in the files is dropped, because the flag says that it has the weight of the embeddings."""
    folder = saved("cohere2")
    train.train(make_config(folder, dataset, tmp_path / "run", *READ, *STILL, "export.dtype=fp32"))
    made = tmp_path / "run" / "export"
    (made / "llava_fsdp.json").unlink()
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    export(conversion(made, tmp_path / "right"))
    monkeypatch.setattr(pretrained, "is_tied", lambda *_: True)
    with pytest.raises(ModelError, match="own class"):
        export(conversion(made, tmp_path / "wrong"))
    assert not (tmp_path / "wrong").exists()
