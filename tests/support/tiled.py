"""A dataset of images of several tiles, and small models that are trained on them."""

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from small import write_json, write_parts
from transformers import AutoModelForImageTextToText

SIZES = {"wide": (93, 41), "dot": (1, 1), "high": (30, 77)}
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 20, "intermediate_size": 30, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
SIGLIP_IMAGES: dict[str, Any] = {
    "image_processor_type": "SiglipImageProcessor", "size": {"height": 28, "width": 28}, "resample": 2,
    "image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.6],
}  # fmt: skip


OLDER = {"torch_dtype", "rope_theta", "rope_scaling", "image_aspect_ratio", "image_token_id", "video_token_id"}
"""Fields of an export's configuration for other programs than transformers 5."""


def without_older_fields(fields: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """An export's configuration, in all its parts, without fields for other programs that `theirs` does not have."""
    kept = {key: value for key, value in fields.items() if key in theirs or key not in OLDER}
    parts = {key: value for key, value in kept.items() if isinstance(value, dict) and isinstance(theirs.get(key), dict)}
    return kept | {key: without_older_fields(value, theirs[key]) for key, value in parts.items()}


def write_pictures(folder: Path) -> None:
    """Write a dataset: a picture of several tiles, one of a single pixel, two in a sample, and a text."""
    (folder / "images").mkdir()
    for name, size in SIZES.items():
        Image.effect_noise(size, 90).convert("RGB").save(folder / "images" / f"{name}.png")
    questions: list[tuple[list[str], str]] = [
        (["wide"], "<image>\nwhat is left"),
        (["dot"], "<image>\nhow large is it"),
        (["high", "wide"], "is <image> left of<image>"),
        ([], "what colour is the circle"),
    ]
    records = [
        {
            "id": str(number),
            **({"image": [f"{name}.png" for name in names]} if names else {}),
            "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "the red circle"}],
        }
        for number, (names, text) in enumerate(questions)
    ]
    write_json(folder / "mixed.json", records)


def parts_of(kind: str, folder: Path) -> Path:
    """CLIP and Llama, or SigLIP and a Qwen3 with tied embeddings."""
    write_parts(folder, spare_rows=0)
    language = json.loads((folder / "language" / "config.json").read_text())
    if kind == "siglip_qwen3":
        write_json(folder / "vision" / "config.json", SIGLIP)
        write_json(folder / "vision" / "preprocessor_config.json", SIGLIP_IMAGES)
        tied = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
        write_json(folder / "language" / "config.json", language | tied | {"head_dim": 6})
    if kind == "clip_mistral":
        window = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 9}
        write_json(folder / "language" / "config.json", language | window)
    return folder


def loaded(folder: Path) -> Any:
    """A model folder opened with its own class of transformers, which finds a weight for everything."""
    auto: Any = AutoModelForImageTextToText
    model, info = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert [type(model).__name__] == model.config.architectures
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model
