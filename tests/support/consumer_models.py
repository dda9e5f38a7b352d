"""Small trained models for tests in other programs, and questions about images.

Sizes of attention heads are multiples of 32, which vLLM's attention on a CPU needs.
"""

import json
from pathlib import Path

from gguf_models import SIDE, write_clip, write_language, write_siglip
from PIL import Image
from small import make_config, write_dataset

from llava_fsdp.train import main as train

TOKENS = 12
SIZES = {"hidden_size": 128, "head_dim": 32}
COMMON = ["model.random_weights=false", "max_steps=3", "global_batch_size=4", "micro_batch_size=4", "optim.lr=1e-3",
          "export.enabled=true", "export.dtype=fp32", "export.verify=true", "checkpoint.keep=2"]  # fmt: skip
PINPOINTS = f"[[{2 * SIDE},{SIDE}],[{SIDE},{2 * SIDE}],[{2 * SIDE},{2 * SIDE}]]"
OWN, ALL = "data.template=auto", "model.select_feature=auto"
MODELS: dict[str, tuple[str, str, str, list[str]]] = {
    "llava, Llama and CLIP, v1": ("llama", "clip", "finetune", ["data.image_aspect_ratio=pad"]),
    "llava, Qwen3 and SigLIP, own template": (
        "qwen3", "siglip", "finetune", [OWN, ALL, "data.image_aspect_ratio=square"]),
    "llava_next, Llama and CLIP, own template": ("llama3", "clip", "finetune", [
        OWN, "data.image_aspect_ratio=anyres", "model.patch_merge=spatial_unpad", f"data.grid_pinpoints={PINPOINTS}"]),
    "llava_onevision, Qwen2 and SigLIP, own template": ("qwen2", "siglip", "finetune", [
        OWN, ALL, "data.image_aspect_ratio=anyres_max", "model.patch_merge=spatial_unpad", "data.max_tiles=9",
        f"data.grid_pinpoints={PINPOINTS}", "model.select_layer=-1", "data.max_length=512"]),
    "adapters, Llama and CLIP, own template": ("llama3", "clip", "finetune_lora", [OWN]),
}  # fmt: skip
"""Kinds of the language model and the tower, stage and keys of trainings whose exports other programs open."""
CASES: dict[str, tuple[str, list[tuple[int, int]]]] = {
    "text": ("What colour is the sky at noon?", []),
    "an image of the tower's size": ("What colour is it?", [(SIDE, SIDE)]),
    "a wide image": ("Name it.", [(95, 43)]),
    "two images": ("Which is bigger?", [(SIDE, SIDE), (40, 70)]),
}
"""Questions, each with the sizes of its images, which stand before it."""


def train_model(name: str, folder: Path) -> Path:
    """Train a model of MODELS for three steps; return the folder of the run."""
    language, tower, stage, keys = MODELS[name]
    write_language(folder / "parts" / "language", language, **SIZES)
    {"clip": write_clip, "siglip": write_siglip}[tower](folder / "parts" / "vision")
    dataset = write_dataset(folder / "data")
    train.train(make_config(folder / "parts", dataset, folder / "run", *COMMON, *keys, stage=stage))
    return folder / "run"


def write_images(folder: Path) -> dict[str, list[Path]]:
    """The images of each question."""
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, list[Path]] = {}
    for name, (_, sizes) in CASES.items():
        made[name] = []
        for number, (width, height) in enumerate(sizes):
            image = Image.new("RGB", (width, height))
            image.putdata([((x * 7) % 256, (y * 11) % 256, (x * y) % 256) for y in range(height) for x in range(width)])
            made[name].append(folder / f"{name}-{number}.png".replace(" ", "_"))
            image.save(made[name][-1])
    return made


def questions(images: dict[str, list[Path]]) -> str:
    """The questions in JSON, for `transformers_reader` and `vllm_reader`."""
    cases = [{"name": n, "text": text, "images": [str(p) for p in images[n]]} for n, (text, _) in CASES.items()]
    return json.dumps({"tokens": TOKENS, "cases": cases})
