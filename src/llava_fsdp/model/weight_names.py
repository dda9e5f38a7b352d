"""What other programs call our parameters.

Ours are those of transformers' LlavaForConditionalGeneration without its leading `model.`, and without the
`vision_model.` that some releases and files have inside the tower.
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
"""Buffers that some releases save with the weights."""
SEQUENTIAL = re.compile(r"^mm_projector\.(\d+)\.")


def ours(name: str) -> str:
    """The parameter of ours that a tensor of any whole model's file is."""
    for pattern, replacement in RENAMES:
        if pattern.search(name):
            name = pattern.sub(replacement, name)
            break
    # the original's projector is Linear, GELU, Linear, ...: every second entry has weights
    name = SEQUENTIAL.sub(lambda m: f"multi_modal_projector.linear_{int(m[1]) // 2 + 1}.", name)
    return name.replace("vision_tower.vision_model.", "vision_tower.")


def ours_in_language(name: str) -> str:
    """Likewise for a file of a language model alone; a bare stack's names have no prefix."""
    found = ours(name)
    return found if found.startswith(("language_model.", "lm_head.")) else f"language_model.{name}"


def ours_in_vision(name: str) -> str:
    """Likewise for a file of a tower, alone or within CLIP or SigLIP (whose text half keeps a name of no use)."""
    return "vision_tower." + name.removeprefix("vision_model.")


def original(name: str, projector_type: str) -> str:
    """The name in the original's files: one `mm_projector` for a linear one, every second of a Sequential else."""
    if name.startswith("language_model."):
        return name.replace("language_model.", "model.", 1)
    if name.startswith("lm_head."):
        return name
    if name == "image_newline":
        return "model.image_newline"
    if name.startswith("vision_tower."):
        return name.replace("vision_tower.", "model.vision_tower.vision_tower.vision_model.", 1)
    _, layer, kind = name.split(".")
    place = "" if projector_type == "linear" else f"{2 * (int(layer.removeprefix('linear_')) - 1)}."
    return f"model.mm_projector.{place}{kind}"


def theirs(name: str) -> str:
    """The name on the hub (llava-hf), which transformers loads in every release."""
    if name.startswith("language_model."):
        return name.replace("language_model.", "language_model.model.", 1)
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1)


PEFT = "base_model.model."
"""In front of every name in an adapter's files."""


def in_adapter(name: str, projector_type: str) -> str:
    """The name in the files of an adapter, which are the original's and peft's: without the adapter's own name."""
    name = PEFT + original(name, projector_type)
    return name.replace(".default.weight", "" if ".lora_magnitude_vector." in name else ".weight")


def ours_in_adapter(name: str) -> str:
    """The parameter of ours that a tensor of an adapter's files is."""
    name = ours(name.removeprefix(PEFT))
    name = re.sub(r"\.(lora_[AB])\.weight$", r".\1.default.weight", name)
    return re.sub(r"\.lora_magnitude_vector(\.weight)?$", ".lora_magnitude_vector.default.weight", name)
