"""A training of each family against transformers' own class, one sample at a time: weights, losses and gradients."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool, single_world
from loaders import agreed_steps
from small import conversion, write_json
from steps import begin
from tiers import any_but, slow_after
from torch.distributed.tensor import DTensor
from whole_loop import weights_of
from whole_models import (
    PADDED,
    WHOLE,
    WholeModel,
    assert_same_gradients,
    conversation,
    example_of,
    named,
    own_gradients,
    peer_gradients,
    peer_loss,
)

from llava_fsdp.config import Config
from llava_fsdp.data.loader import Loader
from llava_fsdp.export.main import export
from llava_fsdp.model.weights.tensor_files import open_tensors
from llava_fsdp.parallel.precision.precision import is_norm
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import ConfigError, DataError, LlavaFsdpError, ModelError
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.main import settle_auto, train
from llava_fsdp.train.setup.build_state import open_data
from llava_fsdp.train.setup.preflight import open_model, preflight
from llava_fsdp.train.setup.unused import freeze_unused
from llava_fsdp.train.state import TrainState

Whole = Callable[[str], WholeModel]
CONSTANT = "optim.schedule=constant", "optim.warmup_ratio=0"
SEED = 9
"""Draws the two texts first, of two and two samples with images."""
FAST = ("gemma3", "paddleocr_vl", "granite4_vision", "fast_vlm")


def begun(world: World, cfg: Config) -> TrainState:
    """A run before its first step, whose rows are packed if the model allows it."""
    return begin(world, settle_auto(cfg, world))


def full(values: torch.Tensor) -> torch.Tensor:
    return values.full_tensor() if isinstance(values, DTensor) else values.detach()


@pytest.mark.parametrize("name", any_but(["gemma3"], WHOLE))
def test_what_is_read_is_what_transformers_reads(name: str, whole: Whole, tmp_path: Path) -> None:
    model = whole(name)
    peer, own = model.peer(), begun(single_world(), model.config(tmp_path)).model
    wanted, found = (dict(m.named_parameters(remove_duplicate=False)) for m in (peer, own))
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if not torch.equal(full(found[n]), wanted[n])] == []
    buffers, made = dict(peer.named_buffers()), dict(own.named_buffers())
    assert [n for n in buffers if n not in made or not torch.equal(full(made[n]), buffers[n])] == []


@pytest.mark.parametrize("name", any_but(FAST, WHOLE))
def test_loss_and_gradients_of_a_row_are_the_sum_over_its_samples(name: str, whole: Whole, tmp_path: Path) -> None:
    model = whole(name)
    loss, gradients = peer_gradients(model)
    own_loss, own, micros = own_gradients(begun(single_world(), model.config(tmp_path)))
    assert [len(micro.lengths) for micro in micros] == [0 if name in PADDED else 4]
    assert own_loss == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(own, gradients, 1e-4 if name == "qwen3_5" else 1e-5)


@pytest.mark.parametrize("name", any_but([], WHOLE))
def test_losses_and_gradients_have_the_weights_of_the_records(name: str, whole: Whole, tmp_path: Path) -> None:
    model, peer = whole(name), whole(name).peer()
    rows = [{**row, "weight": 0.5**number} for number, row in enumerate(model.records("few"))]
    write_json(tmp_path / "a.json", rows)
    total = 0.0
    for row in rows:
        loss = row["weight"] * peer_loss(peer, example_of(model, row))
        loss.backward()
        total += loss.item()
    wanted = {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}
    own_loss, own, _ = own_gradients(begun(single_world(), model.config(tmp_path, f"data.path={tmp_path / 'a.json'}")))
    assert own_loss == pytest.approx(total, rel=1e-5)
    assert_same_gradients(own, wanted, 1e-4 if name == "qwen3_5" else 1e-5)


@pytest.mark.parametrize("name", any_but(["gemma3"], WHOLE))
def test_blocks_that_run_again_attend_in_the_same_way(name: str, whole: Whole, tmp_path: Path) -> None:
    """Activation checkpointing runs a block again in the backward pass, after the forward pass has ended."""
    model = whole(name)
    _, gradients = peer_gradients(model)
    _, own, _ = own_gradients(begun(single_world(), model.config(tmp_path, "activation_checkpointing=full")))
    assert_same_gradients(own, gradients, 1e-4 if name == "qwen3_5" else 1e-5)


def test_plan_and_doctor_notice_a_processor_that_cannot_be_opened(whole: Whole, tmp_path: Path) -> None:
    model = whole("gemma3")
    preflight(model.config(tmp_path), torch.device("cpu"))
    broken = replace(model, folder=shutil.copytree(model.folder, tmp_path / "broken"))
    (broken.folder / "processor_config.json").unlink()
    with pytest.raises(ModelError, match="has no preprocessor_config"):
        preflight(broken.config(tmp_path), torch.device("cpu"))


def test_a_start_compares_nothing_with_the_original(
    whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its trainer does not know such a model."""
    train(whole("gemma3").config(tmp_path / "out"))
    screen = capsys.readouterr().err
    assert "finetune_task" in screen and "unlike LLaVA" not in screen
    assert '"unlike": null' in (tmp_path / "out/starts.jsonl").read_text()


@pytest.mark.parametrize("name", any_but(["paddleocr_vl"], WHOLE))
def test_a_micro_batch_does_not_depend_on_the_one_before_it(name: str, whole: Whole, tmp_path: Path) -> None:
    """Models with positions in three axes remember an offset of their last call."""
    model = whole(name)
    loss, gradients = peer_gradients(model)
    own_loss, own, micros = own_gradients(
        begun(single_world(), model.config(tmp_path, "pack=false", "micro_batch_size=1"))
    )
    assert len(micros) == 4
    assert own_loss == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(own, gradients, 1e-4 if name == "qwen3_5" else 1e-5)


def gradients_on_a_rank(world: World, cfg: Config) -> tuple[float, dict[str, torch.Tensor], bool]:
    """This rank's loss, the gradients over all ranks, and whether this rank has a label."""
    state = begun(world, cfg)
    loss, found, micros = own_gradients(state)
    return loss, found, any(len(micro.label_ids) > 0 for micro in micros)


@pytest.mark.ranks
@pytest.mark.parametrize("name", any_but(["gemma3"], WHOLE))
@pytest.mark.parametrize("sharding", slow_after(1, ["zero2", "zero3"]))
def test_a_rank_without_images_trains_with_one_that_has_some(
    name: str, sharding: str, whole: Whole, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    model = whole(name)
    loss, gradients = peer_gradients(model, "pair")
    cfg = model.config(tmp_path, f"sharding={sharding}", "micro_batch_size=1", records="pair")
    results = pools[2].run(gradients_on_a_rank, cfg)
    assert all(has_label for *_, has_label in results)
    assert sum(own for own, *_ in results) == pytest.approx(loss, rel=1e-5)
    for _, own, _ in results:
        assert_same_gradients(own, gradients, 1e-4 if name == "qwen3_5" else 1e-5)


def trained_on_a_rank(world: World, cfg: Config) -> tuple[list[float], list[int], list[dict[str, torch.Tensor]]]:
    """Losses, numbers of images and weights after each step; at first, the weights before."""
    state = begun(world, cfg)
    losses, images, weights = [], [], [weights_of(state)]
    for step in agreed_steps(state.loader):
        losses.append(train_step(state, step, cfg, 0.0).loss)
        images.append(step.facts.images)
        weights.append(weights_of(state))
    return losses, images, weights


@pytest.mark.ranks
@pytest.mark.parametrize("name", any_but([], ["gemma3", "qwen2_5_vl"]))
def test_a_step_without_images_leaves_the_vision_part_as_it_is(
    name: str, whole: Whole, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """On one rank and on two, of which none runs it, and in which the next step has images."""
    model = whole(name)
    texts = [conversation(number, ["how many?", "seven"]) for number in range(2)]
    shown = [record for record in model.records("few") if "image" in record][:2]
    path = tmp_path / "texts.json"
    path.write_text(json.dumps([*texts, *(record | {"id": f"shown {n}"} for n, record in enumerate(shown))]))
    more = f"data.path={path}", "global_batch_size=2", "micro_batch_size=1", "max_steps=2", f"seed={SEED}", *CONSTANT
    wanted = trained_on_a_rank(single_world(), model.config(tmp_path / "one", *more))
    results = pools[2].run(trained_on_a_rank, model.config(tmp_path / "two", *more, "sharding=zero3"))
    for losses, images, weights in (wanted, *results):
        assert [count > 0 for count in images] == [False, True], "SEED does not begin with the texts"
        assert losses == pytest.approx(wanted[0], rel=1e-5)
        first = {name for name, own in weights[1].items() if not torch.equal(own, weights[0][name])}
        assert first and not any("vision" in name or "visual" in name for name in first)
        then = {name for name, own in weights[2].items() if not torch.equal(own, weights[1][name])}
        assert any("vision" in name or "visual" in name for name in then)


@pytest.mark.any
@pytest.mark.parametrize("name", PADDED)
def test_the_log_says_why_rows_are_padded(
    name: str, whole: Whole, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        begun(single_world(), whole(name).config(tmp_path))
    assert any("rows are padded: " in line for line in caplog.messages), caplog.messages


@pytest.mark.parametrize("name", any_but(["granite4_vision", "hunyuan_vl"], WHOLE))
def test_parameters_that_no_loss_reaches_are_frozen(name: str, whole: Whole, tmp_path: Path) -> None:
    model = whole(name)
    _, gradients = peer_gradients(model)
    own = begun(single_world(), model.config(tmp_path)).model
    trained = {named(n) for n, p in own.named_parameters() if p.requires_grad}
    assert trained == gradients.keys()


@pytest.mark.parametrize("name", any_but(["granite4_vision"], ["granite4_vision", "hunyuan_vl"]))
def test_the_export_of_a_checkpoint_has_the_parameters_that_no_loss_reaches(
    name: str, whole: Whole, tmp_path: Path
) -> None:
    model = whole(name)
    train(model.config(tmp_path / "run", *CONSTANT, "optim.lr=1e-2"))
    export(conversion(tmp_path / "run", tmp_path / "to", "dtype=fp32"))
    trained, source = (open_tensors(folder) for folder in (tmp_path / "to", model.folder))
    same = [key for key in source if torch.equal(*(own[key].rows(0, own[key].shape[0]) for own in (trained, source)))]
    state = begun(single_world(), model.config(tmp_path / "other"))
    assert len(same) == sum(not p.requires_grad for p in state.model.parameters()) > 0


def unsharded(cfg: Config) -> tuple[Any, Loader]:
    """A model on the meta device, and the data of its training."""
    cfg = settle_auto(cfg, single_world())
    model, _ = open_model(cfg, torch.device("cpu"))
    return model, open_data(cfg, single_world(), model)


def test_parameters_that_no_loss_reaches_are_found_if_only_the_language_part_trains(
    whole: Whole, tmp_path: Path
) -> None:
    cfg = whole("gemma3").config(tmp_path, "model.train=[language]")
    model, loader = unsharded(cfg)
    model.language.stranger = torch.nn.Parameter(torch.empty(3, device="meta"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    freeze_unused(model, loader, cfg.precision)
    left = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained - left == {f"{model.language_name}.stranger"}


@pytest.mark.parametrize("name", any_but(["granite4_vision"], ["granite4_vision", "gemma3"]))
def test_norms_in_another_dtype_than_a_class_takes_are_refused_before_the_first_step(
    name: str, whole: Whole, tmp_path: Path
) -> None:
    cfg = whole(name).config(tmp_path, "precision=bf16", "model.train=[language]")
    model, loader = unsharded(cfg)
    same = replace(cfg.precision, norm_dtype=cfg.precision.param_dtype)
    freeze_unused(model, loader, same)
    if name == "gemma3":
        freeze_unused(model, loader, cfg.precision)
        return
    with pytest.raises(ConfigError, match=r"set precision\.norm_dtype"):
        freeze_unused(model, loader, cfg.precision)
    assert not any(module._forward_pre_hooks for module in model.modules() if is_norm(module))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("paligemma", "numbers the tokens of a text"),
        pytest.param("got_ocr2", "cannot prepare 1 images", marks=pytest.mark.any),
    ],
)
def test_other_families_are_refused_before_the_first_step(name: str, reason: str, whole: Whole, tmp_path: Path) -> None:
    with pytest.raises(LlavaFsdpError, match=reason):
        begun(single_world(), whole(name).config(tmp_path))


def test_a_video_is_refused_by_name_where_the_processor_takes_none(whole: Whole, tmp_path: Path) -> None:
    model = whole("gemma3")
    turns = [{"from": "human", "value": "<video>\nwhat?"}, {"from": "gpt", "value": "a fox"}]
    write_json(model.images.parent / "video.json", [{"id": "v7", "video": "a.mp4", "conversations": turns}])
    with pytest.raises(DataError, match=r"(?s)media_not_read: 1 .*id v7.*whole model whose"):
        begun(single_world(), model.config(tmp_path, records="video"))
