"""Every name there and back, and every dialect to the same name."""

import pytest

from llava_fsdp.model.names import original, ours, theirs

LAYER = "layers.1.self_attn.q_proj.weight"
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
    assert original(own, "mlp2x_gelu") == originals and theirs(own) == hubs
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
    assert [original(n, kind) for n in own] == names
    assert [ours(n) for n in names] == own
