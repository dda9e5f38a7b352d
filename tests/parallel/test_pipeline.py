"""Training with pipeline parallelism equals the plain loop: groups of ranks have different stages of the model."""

import itertools
import json
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import CPU, RankPool
from mixtures import mixture_parts
from reference import (
    EXPORTED,
    TOLERANCE,
    Outcome,
    assert_near,
    difference,
    outcome,
    plain_outcomes,
    train_on,
    trained,
    vocabulary,
)
from saves import interrupted
from small import Configure, changed_parts, make_config
from steps import begin, run_steps
from test_adapters import EVERY_ROW, LORA
from tiers import slow_after

from llava_fsdp.config import Config, ParallelConfig, PipelineSchedule
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.local_shards import local
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.pipeline.pipeline import PackedStage
from llava_fsdp.parallel.pipeline.stages import check_can_be_divided, divide
from llava_fsdp.parallel.ranks.rank_layout import RankLayout
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train import main as train
from llava_fsdp.train import pipeline_step
from llava_fsdp.train.setup.build_state import build_state
from llava_fsdp.train.setup.preflight import preflight

BATCH = "global_batch_size=16"
HYBRID = ("hybrid", "hybrid2")
STRATEGIES = ("zero0", "zero1", "zero2", "zero3", *HYBRID)
TOWER = "model.train=[projector,language,vision]"
VARIANTS = {
    "full": (), "tower": (TOWER,), "lora": (*LORA, "model.lora.dropout=0.1"), "projector": ("model.train=[projector]",),
    "blocks": ("model.train=[projector,language:-2]",),
}  # fmt: skip
CASES = [
    ("full", "zero3", 2, "1f1b"),
    ("projector", "zero2", 2, "1f1b"),  # the last stage trains nothing
    ("lora", "zero2", 2, "1f1b"),
    ("blocks", "zero2", 2, "1f1b"),
    ("blocks", "zero3", 4, "interleaved"),
    *(("projector", strategy, 4, schedule) for strategy, schedule in (("zero2", "interleaved"), ("hybrid", "1f1b"))),
    *(("full", strategy, 4, schedule) for strategy in STRATEGIES for schedule in ("1f1b", "interleaved")),
    *((variant, strategy, 4, "1f1b") for variant in ("lora", "tower") for strategy in ("zero0", "zero3", "hybrid")),
]


@pytest.fixture(scope="module")
def model(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with enough blocks for four stages."""
    return changed_parts(parts, tmp_path_factory.mktemp("deep"), {"num_hidden_layers": 5})


@pytest.fixture(scope="module")
def reference(model: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The plain loop's outcome with a variant, of what trains; computed when it is first asked for."""
    return plain_outcomes(model, dataset, tmp_path_factory.mktemp("start"), (BATCH,), VARIANTS)


@pytest.mark.ranks
@pytest.mark.parametrize(("variant", "strategy", "size", "schedule"), slow_after(1, CASES))
def test_training_is_that_of_the_plain_loop(
    variant: str, strategy: str, size: int, schedule: str, reference: Callable[[str], Outcome], model: Path,
    dataset: Path, tmp_path: Path, pools: dict[int, RankPool],
) -> None:  # fmt: skip
    """Several rows a step, with recomputation where the strategy's place is odd."""
    recompute = ("none", "full")[STRATEGIES.index(strategy) % 2]
    cfg = make_config(
        model, dataset, tmp_path, f"sharding={strategy}", BATCH, "pack=true",
        f"sharding.shard_size={size // 2 if strategy in HYBRID else 'null'}", f"activation_checkpointing={recompute}",
        "parallel.pipeline=2", f"parallel.schedule={schedule}", "tokens_per_micro_batch=256",
        *VARIANTS[variant], *(EXPORTED if variant != "lora" else ()),
    )  # fmt: skip
    folder = train_on(size, cfg, pools)
    got = trained(folder) if variant == "lora" else outcome(folder)
    assert_near(got, reference(variant), EVERY_ROW if variant == "lora" else vocabulary(cfg), f"{strategy} {schedule}")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_continues_with_any_number_of_stages(
    model: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """One stage, then two, then four on two ranks, then four, then one: losses and weights are those of one run."""
    more = (BATCH, "pack=true", "max_steps=10", "checkpoint.every=2", "checkpoint.keep=9", *EXPORTED)
    whole = outcome(train_on(1, make_config(model, dataset, tmp_path / "whole", *more), pools))
    before = tmp_path / "whole"
    ways = {
        2: (4, 2, "1f1b", "zero3"),
        4: (2, 2, "interleaved", "zero2"),
        6: (4, 4, "1f1b", "zero0"),
        8: (2, 1, "1f1b", "zero1"),
    }
    for step, (size, pipeline, schedule, strategy) in ways.items():
        folder = tmp_path / f"{size}-{pipeline}"
        interrupted(before, folder, step)
        own = f"sharding={strategy}", f"parallel.pipeline={pipeline}", f"parallel.schedule={schedule}"
        cfg = make_config(model, dataset, folder, *more, *own)
        got = outcome(train_on(size, cfg, pools))
        assert got.losses == pytest.approx(whole.losses, rel=TOLERANCE)
        assert difference(got.weights, whole.weights, vocabulary(cfg)) < TOLERANCE
        before = folder


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_validation_sources_and_broken_images_are_those_of_the_whole_model(
    schedule: str, model: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """Two sources, validation with answers before and after, and an image whose pixels turn out to be broken."""
    shutil.copytree(dataset / "images", tmp_path / "images")
    broken = tmp_path / "images" / "1.png"
    content = broken.read_bytes()
    broken.write_bytes(content[:60] + bytes(len(content) - 60))  # its header is whole
    found = {}
    for pipeline in (1, 2):
        cfg = make_config(
            model, dataset, tmp_path / f"{pipeline}", BATCH, "pack=true", "sharding=zero2",
            f"parallel.pipeline={pipeline}", f"parallel.schedule={schedule if pipeline > 1 else '1f1b'}",
            "data.path=null",
            *(f"++data.sources.{name}.path={dataset / f'{name}.json'}" for name in ("mixed", "captions")),
            f"data.images={tmp_path / 'images'}", "data.examine=head", "data.bad_records=skip",
            "data.max_bad_records=20", f"val.path={dataset / 'captions.json'}", f"val.images={dataset / 'images'}",
            "val.every=2", "val.answers=7", "val.max_new_tokens=5", "val.shown=7",
        )  # fmt: skip
        folder = train_on(2 * pipeline, cfg, pools)
        names = "metrics.jsonl", "validation.jsonl", "skipped_records.jsonl"
        found[pipeline] = [[json.loads(line) for line in (folder / name).read_text().splitlines()] for name in names]
    (steps, validations, skipped), (expected, wanted, left_out) = found[2], found[1]
    assert sorted({row["record"] for row in skipped}) == sorted({row["record"] for row in left_out}) and left_out
    assert len(steps) == len(expected) > 2 and len(validations) == len(wanted) > 1
    for row, other in zip([*steps, *validations], [*expected, *wanted], strict=True):
        assert row["step"] == other["step"] and row["label_tokens"] == other["label_tokens"]
        assert row["loss"] == pytest.approx(other["loss"], rel=TOLERANCE)
        assert row["sources"].keys() == other["sources"].keys()
        for name, own in row["sources"].items():
            assert own["label_tokens"] == other["sources"][name]["label_tokens"]
            assert own["loss"] == pytest.approx(other["sources"][name]["loss"], rel=TOLERANCE)
    for row, other in zip(validations, wanted, strict=True):
        assert row["questions"] == 7 and row["answers"] == other["answers"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_experts_of_all_stages_are_balanced(
    schedule: str, parts: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """The load-balance loss is trained in each stage; its value and the loads are those of the whole model."""
    mixture = mixture_parts("qwen3_moe", parts, tmp_path / "parts")
    deep = changed_parts(mixture, tmp_path / "deep", {"num_hidden_layers": 4})
    found = {}
    for pipeline in (1, 2):
        cfg = make_config(
            deep, dataset, tmp_path / f"{pipeline}", BATCH, "pack=true", "sharding=zero3", "model.balance_loss=0.3",
            f"parallel.pipeline={pipeline}", f"parallel.schedule={schedule if pipeline > 1 else '1f1b'}",
            "activation_checkpointing=full", *EXPORTED,
        )  # fmt: skip
        folder = train_on(pipeline, cfg, pools)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found[pipeline] = rows, outcome(folder)
    for row, other in zip(found[2][0], found[1][0], strict=True):
        for name in ("loss", "grad_norm", "balance_loss", "expert_load_max", "experts_idle"):
            assert row[name] == pytest.approx(other[name], rel=1e-4), name
    assert difference(found[2][1].weights, found[1][1].weights, 10**6) < 1e-4


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "hybrid"])
def test_norms_in_fp32_stay_gathered(
    strategy: str, model: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """In bf16 all trained norms are one unit, which nothing in the graph of a micro-batch under way gathers again."""
    found = []
    for pipeline in (1, 2):
        cfg = make_config(
            model, dataset, tmp_path / f"{pipeline}", BATCH, "precision=bf16", f"sharding={strategy}",
            f"sharding.shard_size={2 if strategy == 'hybrid' else 'null'}", f"parallel.pipeline={pipeline}", *EXPORTED,
        )  # fmt: skip
        found.append(outcome(train_on(4, cfg, pools)))
    assert found[1].losses == pytest.approx(found[0].losses, rel=5e-3)


def bytes_of_states(world: World, cfg: Config) -> tuple[list[str], int, int]:
    """Names of a rank's parameters, and bytes of its trained ones and of the whole stage."""
    state = build_state(cfg, Parallelism.of(cfg, world))
    own = [p for p in state.model.parameters() if p.requires_grad]
    return (
        [name for name, _ in state.model.named_parameters()],
        sum(local(p).nbytes for p in own),
        sum(p.numel() * 4 for p in own),
    )


@pytest.mark.ranks
def test_each_rank_has_a_part_of_its_stage(
    model: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    cfg = make_config(model, dataset, tmp_path, BATCH, "sharding=zero3", "parallel.pipeline=2")
    first, same, last, other = pools[4].run(bytes_of_states, cfg)
    whole = build_llava(find_parts(cfg.model), cfg.model, torch.float32)
    names = [name for name, _ in whole.named_parameters()]
    assert sorted([*first[0], *last[0]]) == sorted(names) and first[0] == same[0] and last[0] == other[0]
    assert "language_model.embed_tokens.weight" in first[0] and "lm_head.weight" in last[0]
    trained = sum(4 * p.numel() for p in whole.parameters() if p.requires_grad)
    assert first[2] + last[2] == trained
    for pair in ((first, same), (last, other)):
        assert sum(held for _, held, _ in pair) == pair[0][2] and all(held < 0.6 * pair[0][2] for _, held, _ in pair)


def buffers_left(world: World, cfg: Config) -> list[bool]:
    """For each message that this rank receives in a step: whether its buffer is still kept after the last pass."""
    state = begin(world, cfg)
    assert state.pipeline is not None
    (stage,) = state.pipeline.stages
    left: list[bool] = []

    def end() -> None:
        infos = [info for own in (stage.args_recv_info, stage.grad_recv_info) for part in own.values() for info in part]
        left.extend(info.buffer is not None for info in infos)
        PackedStage.end_step(stage)

    stage.end_step = end
    run_steps(state, cfg)
    return left


@pytest.mark.ranks
def test_a_message_s_memory_is_freed_with_its_micro_batch(
    model: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """The last rank receives hidden states, the first one their gradients."""
    cfg = make_config(model, dataset, tmp_path, BATCH, "sharding=zero3", "parallel.pipeline=2", "max_steps=1")
    for left in pools[2].run(buffers_left, cfg):
        assert len(left) > 1 and not any(left)


@pytest.mark.parametrize(("size", "pipeline", "context"), [(6, 2, 1), (6, 3, 2), (8, 2, 2), (4, 4, 1)])
def test_ranks_with_other_stages_process_the_same_rows(size: int, pipeline: int, context: int) -> None:
    parallel = ParallelConfig(pipeline=pipeline, context=context)
    groups = [RankLayout(parallel, size).row_group(rank) for rank in range(size)]
    rows = size // pipeline // context
    assert groups == [(group, rows) for group in range(rows) for _ in range(context)] * pipeline


class FirstStage(torch.nn.Module):
    """The first stage of two; it returns the hidden states that it is given."""

    is_first, is_last = True, False
    token_keys = SimpleNamespace(language=None, vision=None)

    def forward(self, hidden: torch.Tensor, collector: None) -> torch.Tensor:
        return hidden


def test_the_balance_loss_of_every_stage_has_the_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in of `ExpertSums` multiplies the hidden states by the scale that it is given."""
    monkeypatch.setattr(pipeline_step, "Architecture", FirstStage)
    state: Any = SimpleNamespace(loader=SimpleNamespace(device=CPU, to_device=lambda micro: micro))
    micro: Any = SimpleNamespace(inputs={})
    experts: Any = SimpleNamespace(
        keep=lambda: nullcontext([]), add_to_hidden=lambda micro, kept, output, scale: output * scale
    )
    sources: Any = None
    work = pipeline_step.TrainingWork(state, [micro], 512.0, sources, experts)
    assert work.forward(FirstStage(), 0, torch.ones(2)).tolist() == [512, 512]


def test_a_backward_pass_has_the_dropout_of_its_own_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_step, "Architecture", FirstStage)
    state: Any = SimpleNamespace(loader=SimpleNamespace(device=CPU))
    nothing: Any = None
    work = pipeline_step.TrainingWork(state, [], 1.0, nothing, nothing)
    stage = FirstStage()
    work.keys = {(stage, number): (torch.tensor(number), None) for number in range(3)}
    for number in (1, 0, 2):
        work.before_backward(stage, number)
        assert stage.token_keys.language == number
    assert not work.keys


@pytest.mark.parametrize("last", [False, True])
def test_a_backward_pass_has_the_settings_of_the_sharding_strategy(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told whether it is the last one, after which `zero1` reduces gradients."""
    heard: list[Any] = []
    monkeypatch.setattr("llava_fsdp.parallel.pipeline.pipeline.begin_micro_batch", lambda *given: heard.append(given))
    monkeypatch.setattr("llava_fsdp.parallel.pipeline.pipeline.stage_backward", lambda *_: (None,))
    stage: Any = SimpleNamespace(root=torch.nn.Module(), plan=object())
    inputs = dict.fromkeys(("stage_output", "output_grads", "input_values"))
    assert PackedStage.backward_maybe_with_nosync(stage, "full", inputs, last) == ((None,), None)
    assert heard == [(stage.root, stage.plan, last)]


def test_blocks_are_divided_by_cost() -> None:
    assert divide([1.0] * 6, 0, 0, 3) == [range(2), range(2, 4), range(4, 6)]
    assert divide([1.0] * 7, 2.5, 1.0, 2) == [range(3), range(3, 7)]
    assert divide([1.0] * 4, 100, 100, 3) == [range(1), range(1, 3), range(3, 4)]
    dice = random.Random(0)
    for _ in range(50):
        costs = [dice.randrange(1, 9) for _ in range(dice.randrange(1, 7))]
        parts, first, last = dice.randint(1, len(costs)), dice.randrange(9), dice.randrange(9)

        def largest(borders: tuple[int, ...], costs: list[int] = costs, first: int = first, last: int = last) -> int:
            sums = [sum(costs[begin:end]) for begin, end in itertools.pairwise((0, *borders, len(costs)))]
            sums[0] += first
            sums[-1] += last
            return max(sums)

        wanted = min(map(largest, itertools.combinations(range(1, len(costs)), parts - 1)))
        found = divide(costs, first, last, parts)
        assert [found[0].start, found[-1].stop] == [0, len(costs)] and all(found)
        assert largest(tuple(part.start for part in found[1:])) == wanted


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "phi3", "gemma2", "granite"])
def test_models_that_do_more_than_run_their_blocks_are_refused(
    kind: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Granite multiplies its input, which each stage would do again."""
    changed = changed_parts(
        parts,
        tmp_path / "parts",
        {"model_type": kind, "architectures": None, "head_dim": 6, "embedding_multiplier": 2.0},
    )
    cfg = make_config(changed, dataset, tmp_path / "out")
    model = build_llava(find_parts(cfg.model), cfg.model, torch.float32)
    if kind == "granite":
        with pytest.raises(ConfigError, match=kind):
            check_can_be_divided(model, 3)
    else:
        check_can_be_divided(model, 3)


@pytest.mark.parametrize(
    ("values", "stages", "word"),
    [
        ({"tie_word_embeddings": True}, ["parallel.pipeline=2"], "tie_word_embeddings"),
        ({}, ["parallel.pipeline=4"], "3 blocks"),
        ({}, ["parallel.pipeline=2", "parallel.schedule=interleaved"], "3 blocks"),
    ],
)
def test_models_that_cannot_be_divided_are_refused_before_records_are_read(
    values: dict, stages: list[str], word: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """Although the planner chooses values from the records. The commands that start no training say so, too."""
    changed = changed_parts(parts, tmp_path / "parts", values)
    index = tmp_path / "index"
    more = (*stages, "pack=true", "tokens_per_micro_batch=auto", f"data.index={index}")
    cfg = make_config(changed, dataset, tmp_path / "out", *more)
    for command in (partial(preflight, cfg, CPU), partial(train.train, cfg)):
        with pytest.raises(ConfigError, match=word):
            command()
    assert not index.exists()


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["offload=optimizer"], "offload"),
        (["activation_checkpointing=offload"], "activation_checkpointing"),
        (["compile=true"], "compile"),
        (["model.quantize.mode=nf4", "model.lora.enabled=true"], "model.quantize"),
        (["model.train=[language:-2]"], "model.train"),
        (["parallel.pipeline=0"], "parallel.pipeline"),
        (["parallel.pipeline=1", "parallel.schedule=interleaved"], "parallel.schedule"),
        (["parallel.schedule=zero_bubble"], "parallel.schedule"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], key: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=key):
        configure("parallel.pipeline=2", *overrides)


def test_the_cure_names_every_kind_that_refuses_a_setting(configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"offload=none, or parallel.expert=1 and parallel.pipeline=1$"):
        configure("parallel.pipeline=2", "parallel.expert=2", "offload=optimizer")
    with pytest.raises(ConfigError, match=r"full, or parallel.pipeline=1$"):
        configure("parallel.pipeline=2", "parallel.expert=2", "activation_checkpointing=offload")


@pytest.mark.parametrize(("schedule", "needed", "used"), [("1f1b", 2, 4), ("1f1b", 5, 5), ("interleaved", 5, 8)])
def test_there_are_enough_micro_batches_for_the_schedule(schedule: str, needed: int, used: int) -> None:
    parallel = ParallelConfig(pipeline=4, schedule=PipelineSchedule[schedule])
    assert parallel.num_micro_batches(needed) == used


@pytest.mark.ranks
def test_ranks_that_do_not_divide_are_refused(configure: Configure, pools: dict[int, RankPool]) -> None:
    with pytest.raises(Exception, match="3 does not divide 2,"):
        train_on(2, configure("parallel.pipeline=3"), pools)
