"""Linear layers that multiply in int8: which they are, what they compute, and that they train."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch
from harness import RankPool, single_world
from small import Configure, make_config, write_wide_parts
from test_presets import Trace, steps
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.autograd.graph import saved_tensors_hooks

from llava_fsdp.checkpoint.reader import saved_weights
from llava_fsdp.checkpoint.verify import verify
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.precision import int8_mixed
from llava_fsdp.parallel.precision.int8_mixed import PADDED_TO, Int8Linear, check_int8_mixed, multiply_in_int8
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train import main as train

INT8 = ["precision=int8_mixed", "global_batch_size=4", "micro_batch_size=1", "max_steps=5", "optim.schedule=constant"]

pytest.importorskip("torchao", reason="torchao is not installed")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide_parts(tmp_path_factory.mktemp("wide"))


def test_refused_without_torchao_before_anything_is_read(
    wide: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find_spec(name))
    cfg = make_config(wide, dataset, tmp_path / "run", *INT8, "data.path=nowhere.json")
    with pytest.raises(ConfigError, match=r"linear=int8_mixed needs torchao.*choose precision=bf16"):
        train.train(cfg)


def test_refused_without_the_prototype_and_on_old_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "llava_fsdp.parallel.precision.int8_mixed.has_triton"
    monkeypatch.setattr(where, lambda: False)
    check_int8_mixed(torch.device("cpu"))
    with pytest.raises(ConfigError, match="needs Triton"):
        check_int8_mixed(torch.device("cuda"))
    monkeypatch.setattr(where, lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    with pytest.raises(ConfigError, match="T4 is older"):
        check_int8_mixed(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_int8_mixed(torch.device("cuda"))
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        check_int8_mixed(torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "torchao.prototype.quantized_training", None)
    with pytest.raises(ConfigError, match="prototype of torchao"):
        check_int8_mixed(torch.device("cpu"))


def test_refused_where_no_layer_fits(configure: Configure) -> None:
    with pytest.raises(ConfigError, match="no linear layer of the language model has sizes"):
        steps(single_world(), configure(*INT8))


def test_what_multiplies_in_int8(wide: Path, dataset: Path, tmp_path: Path) -> None:
    """The linear layers of the language model's blocks that train and fit; parameters keep names and classes."""
    cfg = make_config(wide, dataset, tmp_path, *INT8, "model.train=[projector,language,vision]")
    model = build_llava(find_parts(cfg.model), cfg.model, torch.bfloat16)
    before = {name: type(p) for name, p in model.named_parameters()}
    model.language_model.layers[0].mlp.up_proj.requires_grad_(False)
    expected = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n}
    expected = {n for n in expected if n.startswith("language_model.")} - {"language_model.layers.0.mlp.up_proj"}
    expected -= {n for n in expected if n.endswith(("k_proj", "v_proj"))}  # three heads of 8 are no multiple of 16
    multiply_in_int8(model.blocks()[0], 1)
    assert {n for n, m in model.named_modules() if isinstance(m, Int8Linear)} == expected
    assert {name: type(p) for name, p in model.named_parameters()} == before


def rounded(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows are rounded to 255 equal steps, in float64."""
    scale = matrix.float().abs().amax(1, keepdim=True) / 127
    return (matrix.float() / scale).round().double() * scale.double()


def test_a_single_token_is_multiplied_in_bf16() -> None:
    """A generated token comes alone, and torchao's kernel for GPUs refuses it."""
    layer = nn.Linear(48, 32, dtype=torch.bfloat16)
    x = torch.randn(1, 1, 48, dtype=torch.bfloat16)
    wanted = layer(x)
    multiply_in_int8(nn.ModuleList([layer]), 1)
    assert torch.equal(layer(x), wanted)
    assert not torch.equal(layer(x.expand(1, 2, 48))[:, :1], wanted)


def assert_products_are_of_rounded_rows(tokens: int, biased: bool, device: torch.device) -> None:
    """Both factors of a product are rounded along the dimension that is summed. Scales are bf16, so that an element
    may be rounded to the next of 127 steps."""
    torch.manual_seed(0)
    layer = nn.Linear(48, 32, bias=biased, dtype=torch.bfloat16, device=device)
    multiply_in_int8(nn.ModuleList([layer]), PADDED_TO[device.type])
    x = torch.randn(tokens, 48, dtype=torch.bfloat16, device=device, requires_grad=True)
    grad = torch.randn(tokens, 32, dtype=torch.bfloat16, device=device)
    out = layer(x)
    out.backward(grad)
    weight, bias = layer.weight.detach(), layer.bias.detach().double() if biased else 0.0
    wanted = {
        "output": (out, rounded(x.detach()) @ rounded(weight).T + bias),
        "gradient of the input": (x.grad, rounded(grad) @ rounded(weight.T).T),
        "gradient of the weight": (layer.weight.grad, rounded(grad.T) @ rounded(x.detach().T).T),
    }
    if biased:
        wanted["gradient of the bias"] = (layer.bias.grad, grad.double().sum(0))
    for name, (found, reference) in wanted.items():
        assert found is not None and found.dtype == torch.bfloat16
        difference = (found.double() - reference).abs().max() / reference.abs().max()
        assert difference < 0.02, f"{name}: {difference}"


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [2, 7, 33])
def test_the_three_products_are_of_rounded_rows(tokens: int, biased: bool) -> None:
    assert_products_are_of_rounded_rows(tokens, biased, torch.device("cpu"))


@pytest.mark.parametrize("tokens", [2, 7, 16, 33])
def test_padding_to_a_multiple_changes_no_bit(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it change the shape of a batch of rows. Every product has a multiple of tokens."""
    found = []
    products: list[tuple[int, ...]] = []
    own = int8_mixed.int8_product

    def noted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        products.append((*left.shape, right.shape[1]))
        return own(left, right)

    monkeypatch.setattr(int8_mixed, "int8_product", noted)
    for padded_to in (1, 16):
        torch.manual_seed(0)
        layer = nn.Linear(48, 32, dtype=torch.bfloat16)
        multiply_in_int8(nn.ModuleList([layer]), padded_to)
        x = torch.randn(3, tokens, 48, dtype=torch.bfloat16, requires_grad=True)
        out = layer(x)
        out.backward(torch.randn(3, tokens, 32, dtype=torch.bfloat16))
        found.append([out, x.grad, layer.weight.grad, layer.bias.grad])
    assert found[0][0].shape == (3, tokens, 32)
    multiples = 3 * tokens, -(-3 * tokens // 16) * 16
    assert products == [shape for n in multiples for shape in ((n, 48, 32), (n, 32, 48), (32, n, 48))]
    for plain, padded in zip(*found, strict=True):
        assert plain is not None and padded is not None and torch.equal(plain, padded)


def test_layers_with_one_input_keep_it_once() -> None:
    """For their backward passes, although each pads it."""
    layers = nn.ModuleList(nn.Linear(48, 32, bias=False, dtype=torch.bfloat16) for _ in range(3))
    multiply_in_int8(layers, 16)
    x = torch.randn(5, 48, dtype=torch.bfloat16, requires_grad=True)
    weights = {layer.weight.untyped_storage().data_ptr() for layer in layers}
    kept: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = [layer(x) for layer in layers]
    assert kept - weights == {x.untyped_storage().data_ptr()}
    sum(outputs).sum().backward()


def test_a_compiled_layer_is_one_graph_for_all_numbers_of_tokens() -> None:
    layer = nn.Linear(48, 32, dtype=torch.bfloat16)
    multiply_in_int8(nn.ModuleList([layer]), 16)
    counter = CompileCounter()
    compiled = torch.compile(layer, dynamic=True, backend=counter)
    for tokens in (45, 77, 32, 133):
        compiled(torch.randn(1, tokens, 48, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert counter.frame_count == 1


@pytest.mark.slow
def test_losses_are_near_those_of_bf16(wide: Path, dataset: Path, tmp_path: Path) -> None:
    found = [
        steps(single_world(), make_config(wide, dataset, tmp_path / name, *INT8, f"precision={name}", "max_steps=3"))
        for name in ("int8_mixed", "bf16")
    ]
    assert found[0].losses == pytest.approx(found[1].losses, rel=0.02) and found[0] != found[1]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_trains_repeats_and_continues(
    sharding: str, wide: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """The same with and without activation checkpointing, and in a run that is continued, also in bf16."""
    values = [*INT8, f"sharding={sharding}"]
    runs: dict[str, list[Trace]] = {}
    for name, precision, activation_checkpointing in (
        ("none", "int8_mixed", "none"),
        ("full", "int8_mixed", "full"),
        ("selective", "int8_mixed", "selective"),
        ("continued", "int8_mixed", "none"),
        ("continued in bf16", "bf16", "none"),
    ):
        if name.startswith("continued"):
            shutil.copytree(tmp_path / "none" / "checkpoints", tmp_path / name / "checkpoints")
        more = [f"activation_checkpointing={activation_checkpointing}", f"precision={precision}"]
        runs[name] = pools[2].run(steps, make_config(wide, dataset, tmp_path / name, *values, *more))
    first = runs["none"]
    assert len(first[0].losses) == 5 and first[0].losses[-1] < first[0].losses[0]
    assert runs["full"] == runs["selective"] == first
    for rank, trace in enumerate(runs["continued"]):
        assert trace == Trace(first[rank].losses[3:], first[rank].digest)
    assert runs["continued in bf16"][0].losses == pytest.approx(first[0].losses[3:], rel=0.02)
    saved = saved_weights(verify(tmp_path / "none" / "checkpoints" / "step-000003"))
    weight = saved["language_model.layers.0.mlp.up_proj.weight"]
    assert type(weight.rows(0, 3)) is torch.Tensor and weight.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["zero0", "zero1", "zero2", "zero3"])
def test_two_ranks_train_as_one(
    sharding: str, wide: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Each micro-batch is one sample, so that both have the same: losses differ by the order of sums in bf16 alone."""
    cfgs = [make_config(wide, dataset, tmp_path / f"{n}", *INT8, f"sharding={sharding}") for n in (1, 2)]
    two = pools[2].run(steps, cfgs[1])[0]
    assert two.losses == pytest.approx(steps(single_world(), cfgs[0]).losses, rel=2e-3)


@pytest.mark.slow
def test_compiled_blocks_multiply_in_int8(wide: Path, dataset: Path, tmp_path: Path) -> None:
    found = [
        steps(single_world(), make_config(wide, dataset, tmp_path / name, *INT8, f"compile={name}", "max_steps=2"))
        for name in ("true", "false")
    ]
    assert found[0].losses == pytest.approx(found[1].losses, rel=5e-3)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["optimizer", "params", "nvme"])
def test_moving_weights_to_the_host_changes_no_bit(
    mode: str, wide: Path, dataset: Path, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    more = [f"offload={mode}"] + ([f"offload.folder={tmp_path}/disk"] if mode == "nvme" else [])
    found = [
        pools[2].run(steps, make_config(wide, dataset, tmp_path / name, *INT8, "sharding=zero3", "max_steps=3", *own))
        for name, own in (("device", []), ("host", more))
    ]
    assert found[0] == found[1]
