"""A small model and a small dataset, written to disk, and configurations that use them."""

import functools
import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any, Protocol

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from PIL import Image

from llava_fsdp.config import Config, ConversionConfig, PrepareConfig, config_dir, load
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer

ASSETS = Path(__file__).parents[2] / "src" / "llava_fsdp" / "assets"
WORDS = "red green blue circle square triangle left right of the a is what colour how many small large".split()


def write_parts(folder: Path, spare_rows: int = 5) -> Path:
    """Folders `language` and `vision`; the vocabulary has `spare_rows` more rows than the tokenizer has tokens."""
    size = open_tokenizer(ASSETS / "tiny-llama").size
    language = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": size + spare_rows,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 20,
        "intermediate_size": 30,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "projection_dim": 16,
    }
    preprocessor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": 28,
        "crop_size": 28,
        "do_center_crop": True,
        "do_resize": True,
        "resample": 3,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    write_json(folder / "language" / "config.json", language)
    write_json(folder / "vision" / "config.json", vision)
    write_json(folder / "vision" / "preprocessor_config.json", preprocessor)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        source = ASSETS / "tiny-llama" / name
        if source.is_file():
            (folder / "language" / name).write_bytes(source.read_bytes())
    return folder


def changed_parts(parts: Path, folder: Path, language: dict | None = None, vision: dict | None = None) -> Path:
    """A copy of the parts, with other values in their configurations."""
    for part, values in (("language", language), ("vision", vision)):
        shutil.copytree(parts / part, folder / part)
        config = json.loads((folder / part / "config.json").read_text())
        write_json(folder / part / "config.json", config | (values or {}))
    return folder


def write_wide_parts(folder: Path) -> Path:
    """The same with a language model whose sizes are multiples of 16, but for keys and values: three heads of 8."""
    file = write_parts(folder) / "language" / "config.json"
    write_json(file, json.loads(file.read_text()) | {"hidden_size": 48, "intermediate_size": 64})
    return folder


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_dataset(folder: Path) -> Path:
    dice = random.Random(0)
    (folder / "images").mkdir(parents=True)
    for number in range(12):
        size = (dice.randrange(20, 60), dice.randrange(20, 60))
        picture = Image.effect_noise(size, 80).convert("RGB")
        picture.save(folder / "images" / f"{number}.{'png' if number % 2 else 'jpg'}")
    # text only: a third of the records, in stretches, so that some steps have few or no pictures
    mixed = [record(dice, n, n % 7 in (1, 2) or 24 <= n < 34) for n in range(44)]
    write_json(folder / "mixed.json", mixed)
    write_json(folder / "text.json", [record(dice, n, True) for n in range(20)])
    captions = [
        {
            "id": f"c{n}",
            "image": f"{n % 12}.{'png' if n % 2 else 'jpg'}",
            "conversations": [
                {"from": "human", "value": "<image>\nDescribe it."},
                {"from": "gpt", "value": sentence(dice, 3, 12)},
            ],
        }
        for n in range(30)
    ]
    write_json(folder / "captions.json", captions)
    return folder


def record(dice: random.Random, number: int, text_only: bool) -> dict:
    turns = []
    for turn in range(dice.choice([1, 1, 2, 3])):
        tag = "<image>\n" if turn == 0 and not text_only else ""
        turns.append({"from": "human", "value": tag + sentence(dice, 2, 20)})
        turns.append({"from": "gpt", "value": sentence(dice, 1, 9)})
    picture = {} if text_only else {"image": f"{number % 12}.{'png' if number % 12 % 2 else 'jpg'}"}
    return {"id": f"r{number}", **picture, "conversations": turns}


def sentence(dice: random.Random, least: int, most: int) -> str:
    return " ".join(dice.choices(WORDS, k=dice.randrange(least, most)))


def make_config(parts: Path, dataset: Path, output: Path, *overrides: str, stage: str = "finetune") -> Config:
    """A training run of the small model in fp32, without export, changed by Hydra overrides."""
    values = [
        f"stage={stage}",
        f"model.language={parts / 'language'}",
        f"model.vision={parts / 'vision'}",
        "model.projector=random",
        "model.random_weights=true",
        "data=llava_json",
        f"data.path={dataset / ('captions.json' if stage == 'pretrain' else 'mixed.json')}",
        f"data.images={dataset / 'images'}",
        "data.workers=0",
        "data.max_length=256",
        f"output_dir={output}",
        "precision=fp32",
        "activation_checkpointing=none",
        "compile=false",
        "export.enabled=false",
        "optim.lr=3e-3",
        "optim.projector_lr=null",
        "optim.schedule=cosine",
        "optim.warmup_ratio=0.1",
        "global_batch_size=12",
        "micro_batch_size=12",
        "max_steps=4",
    ]
    return config_of([*values, *overrides])


def config_of(overrides: list[str], name: str = "train") -> Config:
    return command_config(PrepareConfig if name == "prepare" else Config, name, *overrides)


def command_config(kind: type, name: str, *overrides: str) -> Any:
    """The configuration of the command `name` with these keys on its command line."""
    return load(kind, compose_quickly(name, list(overrides)))


def compose_quickly(name: str, overrides: list[str]) -> DictConfig:
    """What Hydra makes of a command line.

    Files are read once for each set of choices: Hydra takes longer for that than a small training for a step.
    """
    choices, values = [], []
    for override in map(parsed, overrides):
        is_choice = override.key_or_group.startswith("hydra.") or (config_dir() / override.key_or_group).is_dir()
        (choices if is_choice else values).append(override)
    node = pickle.loads(composed(name, tuple(override.input_line for override in choices)))
    try:
        ConfigLoaderImpl._apply_overrides_to_config(values, node)
    except HydraException:  # so that its message is the one of the command
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            node = compose(name, overrides)
    return node


@functools.cache
def parsed(override: str) -> Override:
    return OverridesParser.create().parse_override(override)


@functools.cache
def composed(name: str, choices: tuple[str, ...]) -> bytes:
    """A pickle, which is read faster than a configuration is copied."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return pickle.dumps(compose(name, list(choices)))


def conversion(source: Path | str, to: Path, *overrides: str) -> ConversionConfig:
    """What `python -m llava_fsdp.export source=... to=...` makes."""
    return command_config(ConversionConfig, "export", f"source={source}", f"to={to}", *overrides)


class Configure(Protocol):
    """The fixture `configure`: `make_config` for the session's small model and dataset."""

    def __call__(self, *overrides: str, to: str | Path = "", stage: str = "finetune") -> Config: ...


def with_heads(parts: Path, folder: Path, heads: int, keys: int) -> Path:
    """A copy of a model without weights, with other numbers of attention heads and of heads of keys and values."""
    shutil.copytree(parts, folder, dirs_exist_ok=True)
    path = folder / "language" / "config.json"
    sizes = {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": 10}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    return folder
