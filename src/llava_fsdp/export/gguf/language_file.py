"""Write the language model of a LLaVA as a GGUF file for llama.cpp: its keys, tokenizer and tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llava_fsdp.config import KeptDType
from llava_fsdp.export.gguf.gguf_writer import GgufTensor, import_gguf, type_of, write_gguf
from llava_fsdp.export.gguf.model_folder import ModelFolder
from llava_fsdp.export.gguf.vocabulary import add_vocabulary
from llava_fsdp.runtime.errors import ModelError


@dataclass(frozen=True)
class LanguageKind:
    """How llama.cpp names a kind of language model, and what it expects of its tensors.

    Attributes:
        name: llama.cpp's name of the architecture.
        permutes: whether each head's rows of the query and key projections are in another order than transformers':
            llama.cpp rotates neighbouring values, and transformers the two halves of a head.
    """

    name: str
    permutes: bool = False


KINDS = {
    "llama": LanguageKind("llama", permutes=True),
    "mistral": LanguageKind("llama", permutes=True),
    "qwen2": LanguageKind("qwen2"),
    "qwen3": LanguageKind("qwen3"),
}
"""Kinds of language models that can be written, by transformers' `model_type`."""
ROPE_FREQS = "rope_freqs.weight"


def write_language(folder: ModelFolder, path: Path, asked: KeptDType, name: str) -> None:
    """Write a model folder's language model, tokenizer and chat template into the GGUF file `path`.

    Args:
        asked: dtype of the matrices; `keep`: each tensor's own.
        name: name of the model, which llama.cpp shows.

    Raises:
        ModelError: llama.cpp would compute something else with this language model, or tokenize a text otherwise.
    """
    gguf, config = import_gguf(), folder.language
    kind = kind_of(config)
    rows = folder.tensors["model.embed_tokens.weight"].shape[0]
    writer = gguf.GGUFWriter(path, kind.name)
    writer.add_type("model")
    writer.add_name(name)
    add_sizes(writer, config, rows)
    add_vocabulary(writer, folder.path, rows)
    write_gguf(writer, tensors_of(folder, kind, asked))


def kind_of(config: Mapping[str, Any]) -> LanguageKind:
    """Return how llama.cpp names a language model. Raise ModelError if it lacks the kind, or ignores a setting of the
    configuration that changes what is computed."""
    kind = KINDS.get(config["model_type"])
    if kind is None:
        raise ModelError(
            f"format=gguf writes {', '.join(KINDS)} as language model, and this one is a {config['model_type']}"
        )
    rope = config.get("rope_parameters") or {}
    settings = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1, 1),
        "use_sliding_window": (bool(config.get("use_sliding_window")), False),
    }
    for key, (value, needed) in settings.items():
        if value != needed:
            raise ModelError(f"the language model has {key}={value}, and llama.cpp computes with {needed}")
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3"):
        raise ModelError(
            f"the language model has rope_type={rope['rope_type']}; format=gguf writes default, linear and llama3"
        )
    return kind


def add_sizes(writer: Any, config: Mapping[str, Any], rows: int) -> None:
    """Add the keys of a language model with this configuration. `rows`: number of rows of its embeddings.

    The longest context is at most a sliding window: llama.cpp's `llama` has none, and up to its length both compute the
    same.
    """
    gguf = import_gguf()
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    window = config.get("sliding_window") if config["model_type"] == "mistral" else None
    writer.add_context_length(min(config["max_position_embeddings"], window or math.inf))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(rows)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def tensors_of(folder: ModelFolder, kind: LanguageKind, asked: KeptDType) -> dict[str, GgufTensor]:
    """Return the tensors of a language model by their names in the GGUF file. `asked`: the dtype of its matrices. Raise
    ModelError if llama.cpp has no place for one of them."""
    gguf, config = import_gguf(), folder.language
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.name.upper()], config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    counts = {"q_proj": heads, "k_proj": config.get("num_key_value_heads") or heads}
    found = {}
    for name, stored in folder.tensors.items():
        if not name.startswith(("model.", "lm_head.")):
            continue
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue  # llama.cpp takes the embeddings where there is no output layer
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise ModelError(f"llama.cpp's {kind.name} has no place for the weight {name}")
        read, projection = stored.read, name.split(".")[-2]
        if kind.permutes and projection in counts:  # llama.cpp's rotary embedding needs the rows in another order
            read = partial(with_rotated_rows, stored.read, counts[projection])
        found[theirs] = GgufTensor(stored.shape, type_of(stored.shape, stored.dtype, asked), read)
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "llama3":
        size = config.get("head_dim") or config["hidden_size"] // heads
        found[ROPE_FREQS] = GgufTensor((size // 2,), "F32", partial(frequency_divisors, rope, size))
    return found


def with_rotated_rows(read: Any, heads: int) -> torch.Tensor:
    """Return a query or key projection [heads * head size, ...] (or its bias), which `read()` reads, with the rows of
    each head in llama.cpp's order: of the two halves, which transformers rotates against each other, a row in turn."""
    weight = read()
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def frequency_divisors(rope: Mapping[str, Any], size: int) -> torch.Tensor:
    """Return by how much each rotary frequency is divided with the scaling of Llama 3, in shape [size / 2], where
    `size` is that of a head (transformers: modeling_rope_utils.py, `_compute_llama3_parameters`)."""
    frequencies = rope["rope_theta"] ** -(torch.arange(0, size, 2).double() / size)
    lengths = 2 * math.pi / frequencies
    low, high, before = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    smooth = ((before / lengths - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()
