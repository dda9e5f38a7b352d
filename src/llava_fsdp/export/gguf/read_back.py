"""Read written GGUF files back, and compare them with the model folder of which they were made.

Transformers' own reader of GGUF files is the judge of the language model: its names, its order of rows and its
configuration. Nothing is computed with the model here; `run_llama_cpp` does that.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llava_fsdp.data.images.preprocess import preprocessor_fields
from llava_fsdp.data.text.chat_template.bounded_jinja import TemplateRefused
from llava_fsdp.data.text.chat_template.template_file import find_file
from llava_fsdp.export.gguf.gguf_writer import import_gguf, read_gguf
from llava_fsdp.export.gguf.language_file import ROPE_FREQS
from llava_fsdp.export.gguf.model_folder import ModelFolder
from llava_fsdp.export.gguf.vision_file import file_name, last_layer
from llava_fsdp.export.gguf.vocabulary import open_vocabulary, special_ids
from llava_fsdp.export.write.chat_template import PROBES, STRETCHES, SYSTEM_PROBE, as_text, render_messages
from llava_fsdp.runtime.errors import ModelError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Q8_ERROR = (0.5 + 127 / 2048) / 127
"""Largest error of a value in Q8_0, as a part of the largest of its 32 values: half a step, and the rounding of the
step to F16."""
SMALLEST = 127 * 2.0**-25
"""Largest error of a value whose block has a step that is too small for F16."""
TEXTS = (
    "In 2024: 1, 12, 123 and 1234567 (the last one).", "it's, I'LL, don't; WE'VE", "a  b   c\t\td \n\n\n e\r\nf ",
    "f(x)=[y+1]; //the end", "naïve café, résumé", "日本語とかな, русский, עברית, हिन्दी", "🙂🙃 x🙂",
    "!!! ... ???\n?\n",
)  # fmt: skip
"""Texts that splitting rules split differently."""
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "rms_norm_eps", "vocab_size",
)  # fmt: skip
"""Keys of a language model's configuration that transformers reads from a GGUF file."""


def prove_files(folder: ModelFolder, made: Path) -> None:
    """Compare `model.gguf` and `mmproj.gguf` in `made` with the model folder. Raise ModelError if a tensor, a key, the
    token ids of a text or the chat template differ."""
    model, mmproj = made / "model.gguf", made / "mmproj.gguf"
    keys, parsed = keys_of(model), load_gguf_checkpoint(str(model))["config"]
    check_language_keys(folder, model, keys, parsed)
    check_tokens(folder.path, model, keys)
    found = language_tensors(folder, model, keys["general.architecture"], parsed)
    compare_tensors(found, {name: name for name in folder.tensors if is_needed(folder, name)}, folder, model)
    expected = {}
    for name in folder.tensors:
        theirs = file_name(name, last_layer(folder))
        if theirs is not None:
            expected[theirs] = name
    compare_tensors(read_gguf(mmproj), expected, folder, mmproj)
    check_vision_keys(folder, mmproj)


def is_needed(folder: ModelFolder, name: str) -> bool:
    """Return whether a tensor belongs into the file of the language model."""
    is_tied = folder.language.get("tie_word_embeddings")
    return name.startswith("model.") or (name == "lm_head.weight" and not is_tied)


def language_tensors(
    folder: ModelFolder, path: Path, architecture: str, parsed: dict[str, Any]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield transformers' name, the type, and the values of each tensor of a language model's file, as transformers
    reads them; ModelError if it has no place for one. `parsed`: the configuration that it reads from the file."""
    config: Any = AutoConfig.for_model(**folder.language)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=parsed)
    names = get_gguf_hf_weights_map(model, processor, model_type=architecture)
    is_scaled = False
    for name, kind, values in read_gguf(path):
        if name == ROPE_FREQS:
            check_rope(config, values, path)
            is_scaled = True
            continue
        if name not in names:
            raise ModelError(f"{path} has the tensor {name}, for which transformers has no place")
        read = processor.process(weights=values.numpy(), name=name).weights
        yield names[name], kind, torch.from_numpy(np.ascontiguousarray(read))
    if is_scaled != (folder.language["rope_parameters"].get("rope_type") == "llama3"):
        raise ModelError(f"{path} has {ROPE_FREQS} without need, or lacks it")


def check_rope(config: Any, divisors: torch.Tensor, path: Path) -> None:
    """Raise ModelError unless the rotary frequencies are divided as transformers does it."""
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(len(divisors)) / len(divisors))
    if not torch.allclose(plain / divisors, frequencies, rtol=1e-5):
        raise ModelError(f"{path} has rotary frequencies that are not transformers'")


def compare_tensors(
    found: Iterator[tuple[str, str, torch.Tensor]], expected: Mapping[str, str], folder: ModelFolder, path: Path
) -> None:
    """Compare tensors of a file with those of the model folder, rounded in the same way.

    Args:
        found: name, type and values of each tensor.
        expected: the name in the model folder of each tensor that must be there, by its name in `found`.

    Raises:
        ModelError: a tensor is missing, is too much, or has other values.
    """
    missing = dict(expected)
    for name, kind, values in found:
        if name not in missing:
            raise ModelError(f"{path} has {name}, which does not belong there")
        source = folder.tensors[missing.pop(name)].read().float()
        is_equal = source.shape == values.shape and (
            is_close(source, values) if kind == "Q8_0" else torch.equal(source.to(DTYPES[kind]).float(), values)
        )
        if not is_equal:
            raise ModelError(f"{path}: {name} has other values than {folder.path}")
    if missing:
        raise ModelError(f"{path} lacks {sorted(missing)[0]}")


def is_close(source: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether values of Q8_0 are those of `source` within the rounding of their blocks of 32."""
    blocks, read = source.reshape(-1, 32), values.reshape(-1, 32)
    return bool(((blocks - read).abs() <= Q8_ERROR * blocks.abs().amax(1, keepdim=True) + SMALLEST).all())


def keys_of(path: Path) -> dict[str, Any]:
    """Return the keys of a GGUF file."""
    return {name: field.contents() for name, field in import_gguf().GGUFReader(path).fields.items()}


def check_language_keys(folder: ModelFolder, path: Path, keys: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise ModelError if a language model's file, which has these keys, is of another configuration. `found`: the
    configuration that transformers reads from it."""
    expected = folder.language
    for key in SIZES:
        if not np.isclose(found[key], expected[key], rtol=1e-6):
            raise ModelError(f"{path} has {key}={found[key]}, and {folder.path} {expected[key]}")
    theta = found.get("rope_theta") or found["rope_parameters"]["rope_theta"]
    if not np.isclose(theta, expected["rope_parameters"]["rope_theta"]):
        raise ModelError(f"{path} has rope_theta={theta}, and {folder.path} {expected['rope_parameters']}")
    rope = expected["rope_parameters"]
    factor = keys.get(f"{keys['general.architecture']}.rope.scaling.factor", 1.0)
    if not np.isclose(factor, rope["factor"] if rope.get("rope_type") == "linear" else 1.0):
        raise ModelError(f"{path} divides rotary frequencies by {factor}, and {folder.path} has {rope}")
    if bool(found["tie_word_embeddings"]) != bool(expected.get("tie_word_embeddings")):
        raise ModelError(f"{path} has tie_word_embeddings={found['tie_word_embeddings']}, unlike {folder.path}")


def check_vision_keys(folder: ModelFolder, path: Path) -> None:
    """Raise ModelError if the file of a vision tower has other sizes, another activation, or another normalisation of
    pixels than the model folder."""
    keys, vision, used = keys_of(path), folder.vision, last_layer(folder)  # `used`: number of its layers that are used
    fields = preprocessor_fields(folder.path)
    values = [vision["layer_norm_eps"], *fields["image_mean"], *fields["image_std"]]
    found = [keys["clip.vision.attention.layer_norm_epsilon"]]
    found += [*keys["clip.vision.image_mean"], *keys["clip.vision.image_std"]]
    if not np.allclose(found, values, rtol=1e-6, atol=0):
        raise ModelError(f"{path} has the epsilon, mean and deviation {found}, and {folder.path} {values}")
    expected: dict[str, Any] = {
        "image_size": vision["image_size"], "patch_size": vision["patch_size"], "block_count": used,
        "embedding_length": vision["hidden_size"], "feed_forward_length": vision["intermediate_size"],
        "attention.head_count": vision["num_attention_heads"], "feature_layer": [used],
        "projection_dim": folder.language["hidden_size"],
    }  # fmt: skip
    if keys["clip.use_gelu"] != (vision["hidden_act"] == "gelu_pytorch_tanh"):
        raise ModelError(f"{path} has another activation than {vision['hidden_act']}")
    for key, value in expected.items():
        if keys[f"clip.vision.{key}"] != value:
            raise ModelError(f"{path} has {key}={keys[f'clip.vision.{key}']}, and {folder.path} {value}")


def check_tokens(folder: Path, path: Path, keys: dict[str, Any]) -> None:
    """Compare the chat template and the special tokens of a file, which has these keys, with those of the model folder,
    and the token ids that its tokenizer gives texts with those of transformers. Raise ModelError if they differ."""
    code = find_file(folder)  # (file of the chat template, its Jinja code), or None
    if keys.get("tokenizer.chat_template") != (code and code[1]):
        raise ModelError(f"{path} has another chat template than {folder}")
    if keys["tokenizer.ggml.add_bos_token"]:
        raise ModelError(f"{path} lets llama.cpp add a BOS token, which the chat template writes")
    for name, token in special_ids(folder, keys["tokenizer.ggml.tokens"]).items():
        if keys.get(f"tokenizer.ggml.{name}_token_id") != token:
            raise ModelError(f"{path} names another {name} token than {folder}")
    theirs: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    ours = open_vocabulary(keys)
    for text in prompts_of(theirs):
        expected, found = theirs(text, add_special_tokens=False)["input_ids"], ours.encode(text).ids
        if found != expected:
            raise ModelError(f"{path} gives {text!r} the token ids {found}, and transformers {expected}")


def prompts_of(tokenizer: Any) -> Iterator[str]:
    """Yield prompts by the chat template of transformers' tokenizer, for test conversations that it accepts. `texts`
    are questions and answers in turn, of which the last answer is left out."""
    for texts in (*PROBES, *((text, "") for text in (*STRETCHES, *TEXTS))):
        for system in (None, SYSTEM_PROBE):
            try:
                yield render_messages(tokenizer, as_text(texts, system)[:-1], add_generation_prompt=True)
            except TemplateRefused:
                continue
