"""Every name there and back, and every dialect to the same name."""

import pytest

from llava_fsdp.model.weights.weight_names import (
    COMPUTED,
    in_adapter,
    original_name,
    ours,
    ours_in_adapter,
    projector_name,
)

Q = "layers.1.self_attn.q_proj"
LAYER = f"{Q}.weight"
# ours, the original's, the hub's, and transformers 5's own
DIALECTS = [
    ("language_model.embed_tokens.weight", "model.embed_tokens.weight", "language_model.model.embed_tokens.weight"),
    (f"language_model.{LAYER}", f"model.{LAYER}", f"language_model.model.{LAYER}"),
    ("language_model.norm.weight", "model.norm.weight", "language_model.model.norm.weight"),
    ("lm_head.weight", "lm_head.weight", "language_model.lm_head.weight"),
    (
        f"vision_tower.encoder.{LAYER}",
        f"model.vision_tower.vision_tower.vision_model.encoder.{LAYER}",
        f"vision_tower.vision_model.encoder.{LAYER}",
    ),
    ("multi_modal_projector.linear_1.bias", "model.mm_projector.0.bias", "multi_modal_projector.linear_1.bias"),
    ("multi_modal_projector.linear_2.weight", "model.mm_projector.2.weight", "multi_modal_projector.linear_2.weight"),
]


@pytest.mark.parametrize(("own", "originals", "hubs"), DIALECTS)
def test_dialects(own: str, originals: str, hubs: str) -> None:
    assert original_name(own, "mlp2x_gelu") == originals
    assert projector_name(originals) == (own if own.startswith("multi_modal_projector") else None)
    assert ours(originals) == ours(hubs) == own
    in_memory = own if own.startswith("lm_head") else f"model.{own}"
    assert ours(in_memory) == own
    assert ours(in_memory.replace("vision_tower.", "vision_tower.vision_model.")) == own


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("linear", ["model.mm_projector.weight"]),
        ("mlp1x_gelu", ["model.mm_projector.0.weight"]),
        ("mlp3x_gelu", [f"model.mm_projector.{n}.weight" for n in (0, 2, 4)]),
    ],
)
def test_projectors_of_other_depths(kind: str, names: list[str]) -> None:
    """LLaVA multimodal_projector/builder.py:33-51: one Linear, or a Sequential with activations between."""
    own = [f"multi_modal_projector.linear_{n}.weight" for n in range(1, len(names) + 1)]
    assert [original_name(n, kind) for n in own] == names
    assert [ours(n) for n in names] == own


@pytest.mark.parametrize(
    ("name", "computed"),
    [
        ("position_ids", True),
        ("vision_tower.embeddings.position_ids", True),
        ("language_model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("language_model.rotary_emb.inv_freq", True),
        ("language_model.own_position_ids", False),
        ("language_model.position_ids.weight", False),
        ("language_model.inv_freq", False),
        ("language_model.rotary_embXinv_freq", False),
        ("language_model.rotary_emb.inv_freq_scale", False),
    ],
)
def test_which_tensors_of_a_file_are_computed(name: str, computed: bool) -> None:
    """Only these may be left out of a model that is read."""
    assert bool(COMPUTED.search(name)) is computed


@pytest.mark.parametrize(
    ("own", "in_files"),
    [
        (f"language_model.{Q}.lora_A.default.weight", f"model.{Q}.lora_A.weight"),
        (f"language_model.{Q}.lora_B.default.weight", f"model.{Q}.lora_B.weight"),
        (f"language_model.{Q}.lora_magnitude_vector.default.weight", f"model.{Q}.lora_magnitude_vector"),
        (
            f"vision_tower.encoder.{Q}.base_layer.bias",
            f"model.vision_tower.vision_tower.vision_model.encoder.{Q}.base_layer.bias",
        ),
        ("multi_modal_projector.linear_2.weight", "model.mm_projector.2.weight"),
        ("image_newline", "model.image_newline"),
    ],
)
def test_names_in_the_files_of_an_adapter(own: str, in_files: str) -> None:
    assert in_adapter(own, "mlp2x_gelu") == f"base_model.model.{in_files}"
    assert ours_in_adapter(f"base_model.model.{in_files}") == ours_in_adapter(in_files) == own
    if in_files.endswith("vector"):
        assert ours_in_adapter(f"{in_files}.weight") == own, "as some releases of peft write it"
