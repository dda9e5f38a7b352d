"""Whether the output layer has the weight of the embeddings is decided as transformers' own class decides it, from the
flag in each place where it can stand and from what the files hold."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import make_config, write_json
from tiers import slow_after
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from llava_fsdp.export.prove.verify_logits import load_copy
from llava_fsdp.model.llava.llava import Llava, build_llava
from llava_fsdp.model.load_weights import find_weights
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.runtime.files.provenance import write_sealed_notes

VOCABULARY = 611
TEXT = {
    "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 31,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
}  # fmt: skip
VISION: dict[str, dict[str, Any]] = {
    "clip_vision_model": {"hidden_size": 20, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2,
                          "image_size": 28, "patch_size": 14},
    "internvl_vision": {"hidden_size": 20, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2,
                        "image_size": [28, 28], "patch_size": [14, 14]},
}  # fmt: skip
KEYS = ["model.random_weights=false", "model.train=[projector,language]"]
WHOLE = {
    "llava": [],
    "llava_next": ["model.patch_merge=spatial_unpad", "data.image_aspect_ratio=anyres",
                   "data.grid_pinpoints=[[56,28],[28,56]]"],
    "llava_onevision": ["model.patch_merge=spatial_unpad", "data.image_aspect_ratio=anyres_max",
                        "data.grid_pinpoints=[[56,28],[28,56]]", "model.select_feature=full"],
    "internvl": ["model.projector_type=pixel_shuffle2x_mlp2x_gelu", "model.select_feature=auto"],
}  # fmt: skip
"""Kinds of whole models, and configuration keys with which they are read."""
FLAGS = (True, False, None)


def save(kind: str, folder: Path) -> Any:
    """Let transformers draw and save a model with an output layer of its own; the class with which it is read."""
    torch.manual_seed(5)
    if kind == "qwen3":
        auto, config = AutoModelForCausalLM, AutoConfig.for_model(**TEXT)
    else:
        tower = "internvl_vision" if kind == "internvl" else "clip_vision_model"
        more: dict[str, Any] = {"image_grid_pinpoints": [[28, 56], [56, 28]]} if "_" in kind else {}
        if kind == "llava_onevision":
            more["vision_feature_select_strategy"] = "full"
        vision = {"model_type": tower, **VISION[tower]}
        auto, config = AutoModelForImageTextToText, AutoConfig.for_model(
            kind, text_config=TEXT, vision_config=vision, image_token_index=VOCABULARY - 1,
            image_token_id=VOCABULARY - 1, image_seq_length=1 if kind == "internvl" else 4, vision_feature_layer=-2,
            **more,
        )  # fmt: skip
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    model: Any = cast("Any", auto).from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(model.get_output_embeddings().weight)
    model.save_pretrained(folder)
    return auto


def set_flags(folder: Path, top: bool | None, text: bool | None) -> None:
    raw = json.loads((folder / "config.json").read_text())
    for place, value in ((raw, top), (raw.get("text_config", {}), text)):
        place.pop("tie_word_embeddings", None)
        if value is not None:
            place["tie_word_embeddings"] = value
    write_json(folder / "config.json", raw)


def set_head(folder: Path, held: str) -> None:
    """Leave the output layer in the files with values of its own, or with those of the embeddings, or remove it."""
    tensors = load_file(folder / "model.safetensors")
    head = next(name for name in tensors if name.endswith("lm_head.weight"))
    embeddings = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    if held == "equal":
        tensors[head] = tensors[embeddings].clone()
    elif held == "none":
        del tensors[head]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def read(kind: str, place: str, folder: Path, parts: Path, dataset: Path, run: Path) -> Llava:
    """The model as a training reads it."""
    if place == "language":
        keys = [f"model.language={folder}", f"model.vision={parts / 'vision'}"]
    else:
        keys = [f"model.checkpoint={folder}", "model.projector=auto", *WHOLE[kind]]
        if kind == "internvl":  # as this package has trained it; others are trained as their class has them
            write_sealed_notes(folder, {"vocab_size": VOCABULARY})
    cfg = make_config(parts, dataset, run, *KEYS, *keys).model
    found = find_parts(cfg)
    shapes = build_llava(found, cfg, torch.float32)
    return load_copy(shapes, find_weights(shapes, found, cfg), torch.float32)


CASES = [
    (kind, place, *rest)
    for kind, place, rest in itertools.product(
        ("qwen3", *WHOLE), ("language", "checkpoint"), itertools.product(("own", "equal", "none"), FLAGS, FLAGS)
    )
    if not (kind == "qwen3" and (place == "checkpoint" or rest[2] is not None))
]
FIRST = [("qwen3", "language", "own", True, None), ("llava_next", "checkpoint", "own", True, False),
         ("llava", "language", "own", None, True), ("llava_next", "language", "own", None, True),
         ("internvl", "checkpoint", "own", None, None)]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "place", "held", "top", "text"), slow_after(3, [*FIRST, *(c for c in CASES if c not in FIRST)])
)
def test_a_folder_is_read_as_its_own_class_reads_it(
    kind: str, place: str, held: str, top: bool | None, text: bool | None, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    folder, own_parts = tmp_path / kind, tmp_path / "parts"
    auto = save(kind, folder)
    set_flags(folder, top, text)
    set_head(folder, held)
    shutil.copytree(parts, own_parts)
    AutoModel.from_config(AutoConfig.from_pretrained(parts / "vision")).save_pretrained(own_parts / "vision")
    theirs, info = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if any("lm_head" in name for name in info["missing_keys"]):  # transformers draws one, with a warning
        with pytest.raises(ModelError, match="lm_head"):
            read(kind, place, folder, own_parts, dataset, tmp_path / "run")
        return
    ours = read(kind, place, folder, own_parts, dataset, tmp_path / "run")
    rows = ours.parts.language.vocab_size
    head, embeddings = theirs.get_output_embeddings().weight, theirs.get_input_embeddings().weight
    assert torch.equal(ours.lm_head.weight, head[:rows])
    assert torch.equal(ours.language_model.get_input_embeddings().weight, embeddings[:rows])
    assert (ours.lm_head.weight is ours.language_model.get_input_embeddings().weight) is (head is embeddings)
    ids = torch.randint(3, rows, (2, 9))
    nothing = torch.zeros(0, dtype=torch.int64)
    found = ours(ids, None, {}, nothing, torch.arange(18), return_logits=True)
    assert torch.allclose(found, theirs(input_ids=ids).logits.flatten(0, 1)[:, :rows], atol=1e-5)
