"""A loss, a projector and records that a program gives to a training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Configure
from torch import nn
from torch.nn import functional

import llava_fsdp
from llava_fsdp.config import Config, LossConfig, LossKernel
from llava_fsdp.model.llava.own_parts import OwnParts, make_projector, own_loss
from llava_fsdp.model.logit_change import LogitChange
from llava_fsdp.model.loss import Labels, LossCollector, whole_loss
from llava_fsdp.runtime.errors import CheckpointError, ConfigError, SourceError
from llava_fsdp.train.setup.own_source import with_source

SHORT = "max_steps=2", "export.enabled=false", "checkpoint.asynchronous=false", "checkpoint.every=1"


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("labels", [0, 1, 4, 9])
def test_a_loss_of_a_program_has_the_value_and_gradients_of_ours(labels: int, cap: float | None) -> None:
    """Cross entropy, a chunk of four labels at a time; also without labels, and with capped logits."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(labels, 6), torch.randn(11, 6)
    ids, change = torch.randint(11, (labels,)), LogitChange(cap=cap)
    loss = own_loss(cross_entropy, LossConfig(kernel=LossKernel.auto, chunk_tokens=4, normalize="step"))  # type: ignore[arg-type]
    found = []
    for function in (loss, whole_loss):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        collector = LossCollector()
        total = function(*inputs, Labels(ids), collector=collector, logit_change=change)
        (total * 3).backward()
        kept = torch.cat(collector.chunks) if collector.chunks else torch.zeros(0)
        found.append((total.detach(), kept, *(own.grad for own in inputs)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_loss_of_another_shape_is_refused() -> None:
    settings: Any = LossConfig(kernel=LossKernel.auto, chunk_tokens=4, normalize="step")  # type: ignore[arg-type]
    loss = own_loss(lambda logits, labels: cross_entropy(logits, labels).mean(), settings)
    with pytest.raises(ConfigError, match=r"loss <lambda> has returned \[\]; it must return a tensor \[3\]"):
        loss(
            torch.randn(3, 6), torch.randn(11, 6), Labels(torch.zeros(3, dtype=torch.int64)), logit_change=LogitChange()
        )


@pytest.mark.slow
def test_a_run_continues_with_the_loss_it_began_with(configure: Configure) -> None:
    """Twice the loss is twice the number in the metrics, and another loss is refused."""

    def double(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return 2 * cross_entropy(logits, labels)

    plain = llava_fsdp.train(configure(*SHORT, to="plain"))
    cfg = configure(*SHORT, to="run")
    result = llava_fsdp.train(cfg, loss=double)
    assert result.metrics[0]["loss"] == pytest.approx(2 * plain.metrics[0]["loss"], rel=1e-5)
    with pytest.raises(CheckpointError, match="the program's loss: double -> none"):
        llava_fsdp.train(configure("max_steps=3", *SHORT[1:], to="run"))
    assert llava_fsdp.train(configure("max_steps=3", *SHORT[1:], to="run"), loss=double).step == 3


def two_layers(features: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(features), nn.Linear(features, hidden), nn.SiLU(), nn.Linear(hidden, hidden))


def test_a_projector_of_a_program_is_trained(configure: Configure, tmp_path: Path) -> None:
    """It is in the checkpoints, and a run without it is refused."""
    cfg = configure(*SHORT, "model.projector=random", to="run")
    assert llava_fsdp.train(cfg, projector=two_layers).step == 2
    (state,) = (tmp_path / "run" / "checkpoints" / "step-000002").glob("state.json")
    names = [own for own in json.loads(state.read_text())["trainable"] if own.startswith("multi_modal_projector.")]
    layers = [f"{layer}.{kind}" for layer in (0, 1, 3) for kind in ("bias", "weight")]
    assert names == [f"multi_modal_projector.{name}" for name in layers]
    with pytest.raises(CheckpointError, match="the program's projector: two_layers -> none"):
        llava_fsdp.train(configure("max_steps=3", *SHORT[1:], "model.projector=random", to="run"))


class WithBuffer(nn.Module):
    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.register_buffer("table", torch.zeros(2))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda features, hidden: nn.Linear(features, hidden + 1), r"maps \[2, 4, 6\] to \[2, 4, 9\]; .* \[2, 4, 8\]"),
        (lambda features, hidden: 7, "no nn.Module"),
        (WithBuffer, "WithBuffer has the buffer table"),
    ],
)
def test_what_cannot_be_a_projector_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_projector(make, 6, 8, 1)
    assert make_projector(two_layers, 6, 8, 1)[1].weight.is_meta


@pytest.mark.parametrize(
    ("own", "words", "said"),
    [
        ("projector", ("export.enabled=true",), "export.enabled=true"),
        ("projector", ("model.projector=auto",), "model.projector=random"),
        ("projector", ("stage=finetune_lora",), "model.lora"),
        ("projector", ("parallel.tensor=2",), "parallel.tensor=2 divides the model, and the program's projector"),
        ("loss", ("parallel.pipeline=2",), "parallel.pipeline=2 divides the model, and the program's loss"),
        ("loss", ("loss.kernel=torch",), "loss.kernel=torch and the program's loss"),
    ],
)
def test_what_does_not_go_with_a_part_is_refused(own: str, words: tuple[str, ...], said: str) -> None:
    stage = next((word.partition("=")[2] for word in words if word.startswith("stage=")), "finetune")
    plain = ["export.enabled=false", "model.projector=random", "precision=fp32"]
    cfg = llava_fsdp.compose(stage, [*plain, *(word for word in words if not word.startswith("stage="))])
    given = OwnParts(loss=cross_entropy) if own == "loss" else OwnParts(projector=two_layers)
    with pytest.raises(ConfigError, match=said):
        given.check(cfg)


class Capitals:
    """Sixteen questions."""

    images = None

    def __init__(self, fingerprint: str = "1"):
        self.fingerprint = fingerprint
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.asked.append(number)
        talk = [{"from": "human", "value": f"What is number {number}?"}, {"from": "gpt", "value": f"It is {number}."}]
        return {"id": str(number), "conversations": talk}


def composed(folder: Path, *words: str) -> Config:
    short = "max_steps=2", "global_batch_size=4", "compile=false", "precision=fp32", "model.projector=random"
    return llava_fsdp.compose("finetune", [*short, *SHORT[1:], *words, f"output_dir={folder}"])


@pytest.mark.slow
def test_records_of_a_program_are_asked_for_once(tmp_path: Path) -> None:
    """A run that continues reads what was written; other records are refused, as those of another file are."""
    source = Capitals()
    result = llava_fsdp.train(composed(tmp_path / "run"), source=source)
    assert result.step == 2 and source.asked == list(range(16)) and result.metrics[0]["samples"] == 4
    (written,) = (tmp_path / "run" / "records").glob("*.jsonl")
    assert [json.loads(line) for line in written.read_text().splitlines()] == [Capitals()[n] for n in range(16)]
    again = Capitals()
    assert llava_fsdp.train(composed(tmp_path / "run", "max_steps=3"), source=again).step == 3 and not again.asked


def test_a_source_that_fails_is_named_with_its_record(tmp_path: Path, configure: Configure) -> None:
    class Broken(Capitals):
        def __getitem__(self, number: int) -> Any:
            return 1 / 0 if number == 2 else super().__getitem__(number)

    class Listed(Capitals):
        def __getitem__(self, number: int) -> Any:
            return [number]

    with pytest.raises(SourceError, match=r"record 2 of the program's source Broken .*ZeroDivisionError.*:\d+"):
        with_source(composed(tmp_path / "a"), Broken())
    with pytest.raises(SourceError, match=r"record 0 of the program's source Listed .*\[0\] is no dict"):
        with_source(composed(tmp_path / "b"), Listed())
    assert not list(tmp_path.rglob("*.jsonl"))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "records").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="records is a link"):
        with_source(composed(tmp_path / "d"), Capitals())
    with pytest.raises(ConfigError, match="has no fingerprint"):
        with_source(composed(tmp_path / "c"), [{}])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"data\.path=.* and the program's source are both given"):
        with_source(configure(), Capitals())
