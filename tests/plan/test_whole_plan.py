"""Plans of whole models of transformers against the tensors that are alive in their real passes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, make_image_processor, make_tokenizer, resolve
from small import config_of
from tiers import slow_after
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import CONFIG_MAPPING

from llava_fsdp.config import ActivationCheckpointing
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.build import build_architecture
from llava_fsdp.model.weights.init_weights import computed_buffers
from llava_fsdp.parallel.memory.activation_checkpoint import apply_activation_checkpointing
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.plan.memory.activations import blocks_to_measure
from llava_fsdp.plan.memory.blank_images import features_of
from llava_fsdp.plan.memory.meta_trace import LiveBytes, Trace
from llava_fsdp.plan.memory.micro_batches import MicroBatchSizes
from llava_fsdp.plan.planner import Choice, Planner, PlanRow
from llava_fsdp.plan.rank_counts import RankCounts
from llava_fsdp.plan.search.auto import decide
from llava_fsdp.plan.time.hardware import machine_for
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.train.setup import dry_run

CPU = torch.device("cpu")
ALL = "vision,projector,language"
CASES = [
    ("gemma3", "none", ALL, "pack=true"),
    ("qwen3_vl", "full", ALL, "pack=true"),
    ("qwen2_5_vl", "selective", ALL, "pack=true"),
    ("idefics3", "none", "language", "pack=true"),
    ("deepseek_vl", "full", "projector", "pack=true"),
    ("mistral3", "none", ALL, "pack=false"),
    ("glm4v", "full", ALL, "pack=true"),
    ("paligemma", "none", ALL, "pack=true"),
    ("granite4_vision", "none", ALL, "pack=true"),
]


def open_planner(name: str, folder: Path, depth: int, *words: str) -> Planner:
    """A planner for a family's tiny model, whose language model has `depth` blocks, on a CPU."""
    row = FAMILIES[name]
    config: Any = CONFIG_MAPPING[row.kind](**resolve(row.config, make_tokenizer(row)))
    text = config.get_text_config()
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or []))
    text.num_hidden_layers = depth
    if kinds:
        text.layer_types = [kinds[number % len(kinds)] for number in range(depth)]
    config.save_pretrained(folder)
    make_image_processor(row).save_pretrained(folder)
    own = f"model.checkpoint={folder}", f"model.language={folder}", "model=own", "stage=finetune_task"
    fixed = "precision=fp32", "data.template=auto", "compile=false", "sharding=zero3"
    return Planner(config_of([*own, *fixed, *words]), machine_for("cpu", 1))


def micro_batch_of(planner: Planner, rows: int) -> MicroBatchSizes:
    """Five images in four samples of a packed row, or in padded rows."""
    assert planner.images is not None
    tokens = 5 * planner.images.vision_work().tokens
    length = tokens + 45 if rows == 1 else tokens // 2 + 45
    return MicroBatchSizes(rows, length, samples=4, tiles=tokens, labels=30, image_tokens=tokens)


def planned_row(planner: Planner, micro: MicroBatchSizes) -> PlanRow:
    cfg = planner.cfg
    choice = Choice(cfg.sharding.strategy, cfg.activation_checkpointing, cfg.offload.mode)
    return planner.row(choice, RankCounts(1, 1, 1), [micro])


def real_model(planner: Planner) -> Architecture:
    """The planner's model with random weights, as a training on one rank has it."""
    cfg = planner.cfg
    model = build_architecture(planner.parts, cfg.model, torch.float32, planner.kernel, cfg.loss)
    apply_activation_checkpointing(model.blocks(), cfg.activation_checkpointing, CPU)
    buffers = computed_buffers(model, {})
    tied = model.is_tied
    model.to_empty(device=CPU)
    if tied:
        model.tie()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05)
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
    return model.train()


def most_alive(model: Architecture, inputs: Any) -> int:
    """The most bytes alive in a forward and backward pass, without weights and inputs."""
    known = [*model.parameters(), *model.buffers(), *(t for t in tree_leaves(inputs) if torch.is_tensor(t))]
    trace = Trace()
    with LiveBytes(trace, iter(known)):
        model(**inputs).backward()
    now = most = 0
    for event in trace.events:
        now += event.change
        most = max(most, now)
    return most


@pytest.mark.parametrize(("name", "mode", "train", "pack"), slow_after(2, CASES))
def test_the_plan_of_a_whole_model_has_the_bytes_of_its_real_passes(
    name: str, mode: str, train: str, pack: str, tmp_path: Path
) -> None:
    """With eight blocks, of which five are measured, or six if there are two kinds of them; to the last byte."""
    words = f"model.train=[{train}]", f"activation_checkpointing={mode}", pack
    planner = open_planner(name, tmp_path, 8, *words)
    micro = micro_batch_of(planner, 1 if pack == "pack=true" else 4)
    assert blocks_to_measure(planner.parts.language, 3)[0] < 8
    planned = planned_row(planner, micro).bytes
    assert planner.images is not None
    inputs = planner.images.inputs_of(micro, planner.kernel is not None)
    inputs = tree_map_only(torch.Tensor, lambda t: torch.zeros_like(t, device=CPU) if t.is_meta else t, inputs)
    real = most_alive(real_model(planner), inputs)
    assert planned["activations"] + planned["logits"] + planned["gradients"] == real > 100_000


def test_flops_of_a_vision_part_are_those_of_what_trains(tmp_path: Path) -> None:
    """Three times the forward pass if all trains, but for the gradient of pixels; once more with recomputation."""
    trained = {}
    for train in ("language", "projector,language", ALL):
        planner = open_planner("gemma3", tmp_path, 3, f"model.train=[{train}]", "pack=true")
        assert planner.images is not None
        work = planner.images.vision_work()
        assert planner.flops.vision == work.flops / work.tokens
        assert planner.recomputing_flops.vision == (work.flops + work.recomputed) / work.tokens
        trained[train] = work
    frozen, projector, whole = trained.values()
    assert frozen.flops < projector.flops < whole.flops < 3 * frozen.flops
    assert (frozen.recomputed, projector.recomputed, whole.recomputed) == (0, 0, frozen.flops)


def test_images_have_about_as_many_tokens_as_the_data(tmp_path: Path) -> None:
    planner = open_planner("qwen2_5_vl", tmp_path, 3, "model.train=[language]", "pack=true")
    assert planner.images is not None
    photo = planner.images.vision_work().tokens
    assert planner.images.images_of(0) == (0, planner.images.photo)
    for tokens in (photo, 7 * photo + photo // 2):
        count, size = planner.images.images_of(tokens)
        assert count * planner.images.vision_work(size).tokens == pytest.approx(tokens, rel=0.25)


def test_features_that_several_blocks_get_are_counted_once() -> None:
    """DeepStack: each block gets features of all tokens. They are a list with the number of the block."""
    rows = torch.zeros(5, 4)
    deep: Any = SimpleNamespace(last_hidden_state=None, deepstack_features=[(0, [rows, rows]), (2, [rows, rows])])
    assert [len(group) for group in features_of(deep)] == [2, 2]
    plain: Any = SimpleNamespace(pooler_output=(rows, rows, rows), last_hidden_state=rows)
    assert [len(group) for group in features_of(plain)] == [3]
    with pytest.raises(ModelError, match="no features"):
        features_of(SimpleNamespace())


def test_the_token_of_images_is_not_taken_for_text(tmp_path: Path) -> None:
    planner = open_planner("gemma3", tmp_path, 3, "model.train=[language]", "pack=false")
    assert planner.images is not None
    micro = micro_batch_of(planner, 4)
    inputs = planner.images.inputs_of(micro, packed=False)
    config: Any = planner.parts.class_config
    assert int((inputs["input_ids"] == config.image_token_id).sum()) == micro.image_tokens
    assert inputs["segments"] is None and inputs["input_ids"].shape == (4, micro.length)


def test_auto_values_are_chosen_for_a_whole_model(tmp_path: Path) -> None:
    words = "model.train=[language]", "pack=true", "activation_checkpointing=auto", "tokens_per_micro_batch=auto"
    planner = open_planner("gemma3", tmp_path, 3, *words, "global_batch_size=8", "data.max_length=100")
    decision = decide(planner.cfg, World(0, 2, 0, 2, CPU), planner.parts, planner.samples)
    assert "bytes" not in decision.reason and not decision.applied(planner.cfg).has_auto
    assert decision.activation_checkpointing.mode is ActivationCheckpointing.none


@pytest.mark.parametrize("name", slow_after(1, ["gemma3", "qwen3_vl"]))
def test_a_dry_run_of_a_whole_model_holds_what_is_planned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows are full of the tokens of black images that its processor prepares."""
    monkeypatch.setattr(dry_run, "return_freed_memory", lambda: None)  # it changes the whole process
    words = "model.train=[projector,language]", "pack=auto", "activation_checkpointing=auto", "dry_run=2"
    sizes = "data.max_length=100", "tokens_per_micro_batch=100", "global_batch_size=2", "format=json"
    cfg = open_planner(name, tmp_path, 3, *words, *sizes).cfg
    dry_run.dry_run(cfg)
    report = json.loads(capsys.readouterr().out)
    assert all(own["measured"] == own["planned"] > 0 for own in report["bytes"].values())
    micro = report["micro_batch"]
    each = micro["image_tokens"] // micro["pictures"]
    assert micro["positions"] == 100 and micro["pictures"] == 100 // (each + 1) > 0
