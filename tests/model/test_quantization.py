"""Packed weights are bitsandbytes' own, bit for bit, and so is what is computed with them."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from reference import bitsandbytes_layer
from small import make_config
from torch import nn
from torch.nn import functional

from llava_fsdp.config import Config, Part, QuantizeConfig, Quantizer
from llava_fsdp.model.adapters.lora import linear_layers
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.load_weights import find_weights, fingerprint, load_weights, weight_digests
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.model.weights.quantization import (
    QuantizedLinear,
    check_quantizer,
    dequantize,
    quantize_layers,
    quantized_weights,
    weight_shape,
)
from llava_fsdp.parallel.local_shards import LocalShard, local_shards
from llava_fsdp.parallel.precision.precision import MasterWeights
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.train.final_export import MemoryTensor

KINDS = [QuantizeConfig(mode=m, double=d) for m in (Quantizer.nf4, Quantizer.fp4) for d in (True, False)]
KINDS += [QuantizeConfig(mode=Quantizer.int8)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FEATURES, OUTPUTS = 100, 52
"""5200 weights: the last block of 64 is short."""


def layers(cfg: QuantizeConfig, dtype: torch.dtype, bias: bool = False) -> tuple[nn.Linear, QuantizedLinear, nn.Module]:
    """A linear layer, ours of it and bitsandbytes'."""
    torch.manual_seed(0)
    linear = nn.Linear(FEATURES, OUTPUTS, bias, dtype=dtype)
    ours = QuantizedLinear(linear, cfg, dtype)
    ours.weight.data = ours.pack(linear.weight.detach())
    return linear, ours, bitsandbytes_layer(linear, cfg).train()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cfg", KINDS, ids=lambda c: f"{c.mode.value}-{c.double}")
def test_bits_outputs_and_gradients_are_those_of_bitsandbytes(cfg: QuantizeConfig, dtype: torch.dtype) -> None:
    linear, ours, theirs = layers(cfg, dtype, bias=True)
    bits = theirs.weight.data.flatten().view(torch.uint8)
    assert torch.equal(ours.weight.flatten().view(torch.uint8), bits)
    assert ours.weight.dtype is dtype and not ours.weight.requires_grad
    x = torch.randn(3, 7, FEATURES, dtype=dtype)
    found = []
    for layer in (ours, theirs):
        given = x.clone().requires_grad_()
        out = layer(given)
        out.backward(torch.cos(out.detach()))
        found.append((out.detach(), given.grad))
    for own, other in zip(*found, strict=True):
        assert torch.equal(own, other)
    error = (found[0][0] - linear(x)).norm() / linear(x).norm()
    assert 1e-3 < error < (0.02 if cfg.mode is Quantizer.int8 else 0.2)


@pytest.mark.parametrize("cfg", KINDS, ids=lambda c: f"{c.mode.value}-{c.double}")
def test_it_is_a_product_with_the_unpacked_weight(cfg: QuantizeConfig) -> None:
    """Gradients of input and bias are autograd's own of that product; nothing else waits for the backward pass."""
    linear, ours, _ = layers(cfg, torch.float32, bias=True)
    weight = dequantize(ours.packing, ours.weight, ours.statistics)
    assert tuple(weight.shape) == ours.shape == tuple(linear.weight.shape)
    x = torch.randn(3, 7, FEATURES)
    given = [x.clone().requires_grad_() for _ in range(2)]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = ours(given[0])
    assert ours.bias is not None and {t.data_ptr() for t in kept} == {
        t.data_ptr() for t in (ours.weight, *ours.statistics)
    }
    out.square().sum().backward()
    bias, ours.bias.grad = ours.bias.grad, None
    expected = functional.linear(given[1], weight, ours.bias)
    expected.square().sum().backward()
    assert torch.equal(out, expected) and torch.equal(given[0].grad, given[1].grad)
    torch.testing.assert_close(bias, ours.bias.grad)


@pytest.mark.parametrize("cfg", KINDS, ids=lambda c: f"{c.mode.value}-{c.double}")
def test_a_position_depends_on_no_other(cfg: QuantizeConfig) -> None:
    """So that a micro-batch may be cut anywhere: inputs are not quantised, by rows or by columns of large values."""
    _, ours, _ = layers(cfg, torch.float32)
    weight = dequantize(ours.packing, ours.weight, ours.statistics)
    x = torch.randn(5, FEATURES)
    x[3, 7] = 60.0  # far beyond LLM.int8()'s threshold of 6
    together = ours(x)
    for place in range(5):
        torch.testing.assert_close(together[place], functional.linear(x[place], weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_it_is_nearer_to_whole_weights_than_products_in_int8(threshold: float) -> None:
    """LLM.int8(), which also quantises inputs, without and with columns of large values in 16 bits."""
    linear, ours, theirs = layers(KINDS[4], torch.bfloat16)
    theirs.eval().state.threshold = threshold
    x = torch.randn(64, FEATURES, dtype=torch.bfloat16)
    x[:, 33] *= 20
    true = functional.linear(x.double(), linear.weight.double())
    assert (ours(x) - true).norm() < 0.9 * (theirs(x) - true).norm()


@pytest.mark.parametrize("cfg", KINDS, ids=lambda c: f"{c.mode.value}-{c.double}")
def test_statistics_are_as_large_as_is_planned(cfg: QuantizeConfig) -> None:
    with torch.device("meta"):
        shapes = QuantizedLinear(nn.Linear(FEATURES, OUTPUTS), cfg, torch.bfloat16)
    _, ours, _ = layers(cfg, torch.bfloat16)
    assert [(t.shape, t.dtype) for t in shapes.statistics] == [(t.shape, t.dtype) for t in ours.statistics]
    assert shapes.statistics_bytes == sum(t.nbytes for t in ours.statistics)
    assert shapes.weight.shape == ours.weight.shape and shapes.per_element == ours.per_element
    assert shapes.weight.numel() * shapes.per_element == FEATURES * OUTPUTS
    x = torch.randn(2, FEATURES, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out = shapes(x)
    out.sum().backward()
    assert out.shape == (2, OUTPUTS) and x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize("cfg", KINDS, ids=lambda c: f"{c.mode.value}-{c.double}")
def test_random_bits_are_values_of_the_scale(cfg: QuantizeConfig) -> None:
    """All buffers are set, and no value is larger than was asked for; the largest is not much smaller."""
    _, ours, _ = layers(cfg, torch.float32)
    for tensor in ours.statistics:
        tensor.fill_(77)
    ours.draw_scales(0.5)
    bits = torch.randint(256, (ours.weight.numel() * ours.weight.element_size(),), dtype=torch.uint8)
    values = dequantize(ours.packing, bits.view(torch.float32)[:, None], ours.statistics).abs().max()
    assert 0.4 < values <= 0.5 * 128 / 127


def test_a_weight_beyond_fp16_is_refused_in_8_bits() -> None:
    ours = QuantizedLinear(nn.Linear(4, 2, dtype=torch.float32), KINDS[4], torch.float32)
    for value in (1e5, float("inf"), float("nan")):
        with pytest.raises(ModelError, match=r"\[2, 4\] has values up to .* int8"):
            ours.pack(torch.tensor([[1.0, 2, 3, value]] * 2))


def model_config(parts: Path, dataset: Path, tmp_path: Path, *overrides: str, stage: str = "finetune_qlora") -> Config:
    rank = ["model.lora.r=2"] if "lora" in stage else []
    return make_config(parts, dataset, tmp_path, *rank, *overrides, stage=stage)


@pytest.mark.parametrize("stage", ["finetune_qlora", "pretrain"])
def test_linear_layers_of_the_language_models_blocks_alone(
    stage: str, parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """With adapters and without; names of parameters, shapes of weights and what trains stay what they are."""
    cfg = model_config(parts, dataset, tmp_path, "model.quantize.mode=nf4", stage=stage)
    plain = model_config(parts, dataset, tmp_path, "model.quantize.mode=none", stage=stage)
    model, other = (build_llava(find_parts(c.model), c.model, torch.bfloat16) for c in (cfg, plain))
    packed = quantized_weights(model)
    adapted = ".base_layer" if stage == "finetune_qlora" else ""
    linears = [n for n, m in other.language_model.named_modules() if isinstance(m, nn.Linear) and "lora" not in n]
    assert set(packed) == {f"language_model.{n}.weight" for n in linears} and len(packed) == 3 * 7
    assert all(f"{adapted}.weight" in name for name in packed)
    names = [n for n, _ in other.named_parameters()]
    assert [n for n, _ in model.named_parameters()] == names
    assert all(weight_shape(model, n) == tuple(other.get_parameter(n).shape) for n in names)
    assert all(model.get_parameter(n).requires_grad == other.get_parameter(n).requires_grad for n in names)
    assert not any(isinstance(m, QuantizedLinear) for m in model.vision_tower.modules())
    assert isinstance(model.lm_head, nn.Linear)


def test_values_and_fingerprint(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """Weights and their fingerprint are those of the model without packing, which is what an export is of."""
    prints, sources = {}, {}
    for keys in (["mode=none"], ["mode=nf4"], ["mode=nf4", "double=false"], ["mode=int8"]):
        cfg = model_config(parts, dataset, tmp_path, *[f"model.quantize.{key}" for key in keys])
        found = find_parts(cfg.model)
        model = build_llava(found, cfg.model, torch.float32)
        sources[str(keys)] = find_weights(model, found, cfg.model, seed=cfg.seed)
        prints[str(keys)] = fingerprint(model, weight_digests(model, sources[str(keys)]))
        other = weight_digests(model, find_weights(model, found, cfg.model, seed=cfg.seed + 1))
        assert fingerprint(model, other) != prints[str(keys)]
    assert len(set(prints.values())) == 1
    first, *others = sources.values()
    for name, source in first.items():
        for other in others:
            assert torch.equal(other[name].rows(0, other[name].shape[0]), source.rows(0, source.shape[0])), name


def test_each_shard_is_rows_of_the_packed_whole(parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = model_config(parts, dataset, tmp_path)
    found = find_parts(cfg.model)
    model = build_llava(found, cfg.model, torch.float32)
    sources = find_weights(model, found, cfg.model, seed=cfg.seed)
    packed = quantized_weights(model)
    model.to_empty(device="cpu")
    shards = local_shards(model, MasterWeights({}))
    load_weights(sources, shards, packed=packed)
    for name, layer in packed.items():
        weight = sources[name].rows(0, layer.out_features)
        theirs = bitsandbytes_layer(linear_of(weight), cfg.model.quantize)
        assert torch.equal(layer.weight.flatten().view(torch.uint8), theirs.weight.data.flatten())
        mine = layer.statistics
        assert torch.equal(mine[0], theirs.weight.quant_state.absmax)
        assert torch.equal(mine[3], theirs.weight.quant_state.offset)


def linear_of(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    return linear


@pytest.mark.parametrize(
    ("cfg", "sizes", "dtype"),
    [(KINDS[0], (12, 5), torch.bfloat16), (KINDS[0], (6, 3), torch.float32), (KINDS[4], (6, 3), torch.float32)],
)
def test_sizes_that_leave_bits_over_are_refused(
    cfg: QuantizeConfig, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"odd": nn.Linear(sizes[1], sizes[0])})
    expected = rf"quantize\.mode={cfg.mode.value}: odd cannot be packed: {sizes[0]} x {sizes[1]}.*set model.quantize"
    with pytest.raises(ConfigError, match=expected):
        quantize_layers(model, ["odd"], cfg, dtype)


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantize\.mode=nf4: the language model has no linear layers"):
        quantize_layers(nn.ModuleDict(), [], KINDS[0], torch.bfloat16)


def test_missing_bitsandbytes_is_said_with_its_cure(
    parts: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = model_config(parts, dataset, tmp_path)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for door in (
        lambda: check_quantizer(cfg.model.quantize, torch.device("cpu")),
        lambda: build_llava(find_parts(cfg.model), cfg.model, torch.float32),
    ):
        with pytest.raises(ConfigError, match=r"mode=nf4 needs bitsandbytes.*pip install 'llava-fsdp\[qlora\]'"):
            door()
    check_quantizer(QuantizeConfig(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("capability", "message"),
    [((5, 2), r"compute capability 6\.0, and Some GPU has 5\.2"), ((9, 0), r"has no kernels for Some GPU with CUDA")],
)
def test_a_gpu_without_kernels_is_refused(
    capability: tuple[int, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bitsandbytes

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(bitsandbytes.cextension.lib, "compiled_with_cuda", False)
    with pytest.raises(ConfigError, match=rf"quantize\.mode=int8.*{message}.*set model\.quantize\.mode=none"):
        check_quantizer(KINDS[4], torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("capability", "hip", "refused"),
    [((6, 0), None, False), ((9, 0), None, False), ((5, 9), None, True), ((5, 9), "6.2", False)],
)
def test_a_gpu_with_kernels_is_taken(
    capability: tuple[int, int], hip: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of AMD's GPUs mean something else."""
    import bitsandbytes

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(bitsandbytes.cextension.lib, "compiled_with_cuda", True)
    with pytest.raises(ConfigError) if refused else contextlib.nullcontext():
        check_quantizer(KINDS[0], torch.device("cuda", 0))


def test_every_tensor_of_a_shard_gets_its_rows_and_columns() -> None:
    """A master weight beside the model's own, in another dtype; a packed weight is read whole."""
    weight = torch.arange(20.0).view(4, 5)
    source = MemoryTensor(weight)
    for columns, expected in ((None, weight[1:3]), ((2, 4), weight[1:3, 2:4])):
        held = [torch.zeros_like(expected), torch.zeros_like(expected, dtype=torch.bfloat16)]
        load_weights({"a": source}, {"a": LocalShard(1, 3, held, columns)})
        assert torch.equal(held[0], expected) and torch.equal(held[1], expected.bfloat16())
    _, packed, _ = layers(KINDS[0], torch.float32)
    whole = torch.randn(OUTPUTS, FEATURES)
    bits = packed.pack(whole)
    part = torch.zeros(5, 1)
    sources = {"a": source, "b": MemoryTensor(whole)}
    plain = torch.zeros(4, 5)
    shards = {"a": LocalShard(0, 4, [plain]), "b": LocalShard(2, 7, [part])}
    load_weights(sources, shards, packed={"b": packed})
    assert torch.equal(part.view(torch.uint8), bits[2:7].view(torch.uint8)) and torch.equal(plain, weight)


def test_targets_are_the_adapters_own(parts: Path, dataset: Path, tmp_path: Path) -> None:
    cfg = model_config(parts, dataset, tmp_path, "model.quantize.mode=none")
    model = build_llava(find_parts(cfg.model), cfg.model, torch.float32)
    plain = model_config(parts, dataset, tmp_path, stage="finetune")
    assert linear_layers(build_llava(find_parts(plain.model), plain.model, torch.float32), Part.language) == (
        model.adapted
    )
