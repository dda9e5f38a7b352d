"""Whole models of transformers: their parts by structure, packed rows, positions, buffers, what trains and what not."""

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, make_model, make_tokenizer, resolve
from small import config_of
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from llava_fsdp.config import Attention, Config, Part
from llava_fsdp.model.architecture import check_abilities, part_name
from llava_fsdp.model.build import build_architecture, why_not_packed
from llava_fsdp.model.flops import token_flops
from llava_fsdp.model.load_weights import stored_buffers
from llava_fsdp.model.logit_change import LogitChange
from llava_fsdp.model.packed_attention.attention import Kernel, RowSegments, each_alone
from llava_fsdp.model.packed_attention.row_mask import BoundaryMask, RowMask, attend_with, make_row_mask
from llava_fsdp.model.parts import Parts
from llava_fsdp.model.sources.class_parts import class_parts
from llava_fsdp.model.sources.pretrained import read_config
from llava_fsdp.model.weights.conversions import whole_model_of
from llava_fsdp.model.weights.init_weights import computed_buffers
from llava_fsdp.model.whole.answers import class_around
from llava_fsdp.model.whole.class_checks import check_logits, check_positions
from llava_fsdp.model.whole.patches import PatchConv3d, multiply_patches
from llava_fsdp.model.whole.positions import positions_of
from llava_fsdp.model.whole.structure import base_of
from llava_fsdp.model.whole.whole import Whole, explained_dtypes
from llava_fsdp.runtime.errors import ConfigError, ModelError

CPU = torch.device("cpu")
LENGTHS = (5, 1, 7)


def family(name: str) -> PretrainedConfig:
    row = FAMILIES[name]
    return CONFIG_MAPPING[row.kind](**resolve(row.config, make_tokenizer(row)))


def parts_of(name: str) -> Parts:
    return class_parts(family(name), Path("no folder"))


@pytest.mark.parametrize("kind", ["florence2", "udop", "vision-encoder-decoder"])
def test_an_encoder_with_a_decoder_is_refused_as_such(kind: str, tmp_path: Path) -> None:
    """Also if its vision part has stages of several sizes."""
    parts = {"encoder": {"model_type": "vit"}, "decoder": {"model_type": "trocr"}} if "-" in kind else {}
    CONFIG_MAPPING[kind](**parts, is_encoder_decoder=True).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="an encoder with a decoder"):
        class_parts(read_config(tmp_path, "model.checkpoint"), tmp_path)


def configure(*overrides: str) -> Config:
    given = ["stage=finetune_task", "model=own", "model.language=no_folder", "model.checkpoint=no_folder"]
    return config_of([*given, "compile=false", "precision=fp32", *overrides])


def build(name: str, *overrides: str, kernel: Kernel | None = None) -> Whole:
    model = build_architecture(parts_of(name), configure(*overrides).model, torch.float32, kernel)
    assert isinstance(model, Whole)
    return model


def segments_of(lengths: tuple[int, ...]) -> RowSegments:
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return RowSegments(torch.cat([torch.arange(length) for length in lengths])[None], ends, lengths)


def mask_of_row() -> BoundaryMask:
    return mask_of((1, sum(LENGTHS)), segments_of(LENGTHS))


def mask_of(shape: tuple[int, int], segments: RowSegments | None = None) -> BoundaryMask:
    return BoundaryMask.of(torch.ones(shape, dtype=torch.bool), segments)


def asked(mask: torch.Tensor, rule: Any, window: int | None = None) -> RowMask:
    """What transformers' function for masks gives back."""
    sizes = {"batch_size": mask.shape[0], "q_length": mask.shape[1], "kv_length": mask.shape[1]}
    return make_row_mask(mask_function=rule, attention_mask=mask, local_size=window, device=CPU, **sizes)


@pytest.mark.parametrize(
    ("name", "language", "towers", "projectors", "blocks"),
    [
        ("gemma3", "model.language_model", ["model.vision_tower"], [], "model.vision_tower.encoder.layers"),
        ("qwen2_vl", "model.language_model", ["model.visual"], ["model.visual.merger"], "model.visual.blocks"),
        (
            "qwen3_vl",
            "model.language_model",
            ["model.visual"],
            ["model.visual.merger", "model.visual.deepstack_merger_list"],
            "model.visual.blocks",
        ),
        ("idefics3", "model.text_model", ["model.vision_model"], [], "model.vision_model.encoder.layers"),
        ("kimi_k25", "model.language_model", ["model.vision_tower"], [], "model.vision_tower.layers"),
    ],
)
def test_parts_are_found_by_structure(
    name: str, language: str, towers: list[str], projectors: list[str], blocks: str
) -> None:
    own = build(name).structure
    assert (own.language, list(own.towers), list(own.stacks)) == (language, towers, [blocks])
    assert list(own.projectors) == projectors


def test_each_parameter_has_one_part() -> None:
    model = build("qwen3_vl", "model.train=[vision,projector,language]")
    counts = {part: sum(p.numel() for m in model.modules_of(part) for p in m.parameters()) for part in Part}
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters()) and min(counts.values()) > 0
    merger = "model.visual.merger.linear_fc1.weight"
    assert model.structure.part_of(merger) is Part.projector
    assert part_name(merger, model.named_parts) == "model.visual.merger"
    assert part_name("lm_head.weight", model.named_parts) == "lm_head"


@pytest.mark.parametrize(
    ("train", "parts"),
    [("projector", {Part.projector}), ("vision", {Part.vision}), ("language:-1", {Part.language})],
)
def test_what_trains_is_what_model_train_names(train: str, parts: set[Part]) -> None:
    model = build("qwen2_vl", f"model.train=[{train}]")
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert {model.structure.part_of(name) for name in trained} == parts
    if train == "language:-1":
        assert trained and all(".layers.2." in name for name in trained)
    assert model.needs_blank is (train != "language:-1")
    assert len(model.blocks()) == 1 + (train == "vision")


def test_parts_and_blocks_that_a_model_lacks_are_refused() -> None:
    with pytest.raises(ConfigError, match="language:7 is not among the 3 blocks"):
        build("gemma3", "model.train=[language:7]").check_trained_blocks()
    build("gemma3", "model.train=[language:-3,vision:0:1]").check_trained_blocks()


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "kimi_k25", "glm4v_moe"])
def test_models_whose_layers_all_attend_by_a_mask_pack_rows(name: str) -> None:
    assert why_not_packed(parts_of(name)) is None


@pytest.mark.parametrize(("name", "reason"), [("qwen3_5", "AttentionInterface"), ("lfm2_vl", "layers of conv")])
def test_models_with_other_layers_have_padded_rows(name: str, reason: str) -> None:
    assert reason in str(why_not_packed(parts_of(name)))
    with pytest.raises(ConfigError, match="pack=true"):
        build(name, kernel=Kernel(Attention.sdpa, ""))


def test_a_mask_keeps_its_boundaries_on_another_device_and_in_nothing_else() -> None:
    mask = mask_of_row()
    moved = mask.to(device="meta", dtype=torch.int64)
    assert isinstance(moved, BoundaryMask) and moved.is_meta
    assert moved.boundaries is not None and moved.boundaries.lengths.each == LENGTHS
    for other in (mask[:, :2], mask.long(), mask & mask):
        assert not isinstance(other, BoundaryMask)
        with pytest.raises(ConfigError, match="pack=false"):
            asked(other, causal_mask_function)


BLOCKS = or_masks(
    sliding_window_causal_mask_function(2), blockwise_overlay(torch.tensor([[-1] * 2 + [0] * 2 + [-1] * 4 + [1] * 5]))
)
"""A window, and two blocks of image tokens that attend to each other: tokens 2 and 3, and 8 to 12."""
RULES = [(causal_mask_function, None), (sliding_window_causal_mask_function(2), 2), (BLOCKS, 2)]


def allowed_by(rule: Any) -> torch.Tensor:
    """Which tokens of the row attend to which, by the rule and within samples, bool [1, 1, 13, 13]."""
    mask = sdpa_mask(1, 13, 13, mask_function=rule, allow_is_causal_skip=False)
    samples = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    assert mask is not None
    return mask & (samples == samples[:, None])


def test_a_causal_row_has_no_masks_and_others_have_those_of_each_sample() -> None:
    rows = [asked(mask_of_row(), *rule) for rule in RULES]
    assert [(row.window, row.masks is None) for row in rows] == [(None, True), (2, True), (None, False)]
    assert rows[2].masks is not None
    assert torch.equal(torch.block_diag(*(own[0, 0] for own in rows[2].masks)).bool(), allowed_by(BLOCKS)[0, 0])


@pytest.mark.parametrize(("rule", "window"), RULES, ids=["causal", "window", "blocks"])
def test_samples_of_a_row_attend_as_each_does_alone(rule: Any, window: int | None) -> None:
    query, key, value = (torch.randn(1, heads, sum(LENGTHS), 6) for heads in (4, 2, 2))
    module: Any = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    row = asked(mask_of_row(), rule, window)
    found, _ = attend_with(each_alone)(module, query, key, value, row, scaling=0.3)
    wanted, _ = sdpa_attention_forward(module, query, key, value, allowed_by(rule), scaling=0.3)
    assert torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize(("rule", "window"), RULES[:2], ids=["causal", "window"])
def test_padded_rows_attend_with_the_same_implementation(rule: Any, window: int | None) -> None:
    query, key, value = (torch.randn(3, heads, 5, 6) for heads in (4, 2, 2))
    module: Any = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    mask = sdpa_mask(3, 5, 5, mask_function=rule, allow_is_causal_skip=False)
    wanted = sdpa_attention_forward(module, query, key, value, mask)[0]
    for size in {window, None}:  # without the window's size, the rule is evaluated
        found, _ = attend_with(each_alone)(module, query, key, value, asked(mask_of((3, 5)), rule, size))
        assert torch.allclose(found, wanted, atol=1e-6)


def test_a_layer_without_the_mask_of_the_row_is_refused() -> None:
    values = torch.randn(1, 2, 3, 4)
    for mask, got in ((None, "no mask"), (torch.ones(1, 1, 3, 3), "a mask of its own")):
        with pytest.raises(ConfigError, match=got):
            attend_with(each_alone)(torch.nn.Module(), values, values, values, mask)


@pytest.mark.parametrize("name", ["qwen2_vl", "glm4v", "paddleocr_vl"])
def test_positions_are_those_of_the_class_and_need_no_model(name: str) -> None:
    config = family(name)
    grid = torch.tensor([[1, 4, 6]])
    ids = torch.tensor([7, *[config.image_token_id] * 6, 8, 9])
    types = (ids == config.image_token_id).long()
    own = positions_of(config)
    assert own is not None
    found = pickle.loads(pickle.dumps(own))(ids, {"mm_token_type_ids": types}, {"image_grid_thw": grid})
    model = make_model(config).model
    wanted, _ = model.get_rope_index(ids[None], mm_token_type_ids=types[None], image_grid_thw=grid)
    assert torch.equal(found, wanted[:, 0]) and found.shape == (3, 9)
    assert positions_of(family("gemma3")) is None


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "glm4v_moe", "kimi_k25", "perception_lm"])
def test_buffers_are_those_of_the_class(name: str) -> None:
    try:
        peer = make_model(family(name))
    except ImportError as error:
        pytest.skip(str(error).splitlines()[0])
    model = build(name)
    saved = set(model.state_dict())
    made = computed_buffers(model, saved)
    wanted = {key: value for key, value in peer.named_buffers() if key not in saved}
    assert made.keys() == wanted.keys()
    assert [key for key, value in wanted.items() if not torch.equal(made[key].to(value.dtype), value)] == []


def test_buffers_in_the_files_of_a_class_are_read(tmp_path: Path) -> None:
    config = family("glm4v_moe")
    peer = make_model(config)
    wanted = {name: own for name, own in peer.named_buffers() if name in peer.state_dict()}
    for buffer in wanted.values():
        buffer.normal_()
    peer.save_pretrained(tmp_path)
    found = stored_buffers(build_architecture(class_parts(config, tmp_path), configure().model, torch.float32))
    assert wanted and found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_class_that_changes_logits_is_refused() -> None:
    config = family("gemma3")
    check_logits(base_of(whole_model_of(config)), LogitChange())
    with pytest.raises(ModelError, match="other logits"):
        check_logits(base_of(whole_model_of(config)), LogitChange(factor=1.01))
    with pytest.raises(ModelError, match="other logits"):
        check_logits(base_of(whole_model_of(config)), LogitChange(cap=100.0))


def test_a_class_that_numbers_tokens_in_another_way_is_refused() -> None:
    for name in ("gemma3", "qwen3_vl", "exaone4_5", "aria"):
        check_positions(base_of(whole_model_of(family(name))))
    with pytest.raises(ModelError, match=r"numbers the tokens of a text \[1, 2, 3\]"):
        check_positions(base_of(whole_model_of(family("paligemma"))))


def test_a_class_whose_language_model_has_the_output_layer_keeps_its_names() -> None:
    model, peer = build("llama4", "model.train=[vision,projector,language]"), whole_model_of(family("llama4"))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in peer.named_parameters()]
    assert model.output_name == "language_model.lm_head" and model.output is model.output_layer()
    own = model.structure
    assert (own.language, own.towers) == ("language_model.model", ("vision_model",))
    parts = {part_name(name, model.named_parts) for name, _ in model.named_parameters()}
    assert parts == {"language_model.model", "language_model.lm_head", "vision_model", "multi_modal_projector"}
    around = class_around(family("llama4"), model)
    assert around.language_model.lm_head is model.output and around.vision_model is model.get_submodule("vision_model")
    assert around.language_model.model is model.language


def test_a_class_that_changes_hidden_states_outside_of_its_base_is_refused() -> None:
    base = base_of(whole_model_of(family("llama4")))
    check_logits(base, LogitChange())
    base = base_of(whole_model_of(family("llama4")))
    base.whole.language_model.register_forward_hook(lambda *call: call[-1].__setitem__("logits", call[-1].logits * 2))
    with pytest.raises(ModelError, match="hidden states"):
        check_logits(base, LogitChange())


def test_two_dtypes_in_a_product_are_explained() -> None:
    left, right = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)
    with (
        pytest.raises(ConfigError, match=r"a Kind does not compute .* set precision.norm_dtype"),
        explained_dtypes("Kind"),
    ):
        torch.mm(left, right)
    with pytest.raises(RuntimeError, match="shapes"), explained_dtypes("Kind"):
        torch.mm(left, torch.ones(3, 2))


def test_random_layer_dropping_is_refused() -> None:
    config = copy.deepcopy(family("gemma3"))
    config.get_text_config().layerdrop = 0.1
    parts = replace(class_parts(config, Path("no folder")), class_config=config)
    with pytest.raises(ModelError, match="layerdrop"):
        build_architecture(parts, configure().model, torch.float32)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("labels=llava_v1_5", "tokens"),
        ("data.image_aspect_ratio=square", "processor"),
        ("data.template=v1", "set data.template=auto"),
        ("data.pixels=fast", "set data.pixels=exact"),
        ("activation_checkpointing=dynamic", "not been tried"),
        ("parallel.pipeline=2", "divide"),
    ],
)
def test_what_a_whole_model_cannot_do_is_one_message(key: str, reason: str) -> None:
    cfg = configure(key)
    model = build("gemma3")
    check_abilities(model, configure("data.image_aspect_ratio=pad"))
    with pytest.raises(ConfigError, match=reason) as raised:
        check_abilities(model, cfg)
    assert key.rpartition("=")[2] in str(raised.value) and "gemma3" in str(raised.value)


@pytest.mark.parametrize("name", ["qwen3_vl", "granite4_vision"])
def test_layers_are_not_divided_where_images_are_added_between_them(name: str) -> None:
    model = build(name)
    with pytest.raises(ConfigError, match=r"parallel\.tensor=2: .* between its layers"):
        check_abilities(model, configure("parallel.tensor=2"))
    check_abilities(model, configure("parallel.context=2"))
    check_abilities(build("qwen2_5_vl"), configure("parallel.tensor=2"))


def test_a_loss_that_balances_experts_needs_routers() -> None:
    build("aria", "model.balance_loss=0.1")
    with pytest.raises(ConfigError, match=r"model\.balance_loss=0\.1"):
        build("gemma3", "model.balance_loss=0.1")


def test_adapters_are_in_the_blocks_of_their_part_alone() -> None:
    model = build("qwen2_vl", "stage=finetune_task_lora", "model.train=[projector,language]")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    own = {name for name in trained if model.structure.part_of(name) is Part.language}
    assert own and all(".lora_" in name and name.startswith("model.language_model.layers.") for name in own)
    assert len(model.adapted) == 3 * 7
    assert {name for name in trained - own} == {
        name for name, _ in model.named_parameters() if model.structure.part_of(name) is Part.projector
    }


def test_the_work_of_an_image_token_counts_the_patches_that_are_joined() -> None:
    model = build("qwen2_vl", "model.train=[language]")
    assert model.patches_per_token == 4
    matrices = [p.numel() for block in model.all_blocks(Part.vision) for p in block.parameters() if p.ndim > 1]
    projector = [p.numel() for m in model.modules_of(Part.projector) for p in m.parameters() if p.ndim > 1]
    assert token_flops(model, False) == 2 * 4 * sum(matrices) + 2 * sum(projector)
    trained = build("qwen2_vl", "model.train=[vision]")
    assert token_flops(trained, False) == 6 * 4 * sum(matrices) + 4 * sum(projector)


@pytest.mark.parametrize("bias", [True, False])
def test_patches_are_multiplied_as_a_convolution_does(bias: bool) -> None:
    """Also if an input is larger than the kernel; the weights are the same object."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv3d(3, 5, (2, 3, 3), (2, 3, 3), bias=bias, dtype=torch.float64))
    theirs, weight = model[0], model[0].weight
    padded = torch.nn.Sequential(torch.nn.Conv3d(3, 5, 3, padding=1))
    multiply_patches(model)
    multiply_patches(padded)
    assert type(model[0]) is PatchConv3d and model[0].weight is weight and type(padded[0]) is torch.nn.Conv3d
    for size in ((2, 3, 3), (4, 6, 3)):
        given = torch.randn(7, 3, *size, dtype=torch.float64)
        found, wanted = model(given), theirs(given)
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        up = torch.randn_like(wanted)
        parameters = list(model.parameters())
        for own, other in zip(
            torch.autograd.grad(found, parameters, up), torch.autograd.grad(wanted, parameters, up), strict=True
        ):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
