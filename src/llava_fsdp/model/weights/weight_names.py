"""Translate between llava_fsdp's parameter names and those in other programs' files.

llava_fsdp's names are those of transformers' LlavaForConditionalGeneration, without the leading `model.`, and without
the part `vision_model.` that the vision tower's names have in some releases and files.
"""

import re

# The first pattern that matches is used. The patterns are for names of the original LLaVA, of models on the hub
# (llava-hf), of transformers' models, and of language models saved alone, in this order.
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
"""Pattern for names of buffers that are computed and not loaded, although some releases of transformers save them."""
ORIGINAL_TOWER = "model.vision_tower.vision_tower."
"""Prefix of the names of a vision tower's tensors in files of the original LLaVA."""
SEQUENTIAL = re.compile(r"^mm_projector\.(\d+)\.")


def ours(name: str) -> str:
    """Translate the name of a tensor in a file of a model or a part of it (not of a LoRA adapter), in any supported
    format, to llava_fsdp's parameter name."""
    for pattern, replacement in RENAMES:
        if pattern.search(name):
            name = pattern.sub(replacement, name)
            break
    # LLaVA's projector is a Sequential of Linear, GELU, Linear, ..., so that every second module has weights
    name = SEQUENTIAL.sub(lambda m: f"multi_modal_projector.linear_{int(m[1]) // 2 + 1}.", name)
    return name.replace("vision_tower.vision_model.", "vision_tower.")


def projector_name(name: str) -> str | None:
    """Translate as `ours` does. Return None if the tensor does not belong to a projector."""
    our_name = ours(name)
    return our_name if our_name == "image_newline" or our_name.startswith("multi_modal_projector.") else None


def original_name(name: str, projector_type: str) -> str:
    """Translate llava_fsdp's parameter name to the name in the original LLaVA.

    The original LLaVA's projector is a Linear, or a Sequential in which every second module has weights. Projectors
    with pixel shuffle exist only in llava_fsdp; their parameters keep transformers' names.
    """
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
    """Translate llava_fsdp's parameter name to the name in adapter files of LLaVA and peft, which do not contain
    `default`, the adapter's name in peft."""
    return without_adapter_name(PEFT + original_name(name, projector_type))


def in_class_adapter(name: str) -> str:
    """Translate the name of a parameter of a whole model of transformers to the name in adapter files of peft."""
    return without_adapter_name(PEFT + name)


def without_adapter_name(name: str) -> str:
    return name.replace(".default.weight", "" if ".lora_magnitude_vector." in name else ".weight")


def ours_in_adapter(name: str) -> str:
    """Translate the name of a tensor in the files of a LoRA adapter to llava_fsdp's parameter name."""
    return with_adapter_name(ours(name.removeprefix(PEFT)))


def in_class(name: str) -> str:
    """Translate the name of a tensor in the files of a LoRA adapter to the parameter name in a whole model of
    transformers."""
    return with_adapter_name(name.removeprefix(PEFT))


def with_adapter_name(name: str) -> str:
    name = re.sub(r"\.(lora_[AB])\.weight$", r".\1.default.weight", name)
    return re.sub(r"\.lora_magnitude_vector(\.weight)?$", ".lora_magnitude_vector.default.weight", name)
