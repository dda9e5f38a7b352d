"""Small LLaVA models for exports in GGUF: language models of four kinds, with tokenizers of each splitting rule, and a
SigLIP or CLIP tower."""

import json
from pathlib import Path
from typing import Any

import torch
from chat_templates import CORPUS
from safetensors.torch import save_file
from small import ASSETS, write_json
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    CLIPVisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from llava_fsdp.export.gguf.vocabulary import RULES, pre_tokenizer_of_rule_step

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 640, "initializer_range": 0.15,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rule": "", "rope_theta": 100000.0, "tie_word_embeddings": False, "attention_bias": True},
    "llama_legacy": {"rule": "", "rope_theta": 10000.0, "tie_word_embeddings": False},
    "llama3": {"rule": "llama-bpe", "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "mistral": {"rule": "gpt-2", "sliding_window": 512, "rms_norm_eps": 1e-5},
    "qwen2": {"rule": "qwen2", "rope_theta": 1000000.0, "tie_word_embeddings": True},
    "qwen3": {"rule": "smollm", "rope_theta": 1000000.0, "tie_word_embeddings": True},
}
"""Settings of each language model, and the splitting rule of its tokenizer; empty for one of pieces (`▁`). That of
`llama_legacy` puts a space before each text that follows a special token."""
PATCH, SIDE = 14, 42


def write_byte_tokenizer(folder: Path, rule: str) -> int:
    """A tokenizer with one of the splitting rules; returns its number of tokens."""
    steps = next(steps for steps, name in RULES.items() if name == rule)
    made = FastTokenizer(models.BPE(ignore_merges=rule == "llama-bpe"))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer_of_rule_step(kind, value) for kind, value in steps])
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator([CORPUS + " it's I'LL don't 2024 100 1234567 ...\n\n\t x (the (the"] * 3, trainer)
    made.save(str(folder / "tokenizer.json"))
    names = {"bos_token": special[1], "eos_token": special[2], "pad_token": special[0]}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    (folder / "chat_template.jinja").write_text(CHATML)
    return made.get_vocab_size()


def write_language(folder: Path, kind: str, **sizes: int) -> Path:
    """A language model with random weights whose choices are far apart. `sizes` replace those of TEXT."""
    folder.mkdir(parents=True)
    settings = dict(KINDS[kind])
    rule = settings.pop("rule")
    if rule:
        size = write_byte_tokenizer(folder, rule)
    else:
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"):
            if (ASSETS / "tiny-llama" / name).is_file():
                (folder / name).write_bytes((ASSETS / "tiny-llama" / name).read_bytes())
        if kind == "llama_legacy":
            path = folder / "tokenizer.json"
            space = {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
            steps = {"normalizer": {"type": "Sequence", "normalizers": [*space]}, "pre_tokenizer": None}
            write_json(path, json.loads(path.read_text()) | steps)
            names = folder / "tokenizer_config.json"
            write_json(names, json.loads(names.read_text()) | {"legacy": True})
        size = FastTokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    config = AutoConfig.for_model(
        kind if kind in ("mistral", "qwen2", "qwen3") else "llama", **(TEXT | settings | sizes), vocab_size=size + 3
    )
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write_siglip(folder: Path) -> Path:
    torch.manual_seed(4)
    config = SiglipVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, image_size=SIDE,
        patch_size=PATCH, hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip
    tower = SiglipVisionModel(config)
    for parameter in tower.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(std=0.08)
    tower.save_pretrained(folder)
    half = [0.5, 0.5, 0.5]
    preprocessor = {
        "image_processor_type": "SiglipImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": 3,
    }
    preprocessor |= {"size": {"height": SIDE, "width": SIDE}, "do_rescale": True, "rescale_factor": 1 / 255}
    write_json(
        folder / "preprocessor_config.json",
        preprocessor | {"do_normalize": True, "image_mean": half, "image_std": half},
    )
    return folder


def write_clip(folder: Path) -> Path:
    """A CLIP tower of the same width."""
    torch.manual_seed(4)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=SIDE, patch_size=PATCH)).save_pretrained(folder)
    preprocessor = {"image_processor_type": "CLIPImageProcessor", "size": SIDE, "crop_size": SIDE, "resample": 3}
    mean = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]}
    write_json(folder / "preprocessor_config.json", preprocessor | mean | {"do_resize": True, "do_center_crop": True})
    return folder


def write_projector(folder: Path, inner: int, outer: int) -> Path:
    """A folder with a projector alone."""
    folder.mkdir()
    dice = torch.Generator().manual_seed(5)
    shapes = {"0.weight": (outer, inner), "0.bias": (outer,), "2.weight": (outer, outer), "2.bias": (outer,)}
    values = {f"model.mm_projector.{name}": torch.randn(shape, generator=dice) / 8 for name, shape in shapes.items()}
    save_file(values, folder / "mm_projector.safetensors", metadata={"format": "pt"})
    config = {"model_type": "llava_llama", "mm_projector_type": "mlp2x_gelu", "mm_vision_tower": "none/named"}
    write_json(folder / "config.json", config | {"mm_vision_select_layer": -2, "mm_vision_select_feature": "cls_patch"})
    return folder


def write_model(folder: Path, kind: str) -> tuple[Path, list[str]]:
    """A language model of `kind`, a SigLIP tower and a projector: the source of an export, and the keys with it."""
    language, vision = write_language(folder / "language", kind), write_siglip(folder / "vision")
    width = json.loads((language / "config.json").read_text())["hidden_size"]
    template = "v1" if not KINDS[kind]["rule"] else "chat_template"
    return write_projector(folder / "projector", 64, width), [
        f"language={language}", f"vision={vision}", f"template={template}", "image_aspect_ratio=square",
    ]  # fmt: skip
