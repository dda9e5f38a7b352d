"""Write the vision tower and the projector of a LLaVA as a GGUF file for llama.cpp (its `mmproj`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llava_fsdp.config import KeptDType
from llava_fsdp.data.images.preprocess import preprocessor_fields
from llava_fsdp.export.gguf.gguf_writer import GgufTensor, import_gguf, type_of, write_gguf
from llava_fsdp.export.gguf.model_folder import ModelFolder
from llava_fsdp.runtime.errors import ModelError

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
CLIP_FAULT = (
    "llama.cpp computes CLIP towers wrongly: it puts the class token last, and numbers and selects the tokens as if it "
    "were first, so that every patch has its neighbour's position and the first is lost "
    "(https://github.com/ggml-org/llama.cpp/issues/25814)"
)
OF_TOWER = {
    "embeddings.class_embedding": "v.class_embd",
    "embeddings.patch_embedding.weight": "v.patch_embd.weight",
    "embeddings.patch_embedding.bias": "v.patch_embd.bias",
    "embeddings.position_embedding.weight": "v.position_embd.weight",
    "pre_layrnorm.weight": "v.pre_ln.weight",
    "pre_layrnorm.bias": "v.pre_ln.bias",
}
"""llama.cpp's names of a vision tower's tensors outside its layers, by transformers'. Both towers' last norm and
SigLIP's pooling head come after the features that a LLaVA uses: llama.cpp would apply the norm."""
OF_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out", "layer_norm1": "ln1", "layer_norm2": "ln2", "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}  # fmt: skip
OF_PROJECTOR = {
    f"linear_{layer}.{part}": f"mm.{2 * layer - 2}.{part}" for layer in (1, 2) for part in ("weight", "bias")
}
PROJECTOR = "multi_modal_projector."
EXACT = ("v.patch_embd.weight", "v.position_embd.weight")
"""Matrices that llama.cpp takes in F32."""


def check_vision(config: Mapping[str, Any], with_clip: bool) -> None:
    """Raise ModelError if llama.cpp computes something else than a model of this configuration with its images.
    `with_clip`: whether a CLIP tower is accepted, although llama.cpp computes it wrongly."""
    vision = config["vision_config"]
    if config["model_type"] != "llava":
        raise ModelError(
            f"format=gguf writes models with one square image (llava), and this one is a {config['model_type']}: "
            "llama.cpp joins tiles otherwise"
        )
    if vision["model_type"] not in (CLIP, SIGLIP):
        raise ModelError(f"llama.cpp has no vision tower {vision['model_type']} for LLaVA; it has CLIP and SigLIP")
    if vision["model_type"] == CLIP and not with_clip:
        raise ModelError(f"{CLIP_FAULT}. Train with a SigLIP tower, or write the files anyway with gguf_clip=true")
    if config["vision_feature_select_strategy"] != ("default" if vision["model_type"] == CLIP else "full"):
        raise ModelError("llama.cpp drops the class token of a CLIP tower, and this model was trained with it")
    if not isinstance(config["vision_feature_layer"], int):
        raise ModelError("this model joins features of several layers of its vision tower; llama.cpp takes one")
    activation = vision.get("hidden_act")
    if activation not in ("quick_gelu", "gelu_pytorch_tanh"):
        raise ModelError(f"the vision tower has hidden_act={activation}, and llama.cpp computes another one")
    if config.get("projector_hidden_act", "gelu") != "gelu":
        raise ModelError(f"the projector has {config['projector_hidden_act']} between its layers; llama.cpp has gelu")


def write_vision(folder: ModelFolder, path: Path, asked: KeptDType, name: str) -> None:
    """Write the vision tower and projector of a model folder into the GGUF file `path`. `check_vision` accepts the
    model. `asked`: dtype of the matrices; `keep`: each tensor's own. `name`: the model's name, which llama.cpp shows.
    """
    writer = import_gguf().GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_name(f"{name} vision")
    add_keys(writer, folder)
    write_gguf(writer, tensors_of(folder, asked))


def last_layer(folder: ModelFolder) -> int:
    """Return how many layers of the vision tower are computed for the features that the model uses."""
    selected = folder.config["vision_feature_layer"]
    return selected if selected >= 0 else folder.vision["num_hidden_layers"] + 1 + selected


def add_keys(writer: Any, folder: ModelFolder) -> None:
    """Add the keys of a vision tower and projector to a GGUF file."""
    # used: number of the tower's layers up to the one whose features the model takes
    vision, used = folder.vision, last_layer(folder)
    fields = preprocessor_fields(folder.path)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("mlp")
    writer.add_bool("clip.has_llava_projector", True)
    writer.add_vision_image_size(vision["image_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_head_count(vision["num_attention_heads"])
    writer.add_vision_attention_layernorm_eps(vision["layer_norm_eps"])
    writer.add_vision_projection_dim(folder.language["hidden_size"])
    writer.add_vision_block_count(used)
    # without it llama.cpp takes the features before the last layer of the file
    writer.add_array("clip.vision.feature_layer", [used])
    writer.add_vision_use_gelu(vision["hidden_act"] != "quick_gelu")
    writer.add_vision_image_mean(fields["image_mean"])
    writer.add_vision_image_std(fields["image_std"])


def tensors_of(folder: ModelFolder, asked: KeptDType) -> dict[str, GgufTensor]:
    """Return the tensors of a vision tower and projector by their names in the file. Raise ModelError if the projector
    is not one of llama.cpp. `asked`: dtype of the matrices; those in EXACT are F32 in any case."""
    names = {n.removeprefix(PROJECTOR) for n in folder.tensors if n.startswith(PROJECTOR)}
    if names != OF_PROJECTOR.keys():
        raise ModelError(f"llama.cpp's projector has two linear layers with biases; this one has {sorted(names)}")
    found = {}
    for name, stored in folder.tensors.items():
        theirs = file_name(name, last_layer(folder))
        if theirs is not None:
            kind = type_of(stored.shape, stored.dtype, asked, theirs in EXACT)
            found[theirs] = GgufTensor(stored.shape, kind, stored.read)
    return found


def file_name(name: str, used: int) -> str | None:
    """Return the name in the GGUF file of a tensor of a model folder; None for a tensor of the language model, or one
    that the features after `used` layers do not need."""
    if name.startswith(PROJECTOR):
        return OF_PROJECTOR[name.removeprefix(PROJECTOR)]
    tower, _, rest = name.partition("vision_tower.")
    if tower or not rest:
        return None
    if not rest.startswith("encoder.layers."):
        return OF_TOWER.get(rest)
    _, _, number, part = rest.split(".", 3)
    module, _, kind = part.rpartition(".")
    return f"v.blk.{number}.{OF_LAYER[module]}.{kind}" if int(number) < used else None
