"""Linear layers that add the gradient of their weight within a product: sums, graphs, trainings, memory, refusals."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import single_world
from loaders import agreed_steps
from small import Configure
from steps import begin
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from llava_fsdp.parallel.local_shards import clean_name
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.parallel.precision.summed_linear import SummedLinear, add_in_products
from llava_fsdp.plan.python_entry import plan
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train import main as train
from llava_fsdp.train.loop import train_step, update_or_skip

SUMS = [
    "precision=bf16",
    "precision.linear=fp32_sums",
    "global_batch_size=6",
    "micro_batch_size=2",
    "pack=false",
    "max_steps=3",
]


class Block(nn.Module):
    """Two linear layers of odd sizes, the first with a bias, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(23, 37, dtype=torch.bfloat16)
        self.down = nn.Linear(37, 23, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


def summed_blocks(count: int) -> tuple[nn.ModuleList, MasterWeights]:
    torch.manual_seed(3)
    blocks = nn.ModuleList(Block() for _ in range(count))
    add_in_products(blocks, sharded=False)
    masters = MasterWeights(dict(blocks.named_parameters()), blocks=blocks)
    with torch.no_grad():
        for name, parameter in blocks.named_parameters():
            masters.named[name].copy_(parameter)
    return blocks, masters


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def micro_batches() -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(1, tokens, 23).bfloat16().requires_grad_() for tokens in (41, 1, 7)]


def test_a_layer_computes_as_before_and_adds_unrounded_products() -> None:
    torch.manual_seed(0)
    layer, plain = Block().up, Block().up
    plain.load_state_dict(layer.state_dict())
    add_in_products(nn.ModuleList([layer]), sharded=False)
    assert isinstance(layer, SummedLinear)
    layer.gradient_sum = torch.zeros(37, 23)
    wanted = torch.zeros(37, 23)
    for x in micro_batches():
        other = x.detach().clone().requires_grad_()
        output, expected = layer(x), plain(other)
        grad = torch.randn_like(output)
        output.backward(grad)
        expected.backward(grad)
        assert torch.equal(output, expected) and torch.equal(gradient(x), gradient(other))
        wanted.addmm_(grad[0].T.float(), x.detach()[0].float())
        assert torch.equal(layer.gradient_sum, wanted)
    assert torch.equal(gradient(layer.bias), gradient(plain.bias)) and layer.weight.grad is None
    rounded = gradient(plain.weight).float()
    assert not torch.equal(wanted, rounded) and (wanted - rounded).norm() < 4e-3 * wanted.norm()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_for_all_blocks_sizes_and_updates(backend: str) -> None:
    """Compiled in one piece and once, with the same bits, and sums that no kernel copies."""
    sums = []
    for compiles in (False, True):
        blocks, masters = summed_blocks(3)
        counter = CompileCounterWithBackend(backend)
        forward: Any = Block.forward
        if compiles:
            torch._dynamo.reset()
            forward = torch.compile(forward, backend=counter, fullgraph=True, dynamic=True)
        kept = [parameter.grad for parameter in masters.named.values() if parameter.grad is not None]
        for _ in range(2):
            for x in (micro_batches()[0], micro_batches()[2]):
                hidden = x
                for block in blocks:
                    hidden = forward(block, hidden)
                hidden.float().square().sum().backward()
            sums += [gradient(parameter).clone() for parameter in masters.named.values()]
            with torch.no_grad():
                for parameter in masters.named.values():
                    parameter -= 1e-3 * gradient(parameter)
            masters.refresh()
            masters.free_gradients()
        assert all(
            a is b for a, b in zip(kept, (p.grad for p in masters.named.values() if p.grad is not None), strict=True)
        )
        assert all(not total.count_nonzero() for total in kept) and len(kept) == 6
        assert not compiles or counter.frame_count == 1
    half = len(sums) // 2
    assert all(torch.equal(a, b) for a, b in zip(sums[:half], sums[half:], strict=True))


@pytest.mark.parametrize("mode", ["none", "full", "selective", "dynamic"])
def test_gradients_of_a_step_are_sums_of_unrounded_products(mode: str, configure: Configure) -> None:
    """Beside the same model with plain layers, whose factors of each product hooks keep."""
    wanted: dict[str, torch.Tensor] = {}
    losses, found = [], {}
    for linear in ("same", "fp32_sums"):
        cfg = configure(*SUMS, "optim.clip=null", f"precision.linear={linear}", f"activation_checkpointing={mode}")
        state = begin(single_world(), cfg)
        layers = {clean_name(f"{name}.weight"): module for name, module in state.model.named_modules()
                  if isinstance(module, nn.Linear) and ".layers." in name and name.startswith("language")}  # fmt: skip
        if linear == "same":
            for name, layer in layers.items():
                keep_products(layer, wanted.setdefault(name, torch.zeros(layer.weight.shape)))
        state.masters.free_gradients = lambda: None  # type: ignore[method-assign]
        step = next(iter(agreed_steps(state.loader)))
        assert len(step.micro_batches) == 3
        losses.append(train_step(state, step, cfg, 0.0).loss)
        found[linear] = {name: state.masters.named[name].grad for name in layers}
    assert losses[0] == losses[1] and len(wanted) == 21
    assert all(torch.equal(found["fp32_sums"][name], total) for name, total in wanted.items())
    assert not all(torch.equal(found["same"][name], total) for name, total in wanted.items())


def keep_products(layer: nn.Module, total: torch.Tensor) -> None:
    """Make a linear layer add to `total` the product that is the gradient of its weight, in fp32."""

    def add(grad: torch.Tensor, x: torch.Tensor) -> None:
        total.addmm_(grad.flatten(0, -2).T.float(), x.float())

    def keep(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        x = inputs[0].detach().flatten(0, -2)
        if output.requires_grad:
            output.register_hook(lambda grad: add(grad, x))

    layer.register_forward_hook(keep)


def test_a_skipped_step_leaves_no_gradient(configure: Configure) -> None:
    cfg = configure(*SUMS)
    state = begin(single_world(), cfg)
    total = state.masters.named["language_model.layers.0.mlp.up_proj.weight"].grad
    assert total is not None
    total.fill_(3.0)
    update_or_skip(state, is_finite=False)
    assert state.skipped == 1 and not total.count_nonzero()
    assert state.masters.named["language_model.layers.0.mlp.up_proj.weight"].grad is total


def test_trains_and_continues_to_the_bit(configure: Configure, tmp_path: Path) -> None:
    """From a checkpoint, with the checkpoint of the run that was not interrupted, file by file."""
    values = [*SUMS, "max_steps=4", "checkpoint.every=2"]
    train.train(configure(*values, to="whole"))
    shutil.copytree(
        tmp_path / "whole" / "checkpoints" / "step-000002", tmp_path / "again" / "checkpoints" / "step-000002"
    )
    train.train(configure(*values, to="again"))
    folders = [tmp_path / name / "checkpoints" / "step-000004" for name in ("whole", "again")]
    tensors = [{file.name: file.read_bytes() for file in folder.rglob("*.safetensors")} for folder in folders]
    assert tensors[0] == tensors[1] and tensors[0]


def test_refused(configure: Configure) -> None:
    for values, key in (
        (["precision=fp32", "precision.linear=fp32_sums"], "param_dtype"),
        (["precision=bf16_pure", "precision.linear=fp32_sums"], "master_dtype"),
        ([*SUMS, "precision.reduce_dtype=bf16"], "reduce_dtype"),
        ([*SUMS, "offload=optimizer"], "offload"),
        ([*SUMS, "model.train=[projector]"], "model.train"),
        ([*SUMS, "stage=finetune_lora"], "lora"),
    ):
        with pytest.raises(ConfigError, match=key):
            configure(*values)
    with pytest.raises(ConfigError, match="one rank"):
        add_in_products(nn.ModuleList([Block()]), sharded=True)
    with pytest.raises(ConfigError, match="one rank"):
        plan(configure(*SUMS), gpus=2)


def test_sums_are_no_activations(configure: Configure) -> None:
    """`activation_checkpointing=dynamic` measures what each block keeps, which is the same with plain layers."""
    kept = []
    for linear in ("same", "fp32_sums"):
        cfg = configure(*SUMS, f"precision.linear={linear}", "activation_checkpointing=dynamic", to=linear)
        state = begin(single_world(), cfg)
        assert state.dynamic is not None
        for step in [*agreed_steps(state.loader)][:2]:  # they measure in the second
            state.dynamic.after_step(train_step(state, step, cfg, 0.0).skipped)
        kept.append([run.nbytes for block in state.dynamic.blocks for run in block.runs])
    assert kept[0] == kept[1] and all(kept[0])
