"""Training with expert parallelism equals that of one process: several ranks share the experts of a mixture."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import CPU, RankPool, single_world
from mixtures import mixture_parts
from reference import TOLERANCE, assert_near, difference, outcome, train_on, trained
from saves import interrupted
from small import make_config
from steps import begin, run_steps
from test_adapters import EVERY_ROW, LORA
from tiers import slow_after
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModel, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from llava_fsdp.config import Config
from llava_fsdp.model.experts import check_shared_experts, find_experts
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.expert_parallel import Exchange, run_shared, share_experts
from llava_fsdp.parallel.local_shards import local, whole
from llava_fsdp.parallel.ranks.rank_layout import shape_of_experts
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import begin_micro_batch
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train import main as train
from llava_fsdp.train.setup.build_model import build_model

EXPERTS = 4
BATCH = ("global_batch_size=12", "max_steps=3", "optim.warmup_ratio=0")
HYBRID = ("hybrid", "hybrid2")
STRATEGIES = ("zero0", "zero1", "zero2", "zero3", *HYBRID)
KINDS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe")
BALANCED = "model.balance_loss=0.5"
VARIANTS = {
    "full": (BALANCED,), "lora": (*LORA, "model.lora.dropout=0.1", BALANCED), "frozen": ("model.train=[projector]",),
    "blocks": ("model.train=[language:-2]", BALANCED),
}  # fmt: skip
FIRST = ("full", "qwen3_moe", "zero3", 2, 2)
CASES = [
    FIRST,
    *(
        ("full", kind, strategy, 2, 2)
        for kind in KINDS
        for strategy in ("zero2", "zero3")
        if (kind, strategy) != FIRST[1:3]
    ),
    *((variant, "qwen3_moe", strategy, 4, 2) for strategy in STRATEGIES for variant in VARIANTS),
    *(("full", "mixtral", strategy, 4, 4) for strategy in STRATEGIES),
]
NUMBERS = ("loss", "grad_norm", "balance_loss", "expert_load_max", "experts_idle")
Mixture = Callable[..., Config]


@pytest.fixture(scope="module")
def mixture(parts: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    """Makes configurations of short trainings of a mixture of four experts."""
    folders = cache(lambda kind: mixture_parts(kind, parts, tmp_path_factory.mktemp(kind) / "parts", EXPERTS))

    def configure(kind: str, to: Path, *values: str) -> Config:
        return make_config(folders(kind), dataset, to, *BATCH, *values)

    return configure


@pytest.fixture(scope="module")
def reference(mixture: Mixture, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of one process's training of a kind of mixture, with a variant of what trains."""

    @cache
    def of(kind: str, variant: str) -> Path:
        folder = tmp_path_factory.mktemp("one")
        train.train(mixture(kind, folder, "pack=false", *VARIANTS[variant]))
        return folder

    return of


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ranks
@pytest.mark.parametrize(("variant", "kind", "strategy", "size", "expert"), slow_after(1, CASES))
def test_training_is_that_of_one_process(
    variant: str, kind: str, strategy: str, size: int, expert: int, reference: Callable[[str, str], Path],
    mixture: Mixture, tmp_path: Path, pools: dict[int, RankPool],
) -> None:  # fmt: skip
    """Losses, gradient norms, weights, and load of each expert; several micro-batches of packed rows a step, with
    recomputation where the strategy's place is odd."""
    recompute = ("none", "full")[STRATEGIES.index(strategy) % 2]
    cfg = mixture(
        kind, tmp_path, f"sharding={strategy}", f"parallel.expert={expert}", "pack=true", "tokens_per_micro_batch=256",
        f"sharding.shard_size={2 if strategy in HYBRID else 'null'}", f"activation_checkpointing={recompute}",
        *VARIANTS[variant],
    )  # fmt: skip
    assert_same(train_on(size, cfg, pools), reference(kind, variant), f"{kind} {strategy}")


def assert_same(folder: Path, one: Path, what: str) -> None:
    """Compare what a training on several ranks has written into its folder with that of one process."""
    assert_near(trained(folder), trained(one), EVERY_ROW, what)
    for ours, theirs in zip(rows_of(folder), rows_of(one), strict=True):
        assert [ours[key] for key in NUMBERS] == pytest.approx([theirs[key] for key in NUMBERS], rel=TOLERANCE)
    loads, others = (json.loads((path / "expert_load.json").read_text()) for path in (folder, one))
    assert loads == others
    tokens = rows_of(one)[-1]["tokens"]
    assert all(sum(own) == 2 * tokens for own in loads["loads"].values())


@pytest.mark.ranks
@pytest.mark.parametrize(("variant", "kind", "strategy", "more"), slow_after(0, [
    ("full", "glm4_moe", "zero1", ("pack=false", "micro_batch_size=3", "activation_checkpointing=selective")),
    ("full", "qwen2_moe", "zero3", ("pack=true", "activation_checkpointing=full", "tokens_per_micro_batch=256")),
    ("lora", "qwen3_moe", "zero2", ("pack=true", "tokens_per_micro_batch=256")),
    ("frozen", "qwen3_moe", "hybrid", ("pack=true", "tokens_per_micro_batch=256")),
]))  # fmt: skip
def test_ranks_that_compute_layers_together_share_experts(
    variant: str, kind: str, strategy: str, more: tuple[str, ...], reference: Callable[[str, str], Path],
    mixture: Mixture, tmp_path: Path, pools: dict[int, RankPool],
) -> None:  # fmt: skip
    """Each routes its own positions: of padded and of packed rows."""
    keys = "parallel.tensor=2", "parallel.expert=2", f"sharding={strategy}", *more, *VARIANTS[variant]
    folder = train_on(4, mixture(kind, tmp_path, *keys), pools)
    assert_same(folder, reference(kind, variant), " ".join((kind, *keys)))


def shapes_of_experts(world: World, cfg: Config) -> dict[str, tuple[int, ...]]:
    """The shape of this rank's part of each weight of experts of the first layer that has them."""
    state = begin(world, cfg)
    found = {n: tuple(local(p).shape) for n, p in state.model.named_parameters() if ".experts." in n}
    first = next(iter(found)).split(".experts.")[0]
    return {name.split(".experts.")[1]: shape for name, shape in found.items() if name.startswith(first)}


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "keys", "shapes"), slow_after(0, [
    ("mixtral", ("sharding=zero3",), {"gate_up_proj": (2, 64, 40), "down_proj": (2, 10, 128)}),
    ("gpt_oss", ("sharding=zero3", "parallel.expert=2"), {
        "gate_up_proj": (1, 20, 256), "gate_up_proj_bias": (1, 256), "down_proj": (1, 64, 40),
        "down_proj_bias": (1, 40),
    }),
    ("mixtral", ("sharding=zero2", "parallel.expert=2"), {"gate_up_proj": (1, 128, 40), "down_proj": (1, 20, 128)}),
    ("mixtral", ("sharding=zero1", "parallel.tensor=2", "parallel.expert=2"), {
        "gate_up_proj": (1, 128, 40), "down_proj": (1, 20, 128),
    }),
    ("mixtral", ("sharding=hybrid", "sharding.shard_size=4", "sharding.blocks_per_unit=2"), {
        "gate_up_proj": (2, 64, 40), "down_proj": (2, 10, 128),
    }),
    ("qwen3_moe", ("sharding=hybrid2", "sharding.shard_size=4", "parallel.expert=2"), {
        "gate_up_proj": (1, 128, 40), "down_proj": (1, 20, 128),
    }),
    ("qwen3_moe", ("sharding=hybrid", "sharding.shard_size=4"), {
        "gate_up_proj": (2, 64, 40), "down_proj": (2, 10, 128),
    }),
    ("qwen3_moe", ("sharding=zero3", *LORA), {"down_proj": (2, 10, 128)}),
    ("mixtral", ("sharding=zero3", "parallel.expert=2", "model.train=[projector]"), {"down_proj": (1, 20, 128)}),
    ("mixtral", ("sharding=zero3", "offload=params"), {"down_proj": (2, 10, 128)}),
    ("mixtral", ("sharding=zero2", "offload=optimizer"), {"down_proj": (2, 10, 128)}),
    ("mixtral", ("sharding=zero3", "offload=nvme"), {"down_proj": (2, 10, 128)}),
]))  # fmt: skip
def test_fewer_experts_than_ranks_are_sharded_along_dimension_1(
    kind: str, keys: tuple[str, ...], shapes: dict[str, tuple[int, ...]], parts: Path, dataset: Path, tmp_path: Path,
    pools: dict[int, RankPool],
) -> None:  # fmt: skip
    """Two experts, whose weights four ranks shard, on one or two replicas."""
    folder, common = mixture_parts(kind, parts, tmp_path / "parts", 2, 128), (*BATCH, BALANCED)
    same = [key for key in keys if key.startswith("model.")]
    one = make_config(folder, dataset, tmp_path / "one", *common, *same, "pack=false")
    packed = "pack=true", "tokens_per_micro_batch=256", "activation_checkpointing=full"
    cfg = make_config(folder, dataset, tmp_path / "several", *common, *packed, *keys)
    size = 8 if kind == "qwen3_moe" and cfg.sharding.shard_size else 4
    assert pools[size].run(shapes_of_experts, cfg)[0].items() >= shapes.items()
    assert_same(train_on(size, cfg, pools), train_on(1, one, pools), f"{kind} {keys}")


@pytest.mark.ranks
@pytest.mark.parametrize("precision", slow_after(1, ["bf16", "fp32"]))
def test_a_rank_s_part_of_an_expert_may_have_any_size(
    precision: str, parts: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """Two experts on four ranks, in parts of 20 x 40 and 10 x 40 numbers, which are no blocks of int8 moments. The four
    ranks without sharding compute the same in bf16, too."""
    folder = mixture_parts("mixtral", parts, tmp_path / "parts", 2, 40)
    common = *BATCH, BALANCED, "pack=true", "tokens_per_micro_batch=256", f"precision={precision}"
    cfgs = [make_config(folder, dataset, tmp_path / name, *common, f"sharding={name}") for name in ("zero0", "zero3")]
    shapes = pools[4].run(shapes_of_experts, cfgs[1])[0]
    assert shapes.items() >= {"gate_up_proj": (2, 20, 40), "down_proj": (2, 10, 40)}.items()
    whole, sharded = (train_on(4, cfg, pools) for cfg in cfgs)
    assert_same(sharded, whole, precision)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("more", [
    ("activation_checkpointing=selective",), ("activation_checkpointing=offload",), ("pack=false",),
    ("sharding.blocks_per_unit=2", "sharding.prefetch=2"),
    ("parallel.context=2", "parallel.context_how=gather", "tokens_per_micro_batch=150"),
])  # fmt: skip
def test_other_settings_do_not_matter(
    more: tuple[str, ...], mixture: Mixture, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    common = "sharding=zero3", "data.max_length=256"
    packed = () if "pack=false" in more else ("pack=true", "tokens_per_micro_batch=256")
    one = trained(train_on(1, mixture("mixtral", tmp_path / "one", "pack=false"), pools))
    cfg = mixture("mixtral", tmp_path / "two", *common, "parallel.expert=2", *packed, *more, "micro_batch_size=2")
    assert_near(trained(train_on(2, cfg, pools)), one, EVERY_ROW, " ".join(more))


def gradients(world: World, cfg: Config) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, ...]], list[int]]:
    """A step's gradients, whole, of all parameters that have one; the shape of this rank's part of each parameter; and
    the number of tokens that came for each expert of this rank, in all its layers and micro-batches."""
    state = begin(world, cfg)
    trains = {name: parameter.requires_grad for name, parameter in state.model.named_parameters()}
    assert {name for name, does in trains.items() if does} == set(state.masters.named)
    came = torch.zeros(0)
    count = Exchange.counts

    def counts(self: Exchange, sent: torch.Tensor) -> torch.Tensor:
        nonlocal came
        got = count(self, sent)
        came = got.sum(0) + (came if len(came) else 0)
        return got

    micros = state.loader.agree(state.loader.steps.prepare(0)).micro_batches
    Exchange.counts = counts
    try:
        for number, micro in enumerate(micros, start=1):
            begin_micro_batch(state.model, state.parallelism.plan, number == len(micros))
            micro = state.loader.to_device(micro)
            (micro.scale * state.model(**micro.inputs)).backward()
    finally:
        Exchange.counts = count
    found = {n: whole(p.grad) for n, p in state.masters.named.items() if p.grad is not None}
    return found, {n: tuple(local(p).shape) for n, p in state.model.named_parameters()}, came.tolist()


@pytest.mark.ranks
@pytest.mark.parametrize("train_", slow_after(1, ["[projector,language]", "[projector]"]))
@pytest.mark.parametrize("kind", slow_after(1, [
    "gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe", "olmoe", "glm4_moe", "ernie4_5_moe",
]))  # fmt: skip
def test_every_gradient_is_that_of_one_process(
    kind: str, train_: str, mixture: Mixture, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """And each rank holds half of the experts; no token is dropped."""
    keys = f"model.train={train_}", "sharding=zero2", "pack=true", "tokens_per_micro_batch=256"
    expected, shapes, _ = gradients(single_world(), mixture(kind, tmp_path, *keys))
    ranks = pools[2].run(gradients, mixture(kind, tmp_path, *keys, "parallel.expert=2"))
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for found, held, _ in ranks:
        assert found.keys() == expected.keys() and expected
        for name, gradient in expected.items():
            assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-6 * float(norm)), name
        for name, shape in held.items():
            if ".experts." in name:
                assert shape == (EXPERTS // 2, *shapes[name][1:]), name
    state = begin(single_world(), cfg := mixture(kind, tmp_path, *keys, "max_steps=1"))
    run_steps(state, cfg)
    assert state.expert_loads is not None
    assert [count for *_, came in ranks for count in came] == state.expert_loads.sum(0).tolist()


def experts_alone(world: World, tokens: list[int], choices: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """Run four experts that two ranks share on this rank's tokens; the result, and gradients of tokens, weights of the
    choices and this rank's experts."""
    experts, given = some_experts(tokens, choices)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "expert"))
    share_experts(SimpleNamespace(set_experts_implementation=str), [experts], mesh, shards_frozen=False)
    hidden, chosen, weights = given[world.rank]
    out = run_shared(experts, hidden, chosen, weights, exchange=Exchange(mesh.get_group("expert")))
    out.sum().backward()  # an expanded gradient, which grouped_mm does not take on a CPU
    return tuple(t.detach() for t in (out, hidden.grad, weights.grad, *(local(p.grad) for p in experts.parameters())))


def held_frozen(world: World, shards_frozen: bool) -> tuple[int, list[tuple[str, ...] | None]]:
    """How many modules of frozen experts FSDP will shard, and which dimensions of the mesh divide each weight now."""
    experts, _ = some_experts([0, 0], [[0, 1], [0, 1]])
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "expert"))
    model = SimpleNamespace(set_experts_implementation=str)
    shared = share_experts(model, [experts.requires_grad_(False)], mesh, shards_frozen)
    return len(shared.modules), [p.device_mesh.mesh_dim_names for p in experts.parameters() if isinstance(p, DTensor)]


def some_experts(tokens: list[int], choices: list[list[int]]) -> tuple[MixtralExperts, list[tuple[Any, Any, Any]]]:
    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=4, experts_implementation="eager")
    experts = MixtralExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    given = []
    for count, own in zip(tokens, choices, strict=True):
        pairs = torch.tensor([own] * count, dtype=torch.int64).view(count, 2)
        given.append((torch.randn(count, 8, requires_grad=True), pairs, torch.rand(count, 2, requires_grad=True)))
    return experts, given


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("tokens", "choices"),
    [([5, 3], [[0, 3], [1, 2]]), ([5, 3], [[0, 1], [1, 0]]), ([0, 4], [[0, 1], [3, 2]]), ([3, 2], [[2, 3], [1, 0]]),
     ([4, 0], [[1, 0], [0, 1]]), ([0, 0], [[0, 1], [0, 1]])],
)  # fmt: skip
def test_experts_of_two_ranks_are_those_of_one(
    tokens: list[int], choices: list[list[int]], pools: dict[int, RankPool]
) -> None:
    """Ranks whose experts get no token, ranks without tokens, and both."""
    experts, given = some_experts(tokens, choices)
    results = [experts(*own) for own in given]
    if any(tokens):
        sum(result.sum() for result in results if len(result)).backward()
    found = pools[2].run(experts_alone, tokens, choices)
    for rank, (out, of_hidden, of_weights, *of_experts) in enumerate(found):
        hidden, _, weights = given[rank]
        expected = results[rank], gradient_of(hidden), gradient_of(weights)
        expected += tuple(gradient_of(parameter).chunk(2)[rank] for parameter in experts.parameters())
        for ours, theirs in zip((out, of_hidden, of_weights, *of_experts), expected, strict=True):
            assert ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.ranks
def test_frozen_experts_are_sharded_where_frozen_weights_are(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(held_frozen, True) == [(1, [("expert",)] * 2)] * 2
    assert pools[2].run(held_frozen, False) == [(0, [("shard", "expert")] * 2)] * 2


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_continues_with_any_layout_of_experts(
    mixture: Mixture, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """One rank, then two that share experts, then four, then four by twos, then one; and each export is the same."""
    exported = "export.enabled=true", "export.dtype=fp32", "export.verify=true"
    more = ("pack=true", "max_steps=10", "checkpoint.every=2", "checkpoint.keep=9", *exported)
    expected = outcome(train_on(1, mixture("qwen3_moe", tmp_path / "whole", *more), pools))
    before = tmp_path / "whole"
    for step, size, expert, strategy in (
        (2, 2, 2, "zero3"),
        (4, 4, 4, "zero2"),
        (6, 4, 2, "hybrid"),
        (8, 1, 1, "zero1"),
    ):
        folder = tmp_path / f"{step}"
        interrupted(before, folder, step)
        own = f"sharding={strategy}", f"parallel.expert={expert}", "tokens_per_micro_batch=256"
        shards = ("sharding.shard_size=2",) if strategy == "hybrid" else ()
        got = outcome(train_on(size, mixture("qwen3_moe", folder, *more, *own, *shards), pools))
        assert got.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert difference(got.weights, expected.weights, EVERY_ROW) < TOLERANCE
        before = folder


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("tensor", [1, 2])
def test_validation_is_that_of_one_process(
    tensor: int, mixture: Mixture, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """Losses on held-out records, and answers, also of a rank without questions, and of one without tokens: the second
    one of a layer, whenever a token is generated."""
    keys = (
        "pack=true", f"val.path={dataset / 'captions.json'}", f"val.images={dataset / 'images'}", "val.every=2",
        "val.answers=3", "val.max_new_tokens=5", "val.shown=3", "val.batch_size=1",
    )  # fmt: skip
    found = []
    for size in (1, 2 * tensor):
        kinds = f"parallel.expert={min(size, 2)}", f"parallel.tensor={min(size, tensor)}"
        cfg = mixture("qwen3_moe", tmp_path / f"{size}", *keys, *kinds, "sharding=zero3")
        lines = (train_on(size, cfg, pools) / "validation.jsonl").read_text().splitlines()
        found.append([json.loads(line) for line in lines])
    for one, two in zip(*found, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=TOLERANCE)
        assert two["answers"] == one["answers"] and two["questions"] == 3


@pytest.mark.parametrize(
    ("shape", "size", "tensor", "found"),
    [((1, 8), 2, 1, (1, 4)), ((1, 8), 8, 1, (1, 1)), ((8, 1), 2, 1, (4, 1)), ((2, 4), 2, 1, (2, 2)),
     ((2, 4), 4, 1, (2, 1)), ((2, 4), 8, 1, (1, 1)), ((3, 4), 6, 1, None), ((2, 6), 4, 1, None),
     ((4, 2), 4, 1, (2, 1)), ((1, 6), 1, 1, (1, 6)), ((1, 4), 2, 2, (1, 4)), ((1, 1), 2, 4, (1, 2)),
     ((2, 2), 4, 2, (2, 1)), ((4, 1), 2, 2, (4, 1)), ((2, 3), 4, 3, None)],
)  # fmt: skip
def test_ranks_with_the_same_experts_replicate_and_shard_them(
    shape: tuple[int, int], size: int, tensor: int, found: tuple[int, int] | None
) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.expert.*shard_size") if found is None else nullcontext():
        assert shape_of_experts(shape, size, tensor) == found


@pytest.mark.parametrize(
    ("kind", "size", "match"),
    [("mixtral", 3, "does not divide the 4 experts"), ("llama4_text", 2, "cannot be replaced"), ("mixtral", 2, None),
     ("gpt_oss", 4, None), ("deepseek_v3", 2, None), ("qwen2_moe", 2, None), (None, 2, "has no experts")],
)  # fmt: skip
def test_models_whose_experts_cannot_be_shared_are_refused(
    kind: str | None, size: int, match: str | None, mixture: Mixture, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    keys = f"parallel.expert={size}", "pack=false"
    cfg = mixture(kind, tmp_path, *keys) if kind else make_config(parts, dataset, tmp_path, *keys)
    with pytest.raises(ConfigError, match=rf"parallel\.expert.*{match}") if match else nullcontext():
        build_model(cfg, find_parts(cfg.model), CPU)


def test_a_weight_that_experts_have_in_common_is_refused(mixture: Mixture, tmp_path: Path) -> None:
    cfg = mixture("mixtral", tmp_path)
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(cfg.model.language))
    check_shared_experts(model, 2, 1)
    next(iter(find_experts(model).values())).norm = torch.nn.LayerNorm(4)
    with pytest.raises(ConfigError, match=r"experts\.norm\.weight"):
        check_shared_experts(model, 2, 1)
