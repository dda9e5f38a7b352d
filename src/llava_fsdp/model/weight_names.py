"""Translate between llava_fsdp's parameter names and those in other programs' files.

llava_fsdp's names are those of transformers' LlavaForConditionalGeneration without the leading `model.`, and without
the `vision_model.` that some releases and files have inside the vision tower.
"""

import re

# first match wins; the original's names (LLaVA), the hub's (llava-hf), transformers' own, then bare parts
RENAMES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"^model\.image_newline$", "image_newline"),
        (r"^model\.vision_tower\.vision_tower\.", "vision_tower."),
        (r"^model\.mm_projector\.(weight|bias)$", r"multi_modal_projector.linear_1.\1"),
        (r"^model\.mm_projector\.", "mm_projector."),
        (r"^language_model\.model\.", "language_model."),
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^model\.(language_model|vision_tower|multi_modal_projector)\.", r"\1."),
        (r"^model\.", "language_model."),
    ]
]
COMPUTED = re.compile(r"(^|\.)(position_ids|rotary_emb\.inv_freq)$")
"""Pattern for names of buffers that some releases of transformers save with the weights, although they are computed."""
ORIGINAL_TOWER = "model.vision_tower.vision_tower."
"""Beginning of the names of a vision tower's tensors in files of the original LLaVA."""
SEQUENTIAL = re.compile(r"^mm_projector\.(\d+)\.")


def ours(name: str) -> str:
    """Return llava_fsdp's parameter name for a tensor of a full-model checkpoint (not an adapter) in any supported
    format."""
    for pattern, replacement in RENAMES:
        if pattern.search(name):
            name = pattern.sub(replacement, name)
            break
    # LLaVA's projector is Linear, GELU, Linear, ...: every second entry has weights
    name = SEQUENTIAL.sub(lambda m: f"multi_modal_projector.linear_{int(m[1]) // 2 + 1}.", name)
    return name.replace("vision_tower.vision_model.", "vision_tower.")


def projector_name(name: str) -> str | None:
    """Return llava_fsdp's parameter name for a tensor of a projector in any supported format; None for other
    tensors."""
    own = ours(name)
    return own if own == "image_newline" or own.startswith("multi_modal_projector.") else None


def original(name: str, projector_type: str) -> str:
    """Translate llava_fsdp's parameter name to the original LLaVA's. The original's projector is one Linear, or a
    Sequential in which every second module has weights. A projector with pixel shuffle, which the original does not
    have, keeps transformers' names."""
    if name.startswith("language_model."):
        return name.replace("language_model.", "model.", 1)
    if name.startswith("lm_head."):
        return name
    if name == "image_newline":
        return "model.image_newline"
    if name.startswith("vision_tower."):
        return name.replace("vision_tower.", "model.vision_tower.vision_tower.vision_model.", 1)
    if projector_type.startswith("pixel_shuffle"):
        return f"model.{name}"
    _, layer, kind = name.split(".")
    place = "" if projector_type == "linear" else f"{2 * (int(layer.removeprefix('linear_')) - 1)}."
    return f"model.mm_projector.{place}{kind}"


PEFT = "base_model.model."
"""Prefix of every name in an adapter's files."""


def in_adapter(name: str, projector_type: str) -> str:
    """Translate llava_fsdp's parameter name to that in adapter files of LLaVA and peft. These files omit `default`, the
    adapter's name in peft."""
    name = PEFT + original(name, projector_type)
    return name.replace(".default.weight", "" if ".lora_magnitude_vector." in name else ".weight")


def ours_in_adapter(name: str) -> str:
    """Translate the name of a tensor in an adapter's files to llava_fsdp's parameter name."""
    name = ours(name.removeprefix(PEFT))
    name = re.sub(r"\.(lora_[AB])\.weight$", r".\1.default.weight", name)
    return re.sub(r"\.lora_magnitude_vector(\.weight)?$", ".lora_magnitude_vector.default.weight", name)
