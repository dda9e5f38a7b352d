"""What only a CUDA GPU can show of packed weights: bitsandbytes' kernels there, and that its bits are the CPU's."""

import importlib.util
from pathlib import Path

import pytest
import torch
from harness import CPU
from reference import bitsandbytes_layer
from test_quantized_base import embedded, trains_and_keeps_its_bits
from torch import nn

from llava_fsdp.config import QuantizeConfig, Quantizer
from llava_fsdp.data.toy_shapes import draw_shapes
from llava_fsdp.model.weights.quantization import QuantizedLinear, check_quantizer, dequantize

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="bitsandbytes is not installed")
KINDS = [QuantizeConfig(mode=m, double=d) for m in (Quantizer.nf4, Quantizer.fp4) for d in (True, False)]
KINDS += [QuantizeConfig(mode=Quantizer.int8)]


def packed_on(device: torch.device, linear: nn.Linear, cfg: QuantizeConfig, dtype: torch.dtype) -> QuantizedLinear:
    layer = QuantizedLinear(linear, cfg, dtype).to(device)
    layer.weight.data = layer.pack(linear.weight.detach())
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cfg", KINDS, ids=lambda c: f"{c.mode.value}-{c.double}")
def test_bits_are_bitsandbytes_own(cfg: QuantizeConfig, dtype: torch.dtype, device: torch.device) -> None:
    check_quantizer(cfg, device)
    torch.manual_seed(0)
    linear = nn.Linear(256, 192, bias=False, dtype=dtype)
    ours = packed_on(device, linear, cfg, dtype)
    theirs = bitsandbytes_layer(linear, cfg, device).train()
    assert torch.equal(
        ours.weight.flatten().view(torch.uint8), theirs.get_parameter("weight").data.flatten().view(torch.uint8)
    )
    x = torch.randn(64, 256, dtype=dtype, device=device)
    found = []
    layers: list[nn.Module] = [ours, theirs]
    for layer in layers:
        given = x.clone().requires_grad_()
        out = layer(given)
        (grad,) = torch.autograd.grad(out, given, torch.ones_like(out))
        found.append((out.detach().float(), grad.float()))
    (out, grad), (their_out, their_grad) = found
    # Linear8bitLt quantises its inputs on a GPU, and few rows of 4 bits may take a fused kernel
    bound = 0.02 if cfg.mode is Quantizer.int8 else 5e-3
    assert (out - their_out).norm() <= bound * out.norm()
    assert (grad - their_grad).norm() <= 5e-3 * grad.norm()


@pytest.mark.parametrize("cfg", KINDS, ids=lambda c: f"{c.mode.value}-{c.double}")
def test_a_cpu_unpacks_the_same_weight(cfg: QuantizeConfig, device: torch.device) -> None:
    """Weights on a border between two codes may fall to either side; there are few."""
    torch.manual_seed(0)
    linear = nn.Linear(256, 192, bias=False, dtype=torch.bfloat16)
    whole = []
    for place in (CPU, device):
        layer = packed_on(place, linear, cfg, torch.bfloat16)
        whole.append(dequantize(layer.packing, layer.weight, layer.statistics).cpu().float())
    assert (whole[0] != whole[1]).float().mean() < 0.01
    assert (whole[0] - whole[1]).norm() < 0.02 * whole[0].norm()


@pytest.mark.parametrize("mode", ["nf4", "int8"])
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_it_trains(mode: str, compiled: str, cuda: torch.device, tmp_path: Path) -> None:
    keys = [f"model.quantize.mode={mode}", f"compile={compiled}", "precision=bf16"]
    cfg = embedded(tmp_path, *keys)
    draw_shapes(cfg.data)
    trains_and_keeps_its_bits(cfg, cuda)
