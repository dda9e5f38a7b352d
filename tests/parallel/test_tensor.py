"""Training with tensor parallelism equals the plain loop: several ranks compute each layer together."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool, single_world
from loaders import agreed_steps
from mixtures import mixture_parts
from reference import (
    EXPORTED,
    TOLERANCE,
    ZERO_GRADIENT,
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
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

from llava_fsdp.checkpoint.reader import SavedTensor
from llava_fsdp.checkpoint.verify import newest_alone
from llava_fsdp.config import Config
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.local_shards import clean_name, local, whole
from llava_fsdp.parallel.ranks.world import World
from llava_fsdp.parallel.sharding_strategies import begin_micro_batch
from llava_fsdp.parallel.tensor.tensor_cut import Cut
from llava_fsdp.parallel.tensor.tensor_parallel import cut_model
from llava_fsdp.plan.search.auto import settle_packing
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.files.run_dir import FOLDER
from llava_fsdp.train.checkpoints.checkpoint_contents import tensors
from llava_fsdp.train.events.save_and_stop import open_saver
from llava_fsdp.train.setup.preflight import open_model

BATCH = "global_batch_size=16"
HYBRID = ("hybrid", "hybrid2")
STRATEGIES = ("zero0", "zero1", "zero2", "zero3", *HYBRID)
TOWER = "model.train=[projector,language,vision]"
VARIANTS = {"full": (), "tower": (TOWER,), "lora": (*LORA, "model.lora.dropout=0.1")}
VARIANTS |= {"blocks": ("model.train=[language:-2]",)}
CASES = [
    ("full", "zero3", 4, 2),
    *((variant, "zero2", 2, 2) for variant in VARIANTS),
    *(("full", strategy, 4, tensor) for strategy in STRATEGIES for tensor in (2, 4)),
    *(("lora", strategy, 4, 2) for strategy in STRATEGIES),
    ("tower", "hybrid", 4, 2),
    ("blocks", "zero3", 4, 2),
]


@pytest.fixture(scope="module")
def model(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with sizes that four ranks can divide, but for the vocabulary. Its padding token, whose embedding
    gets no gradient, is in the text."""
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 52}
    sizes |= {"vocab_size": 611, "pad_token_id": 2}
    return changed_parts(parts, tmp_path_factory.mktemp("even"), sizes)


@pytest.fixture(scope="module")
def reference(model: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The plain loop's outcome with a variant, of what trains; computed when it is first asked for."""
    return plain_outcomes(model, dataset, tmp_path_factory.mktemp("start"), (BATCH,), VARIANTS)


@pytest.mark.ranks
@pytest.mark.parametrize(("variant", "strategy", "size", "tensor"), slow_after(1, CASES))
def test_training_is_that_of_the_plain_loop(
    variant: str, strategy: str, size: int, tensor: int, reference: Callable[[str], Outcome], model: Path,
    dataset: Path, tmp_path: Path, pools: dict[int, RankPool],
) -> None:  # fmt: skip
    """Several rows a step on each group of ranks, with recomputation where the strategy's place is odd."""
    recompute = ("none", "full")[STRATEGIES.index(strategy) % 2]
    cfg = make_config(
        model, dataset, tmp_path, f"sharding={strategy}", BATCH, "pack=true",
        f"sharding.shard_size={1 if strategy in HYBRID else 'null'}", f"activation_checkpointing={recompute}",
        f"parallel.tensor={tensor}", "tokens_per_micro_batch=300",
        *VARIANTS[variant], *(EXPORTED if variant != "lora" else ()),
    )  # fmt: skip
    folder = train_on(size, cfg, pools)
    got = trained(folder) if variant == "lora" else outcome(folder)
    assert_near(got, reference(variant), EVERY_ROW if variant == "lora" else vocabulary(cfg), strategy)


TEXT: dict[str, Any] = {
    "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 611, "pad_token_id": 2, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LANGUAGE: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 9, "sliding_window_pattern": 2},
    "granite_swa": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "starcoder2": {"use_bias": True}, "olmo2": {}, "phi3": {}, "cohere2": {"sliding_window": 9},
    "llama": {"attention_bias": True, "mlp_bias": True}, "mistral": {"sliding_window": 9}, "qwen2": {},
    "qwen3": {"tie_word_embeddings": True}, "gemma": {}, "gemma2": {"sliding_window": 9}, "smollm3": {}, "granite": {},
    "glm4": {}, "exaone4": {}, "nemotron": {}, "gpt_neox": {},
}  # fmt: skip
"""Language models: q/k norms, tied embeddings, sinks, windows, biases, gathered outputs, packed layers, soft caps."""


def gradients(world: World, cfg: Config) -> tuple[dict[str, torch.Tensor], float] | None:
    """Every gradient of a step's first micro-batch, whole, and the loss."""
    state = begin(world, cfg)
    micro = state.loader.to_device(next(agreed_steps(state.loader)).micro_batches[0])
    begin_micro_batch(state.model, state.parallelism.plan, is_last=True)
    loss = state.model(**micro.inputs)
    loss.backward()
    missing = [name for name, weight in state.masters.named.items() if weight.grad is None]
    assert not missing, missing
    found = {name: whole(weight.grad) for name, weight in state.masters.named.items() if weight.grad is not None}
    return (found, float(loss.detach())) if world.is_first else None


@pytest.mark.ranks
@pytest.mark.parametrize("how", slow_after(1, ["full", "lora"]))
@pytest.mark.parametrize("kind", slow_after(1, ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "glm4_moe"]))
def test_every_gradient_of_mixtures(
    kind: str, how: str, parts: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """With experts that both ranks share, routers, and experts for all tokens."""
    folder = mixture_parts(kind, parts, tmp_path / "parts", 4)
    more = (*LORA, "model.lora.dropout=0") if how == "lora" else ()
    check_gradients(folder, dataset, tmp_path, pools, how, "parallel.expert=", *more)


def language_of(kind: str, parts: Path, folder: Path) -> Path:
    shutil.copytree(parts, folder)
    AutoConfig.for_model(kind, **(TEXT | LANGUAGE[kind])).save_pretrained(folder / "language")
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize("how", slow_after(1, ["full", "lora"]))
@pytest.mark.parametrize("kind", slow_after(1, LANGUAGE))
def test_every_gradient_of_every_architecture(
    kind: str, how: str, parts: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    folder = language_of(kind, parts, tmp_path / "parts")
    more = (*LORA, "model.lora.bias=lora_only", "model.lora.dropout=0.1") if how == "lora" else ()
    check_gradients(folder, dataset, tmp_path, pools, how, "parallel.tensor=", *more)


def check_gradients(
    folder: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool], how: str, key: str, *more: str
) -> None:
    """Compare every gradient of one rank with those of two that compute each layer together.

    Args:
        key: a key that also gets the number of ranks.
    """
    found = []
    for size in (1, 2):
        both = f"parallel.tensor={size}", f"{key}{size}"
        cfg = make_config(folder, dataset, tmp_path / str(size), "pack=auto", *both, *more)
        cfg, _ = settle_packing(cfg, find_parts(cfg.model))
        found.append(gradients(single_world(), cfg) if size == 1 else pools[2].run(gradients, cfg)[0])
    (wanted, loss), (got, other) = found
    assert other == pytest.approx(loss, rel=TOLERANCE)
    assert got.keys() == wanted.keys() and len(got) > 10
    for name, gradient in wanted.items():
        scale = float(gradient.abs().max())
        zero = name.endswith(ZERO_GRADIENT)
        assert scale > 0 or how == "lora", name
        assert zero or float((got[name] - gradient).abs().max()) <= 1e-4 * scale, name


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_continues_with_any_number_of_ranks_a_layer(
    model: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """One rank, then two and four that compute layers together, beside others that shard, then none, and back."""
    more = (BATCH, "pack=true", "max_steps=10", "checkpoint.every=2", "checkpoint.keep=9", *EXPORTED)
    whole = outcome(train_on(1, make_config(model, dataset, tmp_path / "whole", *more), pools))
    before = tmp_path / "whole"
    ways = {2: (2, 2, "zero3"), 4: (4, 2, "hybrid"), 6: (2, 1, "zero1"), 8: (4, 4, "zero0")}
    for step, (size, tensor, strategy) in ways.items():
        folder = tmp_path / f"{step}"
        interrupted(before, folder, step)
        own = f"sharding={strategy}", f"parallel.tensor={tensor}", "tokens_per_micro_batch=300"
        cfg = make_config(model, dataset, folder, *more, *own)
        got = outcome(train_on(size, cfg, pools, timeout=240))
        assert got.losses == pytest.approx(whole.losses, rel=TOLERANCE)
        assert difference(got.weights, whole.weights, vocabulary(cfg)) < TOLERANCE
        before = folder


@pytest.mark.ranks
def test_layers_are_divided_at_rest_and_their_columns_are_saved(
    model: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """Each of two ranks holds half of the layers, and of their moments; norms, tower and projector are whole."""
    cfg = make_config(model, dataset, tmp_path, BATCH, "parallel.tensor=2", "max_steps=1", "sharding=zero0")
    for shapes in pools[2].run(shapes_at_rest, cfg):
        name = "language_model.layers.1.self_attn"
        assert shapes[f"model.{name}.q_proj.weight"] == (24, 36)
        assert shapes[f"model.{name}.k_proj.weight"] == (8, 36)
        for key in (f"model.{name}.o_proj.weight", f"optim.{name}.o_proj.weight.exp_avg"):
            assert shapes[key] == (36, 24)
        assert shapes["model.language_model.layers.1.input_layernorm.weight"] == (36,)
        assert shapes["model.lm_head.weight"] in ((306, 36), (305, 36))
        assert shapes["model.multi_modal_projector.linear_1.weight"] == (36, 20)
    saved = newest_alone(tmp_path / FOLDER)
    assert saved is not None
    entry = saved.manifest.tensors[f"model.{name}.o_proj.weight"]
    assert [rows.columns for rows in entry.ranges] == [(0, 24), (24, 48)]
    tensor = SavedTensor(saved.folder, f"model.{name}.o_proj.weight", entry)
    assert tensor.rows(3, 9).shape == (6, 48)


def shapes_at_rest(world: World, cfg: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of what this rank holds after a step, of which a checkpoint is saved."""
    state = begin(world, cfg)
    saver = open_saver(state, cfg)
    run_steps(state, cfg)
    saver.save()
    saver.close()
    return {name: tuple(local(tensor).shape) for name, tensor in tensors(state).items()}


def dtypes_and_losses(world: World, cfg: Config) -> tuple[dict[str, torch.dtype], list[float]]:
    """Dtypes of this rank's shards of all weights, frozen ones included, after steps; and the steps' losses."""
    state = begin(world, cfg)
    losses = [result.loss for result in run_steps(state, cfg)]
    return {clean_name(name): local(weight).dtype for name, weight in state.model.named_parameters()}, losses


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("precision", "strategy", "words"),
    slow_after(1, [
        ("bf16", "zero2", ("model.train=[projector]",)), ("bf16_pure", "zero3", ()), ("bf16", "zero3", ()),
        ("bf16", "zero3", ("model.train=[projector]",)), ("bf16", "zero0", ("model.train=[projector]",)),
        ("bf16", "zero2", tuple(LORA)), ("bf16_pure", "hybrid", ()),
    ]),
)  # fmt: skip
def test_weights_of_16_bits_are_those_of_undivided_layers(
    precision: str, strategy: str, words: tuple[str, ...], model: Path, dataset: Path, tmp_path: Path,
    pools: dict[int, RankPool],
) -> None:  # fmt: skip
    """Frozen weights are stored in bf16, and trainable ones in the dtype of masters."""
    found = []
    for tensor in (2, 1):
        cfg = make_config(
            model, dataset, tmp_path / str(tensor), BATCH, f"precision={precision}", f"sharding={strategy}",
            f"sharding.shard_size={1 if strategy in HYBRID else 'null'}", f"parallel.tensor={tensor}", "max_steps=3",
            *words,
        )  # fmt: skip
        found.append(pools[2].run(dtypes_and_losses, cfg)[0])
    (dtypes, losses), (expected, wanted) = found
    assert dtypes == expected and torch.bfloat16 in dtypes.values()
    assert losses == pytest.approx(wanted, rel=5e-3)


def positions_seen(world: World, cfg: Config, counts: list[int]) -> list[dict[str, int]]:
    """The number of positions that modules of a block, and the last norm, get in a row of each number of tokens."""
    state = begin(world, cfg)
    language, found = state.model.language_model, []
    seen: dict[str, int] = {}
    for name in ("layers.1.input_layernorm", "layers.1.self_attn", "layers.1.post_attention_layernorm", "norm"):

        def note(module: Any, args: Any, kwargs: Any, name: str = name) -> None:
            seen[name] = (args[0] if args else kwargs["hidden_states"]).shape[1]

        language.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)
    none = torch.zeros(0, dtype=torch.int64)
    for count in counts:
        ids = torch.ones(1, count, dtype=torch.int64)
        with torch.no_grad():
            state.model(ids, None, {}, none, torch.tensor([count - 1]), return_logits=True)
        found.append({name.rpartition(".")[2]: count for name, count in seen.items()})
    return found


@pytest.mark.ranks
def test_positions_between_layers_are_divided(
    model: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """Also of rows that are no multiple of the ranks, and of a single token, as in generation."""
    cfg = make_config(model, dataset, tmp_path, BATCH, "parallel.tensor=2", "pack=false", "sharding=zero0")
    own = {12: (6, 6), 13: (7, 6), 1: (1, 0)}
    for rank, found in enumerate(pools[2].run(positions_seen, cfg, list(own))):
        for (count, mine), seen in zip(own.items(), found, strict=True):
            assert seen["input_layernorm"] == seen["post_attention_layernorm"] == mine[rank]
            assert seen["self_attn"] == seen["norm"] == count


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("how", ["ulysses", "gather"])
def test_ranks_that_share_rows_and_layers(
    how: str, model: Path, dataset: Path, reference: Callable[[str], Outcome], tmp_path: Path,
    pools: dict[int, RankPool],
) -> None:  # fmt: skip
    cfg = make_config(
        model, dataset, tmp_path, BATCH, "pack=true", "sharding=zero3", "parallel.tensor=2", "parallel.context=2",
        f"parallel.context_how={how}", "tokens_per_micro_batch=150", *EXPORTED,
    )  # fmt: skip
    assert_near(outcome(train_on(4, cfg, pools, timeout=240)), reference("full"), vocabulary(cfg), how)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("pack", ["true", "false"])
def test_validation_and_sources_are_those_of_one_rank(
    pack: str, model: Path, dataset: Path, tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    """Two sources, validation with answers before and after."""
    found = {}
    for size, tensor in ((1, 1), (2, 2), (4, 2)):
        cfg = make_config(
            model, dataset, tmp_path / f"{size}", BATCH, f"pack={pack}", "sharding=zero2", f"parallel.tensor={tensor}",
            "data.path=null",
            *(f"++data.sources.{name}.path={dataset / f'{name}.json'}" for name in ("mixed", "captions")),
            f"val.path={dataset / 'captions.json'}", f"val.images={dataset / 'images'}", "val.every=2",
            "val.answers=7", "val.max_new_tokens=5", "val.shown=7",
        )  # fmt: skip
        folder = train_on(size, cfg, pools)
        names = "metrics.jsonl", "validation.jsonl"
        rows = [json.loads(line) for name in names for line in (folder / name).read_text().splitlines()]
        found[size] = rows
    for rows in (found[2], found[4]):
        for row, other in zip(rows, found[1], strict=True):
            assert row["step"] == other["step"] and row["label_tokens"] == other["label_tokens"]
            assert row["loss"] == pytest.approx(other["loss"], rel=TOLERANCE)
            for name, own in row["sources"].items():
                assert own["loss"] == pytest.approx(other["sources"][name]["loss"], rel=TOLERANCE)
            assert row.get("answers") == other.get("answers")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["parallel.tensor=0"], "parallel.tensor"),
        (["compile=true"], "compile"),
        (["activation_checkpointing=budget", "compile=auto"], "activation_checkpointing"),
        (["offload=optimizer"], "offload"),
        (["precision=fp16"], "param_dtype"),
        (["precision.moment_dtype=int8"], "moment_dtype"),
        (["model.quantize.mode=nf4", *LORA], "quantize"),
        (["model.lora.use_dora=true", *LORA], "use_dora"),
        (["loss.kernel=torch"], "loss.kernel"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], key: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=key):
        configure("parallel.tensor=2", *overrides)


@pytest.mark.parametrize(
    ("kind", "more", "size", "named"),
    [
        ("stablelm", {}, 2, "base_model_tp_plan"),
        ("mixtral", {"num_local_experts": 4}, 2, r"parallel\.expert"),
        ("llama", {"num_key_value_heads": 1}, 2, "num_key_value_heads=1"),
        ("llama", {"intermediate_size": 51}, 2, "mlp.gate_proj"),
        ("cohere", {"use_qk_norm": True}, 2, "q_norm"),
        ("starcoder2", {"residual_dropout": 0.1}, 2, "residual_dropout"),
        ("mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.1}, 2, "router_jitter_noise"),
        ("llama", {"num_key_value_heads": 4, "vocab_size": 9}, 4, "vocabulary"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(
    kind: str, more: dict[str, Any], size: int, named: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    shutil.copytree(parts, tmp_path / "parts")
    AutoConfig.for_model(kind, **(TEXT | more)).save_pretrained(tmp_path / "parts" / "language")
    cfg = make_config(tmp_path / "parts", dataset, tmp_path / "run", "pack=false", f"parallel.tensor={size}")
    with pytest.raises(ConfigError, match=named):
        open_model(cfg, torch.device("cpu"))


@pytest.mark.ranks
def test_ranks_that_do_not_divide_are_refused(configure: Configure, pools: dict[int, RankPool]) -> None:
    with pytest.raises(Exception, match=r"parallel\.tensor=3 does not divide 2,"):
        train_on(2, configure("parallel.tensor=3"), pools)


def of_embedding(world: World, rows: int, padding: int, ids: list[int]) -> torch.Tensor:
    """The gradient of a divided embedding, whose parts lie on two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.ModuleDict({"tokens": embedding(rows, padding)})
    cut_model(model, {"tokens": Cut.EMBEDDING}, mesh, ())
    (model["tokens"](torch.tensor(ids)) * torch.arange(1.0, 4)).sum().backward()
    return whole(model["tokens"].weight.grad)


def embedding(rows: int, padding: int) -> torch.nn.Embedding:
    torch.manual_seed(0)
    return torch.nn.Embedding(rows, 3, padding_idx=padding)


@pytest.mark.ranks
@pytest.mark.parametrize("padding", [2, 8])
def test_the_padding_token_is_that_of_the_whole_vocabulary(padding: int, pools: dict[int, RankPool]) -> None:
    """Its embedding gets no gradient; those at the same place of another rank's part do."""
    ids = [0, 2, 8, 5, 6, 8, 2, 10]
    wanted = embedding(11, padding)
    (wanted(torch.tensor(ids)) * torch.arange(1.0, 4)).sum().backward()
    for found in pools[2].run(of_embedding, 11, padding, ids):
        assert torch.equal(found, wanted.weight.grad)
