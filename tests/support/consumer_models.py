"""Small trained models for tests in other programs, and questions about images.

Sizes of attention heads are multiples of 32, which vLLM's attention on a CPU needs.
"""

import json
from dataclasses import replace
from pathlib import Path

from families import write_family
from family_parts import rotary
from family_table import FAMILIES
from gguf_models import SIDE, write_clip, write_language, write_siglip
from PIL import Image
from safetensors.torch import load_file, save_file
from small import config_of, make_config, write_dataset

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
WHOLE_MODELS = {
    "qwen2_5_vl": rotary([4, 6, 6]),
    "qwen3_vl": rotary([4, 6, 6], mrope_interleaved=True),
    "internvl": {},
    "idefics3": {},
    "gemma3": {"query_pre_attn_scalar": 32},
}
"""Families whose exports vLLM opens, and fields of their language models that depend on the size of a head."""
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


def train_family(name: str, folder: Path) -> Path:
    """Train a model of WHOLE_MODELS for three steps; return the folder of the run. Raise ImportError if its processor
    needs torchvision and there is none."""
    row = FAMILIES[name]
    text = {**row.config["text_config"], **SIZES, "num_attention_heads": 4, **WHOLE_MODELS[name]}
    vision = dict(row.config["vision_config"])
    if "out_hidden_size" in vision:
        vision["out_hidden_size"] = text["hidden_size"]
    breaks = tuple("\n" * count for count in range(1, 5))  # vLLM looks for them in Gemma's vocabulary
    own = {**row.config, "text_config": text, "vision_config": vision}
    model = write_family(replace(row, config=own, more_tokens=(*row.more_tokens, *breaks)), folder / "model")
    if name == "gemma3":  # the names that published models have; vLLM does not know those that transformers writes
        file = model / "model.safetensors"
        tensors = load_file(file)
        published = {key.replace("vision_tower.", "vision_tower.vision_model."): tensors[key] for key in tensors}
        save_file(published, file, metadata={"format": "pt"})
    dataset = write_dataset(folder / "data")
    data = ["data=llava_json", "data.template=auto", f"data.path={dataset / 'mixed.json'}",
            f"data.images={dataset / 'images'}"]  # fmt: skip
    train.train(config_of([
        "stage=finetune_task", f"model.checkpoint={model}", "model.train=[vision,projector,language]", *data, *COMMON,
        "precision=fp32", "data.workers=0", f"output_dir={folder / 'run'}"]))  # fmt: skip
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
