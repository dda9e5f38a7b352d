"""Load of experts and load-balance loss, against plain loops over samples and experts."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import CPU, alone
from mixtures import MIXTURES, mixture_parts
from small import Configure, changed_parts, make_config
from tiers import slow_after
from transformers import AutoConfig, AutoModel
from transformers.utils.output_capturing import OutputRecorder

from llava_fsdp.data.batching.batch import MicroBatch, Segments
from llava_fsdp.model.experts import (
    Router,
    RouterHook,
    RouterOutput,
    RouterOutputs,
    balance_loss,
    count_choices,
    find_routers,
    samples_of_tokens,
)
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.model.packed_attention.row_mask import attention_arguments
from llava_fsdp.runtime.errors import ConfigError, ModelError
from llava_fsdp.train import main as train
from llava_fsdp.train.state import TrainState
from llava_fsdp.train.sums.expert_sums import ExpertSums, expert_load

PACKED = ("pack=true", "tokens_per_micro_batch=300")
PADDED = ("pack=false", "micro_batch_size=5")
ALONE = ("pack=false", "micro_batch_size=1")
LORA = ("model.lora.enabled=true", "model.lora.r=3", "model.lora.dropout=0", "model.train=[projector,language]")
CHOICES, COEFFICIENT = 2, 0.3


def begin(kind: str, parts: Path, dataset: Path, folder: Path, *values: str) -> TrainState:
    values = (f"model.balance_loss={COEFFICIENT}", *values)
    cfg = make_config(mixture_parts(kind, parts, folder / "parts"), dataset, folder / "run", *values)
    return train.build_state(cfg, alone(cfg))


def plain_step(model: Llava, micros: list[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Load-balance loss as a sum over tokens, loads of experts and number of tokens, of one sample after the other."""
    total, loads, tokens = torch.zeros(()), torch.zeros(0), 0
    for micro in micros:
        if micro.lengths:
            places = [(0, end - n, end) for n, end in zip(micro.lengths, micro.cu_seqlens[1:].tolist(), strict=True)]
        else:
            places = [(row, 0, n) for row, n in enumerate(micro.sample_lengths.tolist())]
        embeds = model.embedded(micro.input_ids, micro.images)
        for row, begin_, end in places:
            n = end - begin_
            edges = Segments(torch.arange(n)[None], torch.tensor([0, n], dtype=torch.int32), (n,))
            own = embeds[row : row + 1, begin_:end]
            arguments = attention_arguments(own, edges if micro.lengths else None, model.attention)
            logits = model.language_model(inputs_embeds=own, **arguments, output_router_logits=True).router_logits
            counts = torch.zeros(len(logits), logits[0].shape[1])
            for layer, of_tokens in enumerate(logits):
                probabilities = of_tokens.softmax(-1)
                for chosen in of_tokens.topk(CHOICES).indices.flatten().tolist():
                    counts[layer, chosen] += 1
                f, p = counts[layer] / (n * CHOICES), probabilities.mean(0)
                total = total + n * len(f) * sum(f[e] * p[e] for e in range(len(f)))
            loads = counts + (loads if len(loads) else 0)
            tokens += n
    return total, loads, tokens


@pytest.mark.parametrize(
    ("kind", "rows"),
    slow_after(3, [("qwen3_moe", PACKED), ("mixtral", PADDED), ("mixtral", ALONE), ("qwen3_moe", PADDED),
                   ("mixtral", PACKED), ("qwen2_moe", PACKED), ("gpt_oss", PACKED), ("qwen3_moe", (*PADDED, *LORA))]),
)  # fmt: skip
def test_loads_and_loss_equal_a_plain_loop(
    kind: str, rows: tuple[str, ...], parts: Path, dataset: Path, tmp_path: Path
) -> None:
    """The value, the gradient of every parameter, and every load; over all micro-batches of a step."""
    state = begin(kind, parts, dataset, tmp_path, *rows, "global_batch_size=7")
    step = state.loader.steps.prepare(0)
    micros = [state.loader.to_device(micro) for micro in step.micro_batches]
    model = state.model
    assert isinstance(model, Llava)
    total, loads, tokens = plain_step(model, micros)
    assert tokens == step.facts.tokens and loads.sum() == len(loads) * tokens * CHOICES
    wanted = torch.autograd.grad(total * COEFFICIENT / (len(loads) * tokens), trained(model), allow_unused=True)
    sums = ExpertSums(state.routers, step.facts, COEFFICIENT, CPU)
    for micro in micros:
        with sums.keep() as kept:
            loss = model(**micro.inputs)
        (sums.add(micro, kept, loss) - loss).backward()
    for gradient, parameter in zip(wanted, trained(model), strict=True):
        zeros = torch.zeros_like(parameter)
        torch.testing.assert_close(
            zeros if parameter.grad is None else parameter.grad, zeros if gradient is None else gradient,
            rtol=1e-4, atol=1e-7,
        )  # fmt: skip
    assert sum(gradient is not None and bool(gradient.any()) for gradient in wanted) > 10
    numbers, found = sums.summed()
    assert found is not None and torch.equal(found, loads)
    load = expert_load(numbers.tolist())
    assert load is not None and load.balance_loss == pytest.approx(total.item() / (len(loads) * tokens), rel=1e-5)
    relative = loads * loads.shape[1] / (tokens * CHOICES)
    assert load.expert_load_max == pytest.approx(float(relative.max()))
    assert load.experts_idle == pytest.approx(float((relative < 0.1).float().mean()))


def trained(model: Llava) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def test_a_micro_batch_without_samples_counts_nothing(parts: Path, dataset: Path, tmp_path: Path) -> None:
    """It has one token, so that its blocks run on every rank."""
    for name, rows in (("packed", PACKED), ("padded", PADDED)):
        state = begin("qwen3_moe", parts, dataset, tmp_path / name, *rows, "global_batch_size=3")
        step = state.loader.steps.prepare(0)
        sums = ExpertSums(state.routers, step.facts, COEFFICIENT, CPU)
        empty = state.loader.steps.collate([], step.facts, 1)
        micro = state.loader.to_device(empty)
        with sums.keep() as kept:
            loss = state.model(**micro.inputs)
        assert len(kept) == 2
        sums.add(micro, kept, loss)
        assert not sums.total and not sums.loads.any() and sums.loads.shape == (2, 5)


@pytest.mark.parametrize("kind", MIXTURES)
def test_routers_are_found(kind: str, parts: Path, tmp_path: Path) -> None:
    """In every layer that has one, with the number of choices that the model's configuration names."""
    config = AutoConfig.from_pretrained(mixture_parts(kind, parts, tmp_path / "parts") / "language")
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    routers = find_routers(model)
    layers = 2 if kind in ("qwen3_moe", "deepseek_v3", "glm4_moe", "ernie4_5_moe") else 3
    assert [len(routers), {router.choices for router in routers}] == [layers, {CHOICES}]
    assert {router.experts for router in routers} == {4 if kind == "deepseek_v3" else 5}
    assert {router.returns_choices for router in routers} == {kind != "llama4_text"}


@pytest.mark.parametrize("pack", ["true", "auto", "false"])
def test_experts_that_torch_cannot_multiply_are_refused(pack: str, parts: Path, dataset: Path, tmp_path: Path) -> None:
    """They need sizes that are multiples of 8."""
    mixture = mixture_parts("qwen3_moe", parts, tmp_path / "mixture")
    parts = changed_parts(mixture, tmp_path / "parts", {"moe_intermediate_size": 36})
    cfg = make_config(parts, dataset, tmp_path / "run", f"pack={pack}", "tokens_per_micro_batch=null")
    with pytest.raises(ModelError, match=r"\b36\b"):
        train.build_state(cfg, alone(cfg))


def test_a_model_without_routers_is_refused(configure: Configure) -> None:
    cfg = configure("model.balance_loss=0.01")
    with pytest.raises(ConfigError, match=r"model\.balance_loss=0\.01"):
        train.build_state(cfg, alone(cfg))


def test_tokens_belong_to_their_sample() -> None:
    """Of a packed row with a sample without tokens, and of padded rows, whose padding is of none."""
    lengths = torch.tensor([2, 0, 3])
    packed = samples_of_tokens(lengths, torch.Size([1, 7]), is_packed=True)
    assert packed.tolist() == [0, 0, 2, 2, 2, 3, 3]
    padded = samples_of_tokens(lengths, torch.Size([3, 3]), is_packed=False)
    assert padded.tolist() == [0, 0, 3, 3, 3, 3, 2, 2, 2]


def test_padding_counts_for_nothing() -> None:
    """Two samples of two and one token, and two of padding, with two of three experts each; even loads give n."""
    router = Router("router", torch.nn.Identity(), 0, experts=3, choices=2, returns_choices=True)
    logits = torch.tensor([[0.0, 0, 0], [1, 2, 3], [3, 0, 0], [9, 9, 9], [5, 0, 0]], requires_grad=True)
    output = RouterOutput(router, logits, torch.tensor([[0, 1], [2, 1], [0, 2], [0, 1], [1, 2]]))
    samples, lengths = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([2, 1])
    counts = count_choices(output, samples, 2)
    assert counts.tolist() == [[1, 2, 1], [1, 0, 1], [1, 2, 1]]
    loss = balance_loss(output, samples, lengths, counts)
    shares, p = torch.tensor([[1, 2, 1]]) / 4, logits.softmax(-1)
    expected = 3 * ((p[:2] * shares).sum() + (p[2] * torch.tensor([1, 0, 1]) / 2).sum())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert logits.grad is not None and not logits.grad[3:].any() and logits.grad[:3].any()
    plain = RouterOutput(Router("router", torch.nn.Identity(), 0, 3, 2, returns_choices=False), logits, logits)
    assert plain.chosen[2].tolist()[0] == 0 and plain.chosen[1].tolist() == [2, 1]


class TwoOutputs(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x.long()


@pytest.mark.parametrize(("with_gradients", "compiled"), [(True, False), (False, False), (False, True)])
def test_outputs_are_kept_from_one_pass(with_gradients: bool, compiled: bool) -> None:
    """Not those of the backward pass, in which a block runs again, unless blocks are compiled; the latest ones are
    returned."""
    module = TwoOutputs()
    hook = RouterHook(Router("router", module, 0, 2, 1, returns_choices=True), with_gradients, compiled)
    x = torch.ones(1, 2, requires_grad=True)
    module(x * 5)
    hook.open()
    assert hook.close() is None
    hook.open()
    module(x * 3)
    kept = hook.close()
    assert kept is not None and kept.logits.tolist() == [[6, 6]] and kept.chosen.tolist() == [[3, 3]]
    assert kept.logits.requires_grad is with_gradients
    module(x)
    assert (hook.outputs is None) is not compiled


class TwoRouters(torch.nn.Module):
    """A model with a router in each of its layers, which declares them as transformers' models do."""

    def __init__(self, *experts: int):
        super().__init__()
        with torch.device("meta"):
            self.layers = torch.nn.ModuleList(TopRouter(count) for count in experts)
        self._can_record_outputs = {"router_logits": OutputRecorder(TopRouter, index=0)}
        self.config = SimpleNamespace(hidden_size=6)


class TopRouter(torch.nn.Module):
    def __init__(self, experts: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(experts, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = x @ self.weight.t()
        return logits, logits.topk(2, dim=-1).indices


def test_routers_with_unlike_numbers_of_experts_are_not_watched() -> None:
    """Their loads have no common table."""
    assert [router.experts for router in find_routers(TwoRouters(5, 5))] == [5, 5]
    assert find_routers(TwoRouters(5, 4)) == [] and find_routers(TwoRouters()) == []


def test_a_stage_watches_its_own_routers_and_counts_all() -> None:
    model = TwoRouters(5, 5, 5)
    routers = find_routers(model)
    outputs = RouterOutputs(routers, False, inside=model.layers[1])
    assert (outputs.count, outputs.experts) == (3, 5)
    assert [outputs.places[router.name] for router in outputs.routers] == [1] and len(outputs.hooks) == 1
    whole = RouterOutputs(routers, False)
    assert len(whole.hooks) == 3 and list(whole.places.values()) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError), whole.keep() as kept:
        model.layers[2](torch.empty(2, 6, device="meta"))
        raise ZeroDivisionError
    assert [output.router.name for output in kept] == ["layers.2"], "also after an error"
    assert all(hook.outputs is None for hook in whole.hooks)
