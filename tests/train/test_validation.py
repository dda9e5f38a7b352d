"""A run is measured on held-out records: by the right numbers, on any number of ranks, and trains as without it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import RankPool, single_world
from packed import write_every_kind
from reference import TOLERANCE, open_steps, run_ranks, trained_weights
from small import Configure, config_of, make_config, write_json
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from transformers import DynamicCache, LlavaConfig, LlavaForConditionalGeneration

from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import SkippedSample
from llava_fsdp.data.batching.tile_inputs import normalize
from llava_fsdp.data.text.templates import template
from llava_fsdp.data.text.tokens.constants import IGNORE, IMAGE_ID
from llava_fsdp.data.validation_prompts import ask, lay_out_prompts
from llava_fsdp.data.validation_set import held_out_sampler, spread, spread_over_sources, warn_of_trained
from llava_fsdp.model.generation import Prompt, Sampling, write_tokens
from llava_fsdp.parallel.compile import run_block
from llava_fsdp.parallel.eval_mode import evaluating
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.runtime.errors import ConfigError, DataError, Stopped
from llava_fsdp.runtime.process.watchdog import Watchdog
from llava_fsdp.train import main as train
from llava_fsdp.train.events.held_out.validation import Validation
from llava_fsdp.train.events.run_events import RunEvents
from llava_fsdp.train.state import TrainState

LEARNT = [
    "max_steps=30",
    "epochs=9",
    "optim.lr=1e-2",
    "export.enabled=true",
    "export.dtype=fp32",
    "export.verify=false",
]
MOST = 12


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def held(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of one image, of several and of none, of very different lengths."""
    return write_every_kind(dataset, tmp_path_factory.mktemp("held"))


@pytest.fixture(scope="module")
def trained(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has finished without ever being measured."""
    folder = tmp_path_factory.mktemp("trained")
    train.train(make_config(parts, dataset, folder, *LEARNT))
    return folder


def keys(held: Path, *others: str) -> list[str]:
    values = ["val.every=100", f"val.path={held / 'mixed.json'}", f"val.images={held / 'images'}", "val.answers=34"]
    return [*values, f"val.max_new_tokens={MOST}", "val.shown=99", *others]


@pytest.fixture(scope="module")
def expected(trained: Path, parts: Path, dataset: Path, held: Path) -> tuple[float, int, list[str]]:
    """Loss, label tokens and answers by transformers' model, a record at a time, without padding."""
    cfg = make_config(parts, dataset, trained, *keys(held)).held_out
    steps = open_steps(cfg)
    config = LlavaConfig.from_pretrained(trained / "export")
    model = LlavaForConditionalGeneration.from_pretrained(
        trained / "export", dtype=torch.float32, attn_implementation="eager"
    )
    table = torch.from_numpy(steps.image_reader.preprocessor.pixel_table())
    tokenizer, stop = steps.encoder.tokenizer, template("v1").stop
    ends = sorted({model.generation_config.eos_token_id, tokenizer.encode(stop)[-1].id})
    total, labels, answers = 0.0, 0, []
    for number in range(len(steps.records)):
        sample, images = steps.read_row(number)
        asked = ask(steps.records[number], steps.encoder, steps.image_reader, cfg)
        with torch.no_grad():
            logits = model(**inputs(sample.input_ids, images, table, config)).logits[0, :-1]
            total += float(functional.cross_entropy(logits, torch.from_numpy(sample.labels[1:]), reduction="sum"))
            labels += int((sample.labels[1:] != IGNORE).sum())
            shown = inputs(asked.sample.input_ids, images[: len(asked.images)], table, config)
            written = model.generate(**shown, max_new_tokens=MOST, do_sample=False, pad_token_id=0, eos_token_id=ends)
        answer = [token for token in written[0, len(asked.sample.input_ids) :].tolist() if token not in ends]
        answers.append(tokenizer.decode(answer).strip())
    return total / labels, labels, answers


def inputs(ids: np.ndarray, images: list[np.ndarray], table: torch.Tensor, config: LlavaConfig) -> dict[str, Any]:
    tokens = torch.from_numpy(ids)[None]
    found = {"input_ids": torch.where(tokens == IMAGE_ID, config.image_token_id, tokens)}
    found["attention_mask"] = torch.ones_like(tokens)
    return found | ({"pixel_values": normalize(torch.from_numpy(np.concatenate(images)), table)} if images else {})


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        pytest.param(1, [], marks=pytest.mark.slow),
        pytest.param(
            1, ["pack=false", "micro_batch_size=5", "val.batch_size=3", "data.workers=2"], marks=pytest.mark.slow
        ),
        pytest.param(1, ["offload=params", "tokens_per_micro_batch=300"], marks=pytest.mark.slow),
        (2, ["sharding=zero3", "activation_checkpointing=full", "val.batch_size=4"]),
        pytest.param(2, ["sharding=zero2", "pack=false", "activation_checkpointing=offload"], marks=pytest.mark.slow),
        pytest.param(4, ["sharding=zero1", "tokens_per_micro_batch=400"], marks=pytest.mark.slow),
        pytest.param(4, ["sharding=hybrid", "sharding.shard_size=2", "val.batch_size=20"], marks=pytest.mark.slow),
        pytest.param(2, ["sharding=zero0"], marks=pytest.mark.slow),
    ],
)
def test_numbers_are_those_of_transformers(
    size: int, overrides: list[str], expected: tuple[float, int, list[str]], trained: Path, configure: Configure,
    held: Path, pools: dict[int, RankPool], tmp_path: Path,
) -> None:  # fmt: skip
    """The run has finished: the same command with `val.every` measures it once, whatever ranks it has now."""
    folder = shutil.copytree(trained, tmp_path / "run")
    cfg = configure(*LEARNT, *keys(held), *overrides, to=folder)
    if size == 1:
        train.train(cfg)
    else:
        pools[size].run(run_ranks, cfg)
    loss, labels, answers = expected
    (row,) = rows(folder)
    assert row["step"] == 30 and row["label_tokens"] == labels and row["questions"] == len(answers) == 34
    assert row["loss"] == pytest.approx(loss, rel=TOLERANCE)
    same = {key: row[key] for key in ("loss", "label_tokens", "score", "questions")}
    assert row["sources"] == {"mixed": same}
    assert [own["answer"] for own in row["answers"]] == answers
    assert len({*answers}) > 5 and any(len(own.split()) < 9 for own in answers), "the answers prove little"
    right = [own["answer"].strip().lower() == own["references"][0].strip().lower() for own in row["answers"]]
    assert [own["score"] for own in row["answers"]] == right and row["score"] == sum(right) / 34
    assert row["metric"] == "exact" and row["seconds"] > 0
    same_text = {own["question"]: [] for own in row["answers"]}
    for own in row["answers"]:
        same_text[own["question"]].append(own["references"][0].strip().lower())
    assert row["blind_guess"] == sum(max(map(own.count, own)) for own in same_text.values()) / 34
    with_image = [own for own in row["answers"] if own["picture"]]
    assert len(with_image) > 20 and all(Path(own["picture"]).is_absolute() for own in with_image)
    assert all(Path(own["picture"]).is_file() and "<image>" not in own["question"] for own in with_image)
    train.train(configure(*LEARNT, *keys(held), to=folder)) if size == 1 else None
    assert len(rows(folder)) == 1, "a run that has been measured is measured again"


LORA = ["stage=finetune_lora", "model.lora.r=4", "model.lora.alpha=8", "model.lora.dropout=0.3"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        pytest.param(1, ["precision=bf16", "activation_checkpointing=full", *LORA], marks=pytest.mark.slow),
        pytest.param(1, ["precision=bf16_pure", "offload=params"], marks=pytest.mark.slow),
        (2, ["sharding=zero3", "activation_checkpointing=full", "model.train=[projector,language,vision]"]),
        pytest.param(2, ["sharding=zero1", "micro_batch_size=2", "precision=bf16"], marks=pytest.mark.slow),
        pytest.param(2, ["sharding=zero2", "sharding.blocks_per_unit=2", *LORA], marks=pytest.mark.slow),
    ],
)
def test_training_is_the_same_to_the_bit(
    size: int, overrides: list[str], configure: Configure, held: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    found = []
    for name, values in (("with", keys(held, "val.every=1", "val.answers=3", "val.limit=12")), ("without", [])):
        # after the stage, which is chosen anew for adapters
        cfg = configure(*overrides, "max_steps=2", *values, to=name)
        if size == 1:
            train.train(cfg)
        else:
            pools[size].run(run_ranks, cfg)
        metrics = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        found.append(([(row["loss"], row["grad_norm"]) for row in metrics], trained_weights(tmp_path / name)))
    (losses, weights), (expected_losses, expected_weights) = found
    assert [row["step"] for row in rows(tmp_path / "with")] == [1, 2]
    assert not (tmp_path / "without" / "validation.jsonl").exists()
    assert losses == expected_losses and len(losses) == 2
    assert weights.keys() == expected_weights.keys() and weights
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)


def open_state(
    world: World, cfg: Config, on_result: Callable[[dict[str, Any]], None] = lambda _: None
) -> tuple[TrainState, Validation]:
    state = train.build_state(cfg, Parallelism.of(cfg, world))
    assert state.held_out is not None
    Path(cfg.output_dir).mkdir(exist_ok=True)
    state.model.train()
    return state, Validation(state, state.held_out, cfg, Watchdog(), Pauses(on_result))


class Pauses(RunEvents):
    """Counts batches, and ends the run at one of them."""

    def __init__(self, on_result: Callable[[dict[str, Any]], None]) -> None:
        self.count = 0
        self.last = 0
        self.on_result = on_result

    def after_validation(self, row: dict[str, Any]) -> None:
        self.on_result(row)

    def on_pause(self) -> None:
        self.count += 1
        if self.count == self.last:
            raise Stopped("now")


def leave_nothing(world: World, cfg: Config) -> None:
    state, validation = open_state(world, cfg)
    units = [module for module in state.model.modules() if isinstance(module, FSDPModule)]
    assert units
    modes: list[bool] = []
    state.model.register_forward_pre_hook(
        lambda model, _: modes.append(torch.is_grad_enabled() or any(module.training for module in model.modules()))
    )
    validation.measure()
    assert len(modes) > 10 and not any(modes), "it ran as in training"
    before = torch.get_rng_state()
    validation.events.last = validation.events.count + 2  # type: ignore[attr-defined]
    with pytest.raises(Stopped):
        validation.measure()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled() and all(module.training for module in state.model.modules())
    for unit in units:
        own = unit._get_fsdp_state()
        assert not own._comm_ctx.post_forward_order
        group = own._fsdp_param_group
        assert group is None or (not group._post_forward_indices and group.is_sharded)


def state_after_an_evaluation(world: World) -> tuple[bool, bool, int, int]:
    """Whether weights are gathered during an evaluation and behind it, and how many units FSDP lists behind it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units if (group := unit._get_fsdp_state()._fsdp_param_group) is not None]
    with evaluating(model, torch.device("cpu")):
        model(torch.ones(2, 4))
        during = any(not group.is_sharded for group in groups)
    listed = len(units[0]._get_fsdp_state()._comm_ctx.post_forward_order)
    indices = sum(len(group._post_forward_indices) for group in groups)
    return during, any(not group.is_sharded for group in groups), listed, indices


@pytest.mark.ranks
def test_fsdp_frees_and_forgets_what_an_evaluation_has_gathered(pools: dict[int, RankPool]) -> None:
    """Otherwise the next backward pass would gather these weights a second time."""
    assert pools[2].run(state_after_an_evaluation) == [(True, False, 0, 0)] * 2


def test_a_model_in_the_middle_of_its_training_is_only_looked_at() -> None:
    """No gradients, no dropout, random numbers of its own; and then it trains as if nothing had been."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).train()
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    with evaluating(model, torch.device("cpu")):
        assert not any(module.training for module in model.modules())
        assert not model(torch.rand(2, 3)).requires_grad
        with pytest.raises(ZeroDivisionError), evaluating(model, torch.device("cpu")):
            raise ZeroDivisionError
    assert all(module.training for module in model.modules()) and torch.is_grad_enabled()
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.slow
@pytest.mark.ranks
def test_leaves_nothing_behind(configure: Configure, held: Path, pools: dict[int, RankPool]) -> None:
    """Where it is cut short by a stop too."""
    cfg = configure(*keys(held, "sharding=zero3", "global_batch_size=6"))
    pools[2].run(leave_nothing, cfg)


def test_results_are_passed_on_as_they_are_written(configure: Configure, held: Path, tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    cfg = configure(*keys(held, "val.answers=0", "val.limit=3"), to="run")
    _, validation = open_state(single_world(), cfg, told.append)
    validation.measure()
    assert told == rows(tmp_path / "run") and len(told) == 1


@pytest.mark.slow
def test_continued_run_does_what_is_owed_once(configure: Configure, held: Path, tmp_path: Path) -> None:
    """The run died in the validation of step 4, whose checkpoint was there, or behind it; or before step 4's was."""
    common = [
        "max_steps=5",
        "checkpoint.every=2",
        "checkpoint.keep=9",
        *keys(held, "val.every=2", "val.answers=2", "val.limit=6"),
    ]
    whole = tmp_path / "whole"
    train.train(configure(*common, to=whole))
    expected = rows(whole)
    assert [row["step"] for row in expected] == [2, 4, 5], "also after the last step"
    for at, left in ((4, [2]), (4, [2, 4]), (2, [2, 4, 5])):
        folder = tmp_path / f"{at}-{len(left)}"
        shutil.copytree(whole / "checkpoints" / f"step-{at:06d}", folder / "checkpoints" / f"step-{at:06d}")
        kept = [{**row, "seconds": -1.0} for row in expected if row["step"] in left]
        torn = [*map(json.dumps, kept), '{"step": 4, "lo']
        (folder / "validation.jsonl").write_text("\n".join(torn) + "\n")
        train.train(configure(*common, to=folder))
        got = rows(folder)
        assert [row["step"] for row in got] == [2, 4, 5]
        assert [row["seconds"] < 0 for row in got] == [step in left and step <= at for step in (2, 4, 5)]
        for own, other in zip(got, expected, strict=True):
            assert own | {"seconds": 0} == other | {"seconds": 0}


def test_every_source_has_a_loss_of_its_own(parts: Path, dataset: Path, held: Path, tmp_path: Path) -> None:
    files = [
        f"++val.sources.caps.path={dataset / 'captions.json'}",
        f"++val.sources.kinds.path={held / 'mixed.json'}",
        f"++val.sources.text.path={dataset / 'text.json'}",
    ]
    common = ["max_steps=1", "val.every=1", "val.answers=6", "val.max_new_tokens=3"]
    cfg = make_config(parts, dataset, tmp_path / "all", *common, *files, f"val.index={tmp_path / 'index'}")
    train.train(cfg)
    (row,) = rows(tmp_path / "all")
    assert list(row["sources"]) == ["caps", "kinds", "text"] and (tmp_path / "index").is_dir()
    assert row["label_tokens"] == sum(own["label_tokens"] for own in row["sources"].values())
    assert row["loss"] == pytest.approx(
        sum(own["loss"] * own["label_tokens"] for own in row["sources"].values()) / row["label_tokens"]
    )
    assert len({own["record"].partition(",")[0] for own in row["answers"]}) == 3
    assert {own["source"] for own in row["answers"]} == {"caps", "kinds", "text"}
    for name, own in row["sources"].items():
        scores = [answer["score"] for answer in row["answers"] if answer["source"] == name]
        assert own["questions"] == len(scores) > 0 and own["score"] == sum(scores) / len(scores)
    assert row["questions"] == len(row["answers"]) == 6
    assert row["score"] == sum(answer["score"] for answer in row["answers"]) / 6
    train.train(make_config(parts, dataset, tmp_path / "alone", *common, f"val.path={dataset / 'captions.json'}"))
    (alone,) = rows(tmp_path / "alone")
    assert alone["loss"] == pytest.approx(row["sources"]["caps"]["loss"], rel=TOLERANCE)


def test_order_is_spread_and_of_one_source_a_step() -> None:
    order = held_out_sampler([5, 0, 9], limit=4, samples_per_step=3)
    assert [order.samples(n) for n in range(order.per_epoch)] == [[0, 1, 2], [3], [5, 7, 9], [11]]
    assert [order.source(n) for n in range(order.per_epoch)] == [0, 0, 2, 2]
    assert spread(7, None) == spread(7, 7) == spread(7, 99) == list(range(7)) and spread(10, 3) == [0, 3, 6]
    assert spread_over_sources([4, 6], 5) == [2, 3] and spread_over_sources([9], 4) == [4]
    assert spread_over_sources([1000, 2, 0, 3], 4) == [2, 1, 0, 1], "a small source is asked, too"
    assert spread_over_sources([1000, 2, 3], 2) == [1, 1, 0] and spread_over_sources([3, 2], 0) == [0, 0]
    assert spread_over_sources([3, 2], 99) == [3, 2] and spread_over_sources([], 9) == []
    assert spread(5, 3) == [0, 1, 3] and spread(199, 100)[-1] == 197, "to the end of the file"


ANYRES = ["data.image_aspect_ratio=anyres", "model.patch_merge=spatial_unpad", "data.max_length=400"]


def test_answers_about_tiles_are_those_of_whole_passes(configure: Configure, held: Path) -> None:
    """anyres: every token is the likeliest of a pass over all before it."""
    values = keys(held, "val.answers=9", "model.train=[projector,language,vision]", *ANYRES)
    cfg = configure(*values)
    state, validation = open_state(single_world(), cfg)
    held_out, model = validation.held_out, state.model
    loader = held_out.loader
    written: dict[str, list[int]] = {}
    for asked in held_out.questions:
        row = validation.generator.read(asked)
        assert row is not None
        ids = asked.sample.input_ids
        with evaluating(model, loader.device):
            for _ in range(5):
                sample = replace(asked.sample, input_ids=ids, labels=np.full(len(ids), IGNORE))
                micro = loader.to_device(loader.steps.collate([(sample, row[1])], loader.steps.facts(0, []), 1))
                micro.label_positions = torch.tensor([len(ids) - 1])
                ids = np.append(ids, int(model(**micro.inputs, return_logits=True)[0].argmax()))
        written[asked.record] = ids[len(asked.sample.input_ids) :].tolist()
    assert len({len(asked.sample.input_ids) for asked in held_out.questions}) > 4
    prompts = lay_out_prompts(
        [row for asked in held_out.questions if (row := validation.generator.read(asked)) is not None],
        loader.steps.collate,
    )
    micro = loader.to_device(prompts.micro)
    with evaluating(model, loader.device):
        cache = DynamicCache(config=model.parts.language)
        prompt = Prompt(micro.input_ids, prompts.mask, micro.images)
        written_tokens = write_tokens(model, prompt, cache, Sampling(5))
        tokens = [chosen.tolist() for chosen in written_tokens]
    assert [list(row) for row in zip(*tokens, strict=True)] == list(written.values())
    assert len(micro.images["tiles"]) > 12


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["val.every=2"], "val.every=2 needs validation records: name a file of them, val.path=FILE, or set"),
        (["val.every=0", "val.path=x"], "val.every=0 must be at least 1"),
        (["val.answers=-1"], "val.answers=-1 must be at least 0"),
        (["val.metric=bleu"], r"val.metric=bleu must be one of \[exact, vqa\]"),
        (["val.path=x", "++val.sources.a.path=y"], "val.path=x and val.sources=.'a'. are both set"),
        (["++val.sources.a.weight=2", "++val.sources.a.path=y"], "val.sources.a.weight is not a key"),
        (["+val.ptah=2"], "val.ptah is not a key of the configuration; did you mean val.path"),
    ],
)
def test_keys_are_checked(values: list[str], message: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(*values)


@pytest.mark.slow
def test_held_out_records_are_checked_before_the_first_step(parts: Path, dataset: Path, tmp_path: Path) -> None:
    def refused(kind: type[Exception], message: str, records: list[dict[str, Any]] | None, *values: str) -> None:
        file = tmp_path / "held.json"
        if records is not None:
            write_json(file, records)
        cfg = make_config(parts, dataset, tmp_path / "run", "val.every=2", f"val.path={file}", *values)
        with pytest.raises(kind, match=message):
            train.train(cfg)
        assert not (tmp_path / "run" / "metrics.jsonl").exists()

    good = json.loads((dataset / "mixed.json").read_text())[:6]
    refused(ConfigError, r"^val.path=.*held.json is not a file", None)
    refused(ConfigError, r"^val.images=.*nowhere is not a folder", good, f"val.images={tmp_path / 'nowhere'}")
    gone = [*good, {**good[0], "id": "gone", "image": "gone.jpg"}]
    refused(DataError, r"held.json: 1 of 7 records are wrong(.|\n)*gone.jpg does not exist", gone)
    refused(DataError, r"held.json, line 1, record 6 \(id odd\)", [*good, {"id": "odd", "conversations": []}])
    long = "val.max_new_tokens=505"
    refused(ConfigError, r"val.max_new_tokens=505: the question of .*held.json, line 1, record 0", good, long)
    refused(ConfigError, r"val.sources.a.path=x is not a file", good, "val.path=null", "++val.sources.a.path=x")


def test_image_that_breaks_later(parts: Path, dataset: Path, held: Path, tmp_path: Path) -> None:
    """Its records are left out of loss and answers alike, or it ends the run, by `data.bad_records`."""
    folder = tmp_path / "held"
    shutil.copytree(dataset / "images", folder / "images")
    records = json.loads((dataset / "captions.json").read_text())
    write_json(folder / "mixed.json", records)
    skipping = ["data.bad_records=skip", "data.max_bad_records=5"]
    cfg = make_config(parts, dataset, tmp_path / "run", *keys(folder, *skipping))
    _, validation = open_state(single_world(), cfg)
    validation.measure()
    name = records[3]["image"]
    (folder / "images" / name).unlink()
    validation.measure()
    before, after = rows(tmp_path / "run")
    lost = [n for n, record in enumerate(records) if record["image"] == name]
    assert before["questions"] == 30 and after["questions"] == 30 - len(lost) and len(lost) == 3
    steps = validation.held_out.loader.steps
    assert before["label_tokens"] - after["label_tokens"] == sum(int(steps.records.labels[n]) for n in lost)
    kept = [own for own in before["answers"] if not own["picture"].endswith(name)]
    assert after["answers"] == kept
    assert isinstance(steps.read(3), SkippedSample)

    loader = validation.held_out.loader
    loader.data.bad_records = loader.steps.bad_records = type(cfg.data.bad_records).fail
    with pytest.raises(DataError, match=f"{name} does not exist"):
        validation.measure()
    loader.steps.bad_records = cfg.data.bad_records  # the loss goes without it, and the question does not
    with pytest.raises(DataError, match=f"{name} does not exist"):
        validation.generator.answers()


@pytest.mark.slow
def test_embedded_run_is_measured_on_held_out_pictures(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    values = ["data.root=" + str(tmp_path / "shapes"), "max_steps=2", "global_batch_size=4", "export.enabled=false"]
    few = ["val.every=2", "val.limit=9", "val.answers=4", "val.max_new_tokens=4", "val.metric=vqa", "val.shown=1"]
    train.train(config_of([*values, *few, f"output_dir={tmp_path / 'run'}", "model.projector=random"]))
    (row,) = rows(tmp_path / "run")
    assert list(row["sources"]) == ["heldout"] and row["questions"] == 4 and len(row["answers"]) == 1
    assert row["metric"] == "vqa" and row["loss"] is not None and 0 <= row["score"] <= 1
    assert (tmp_path / "shapes" / "heldout.json.index").is_dir()
    said = " ".join(capsys.readouterr().err.split())
    assert "validates every 2 steps; " in said and "heldout.json: 300 records; 4 questions by vqa" in said


def test_one_is_warned_of_measuring_what_is_trained_on(
    parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alias = tmp_path / "alias.json"
    alias.symlink_to(dataset / "mixed.json")
    for path, warned in ((alias, True), (dataset / "text.json", False)):
        caplog.clear()
        warn_of_trained(make_config(parts, dataset, tmp_path / "run", "val.every=1", f"val.path={path}"))
        assert [f"val reads {alias}, which is trained on" in r.getMessage() for r in caplog.records] == [True] * warned


def test_blocks_run_as_they_are_without_gradients() -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("compiled code ran")

    hidden = torch.zeros(1, 7, 4)
    with torch.no_grad():
        ran = run_block(torch.nn.Identity(), lambda x: x + 1, refuse, nullcontext(), True, hidden)
    assert torch.equal(ran, hidden + 1)
