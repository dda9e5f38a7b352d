"""Settings of a training on pairs of answers: which are accepted, and which contradict it."""

import pytest
from small import config_of

from llava_fsdp.config import Config, PairReference
from llava_fsdp.runtime.errors import ConfigError

DATA = "data=llava_json", "data.path=pairs.json", "model=llava_v1_5_7b"
LORA, WHOLE = "stage=prefer_lora", "stage=prefer"


def made(*overrides: str) -> Config:
    return config_of([*DATA, *overrides])


@pytest.mark.parametrize(
    ("overrides", "reference"),
    [
        ([LORA], PairReference.adapters),
        ([LORA, "model.lora.dropout=0.05"], PairReference.adapters),
        ([LORA, "model.train=[language,vision]"], PairReference.adapters),
        ([LORA, "model.train=[projector,language]"], PairReference.stored),
        ([LORA, "model.lora.bias=all"], PairReference.stored),
        ([LORA, "model.lora.checkpoint=run"], PairReference.stored),
        ([WHOLE], PairReference.stored),
        ([WHOLE, "pref.reference=none"], PairReference.none),
    ],
)
def test_the_reference_is_what_training_begins_with(overrides: list[str], reference: PairReference) -> None:
    assert made(*overrides).pair_reference is reference


@pytest.mark.parametrize(
    "override",
    [
        "labels=llava_v1_5", "sampler=llava_v1_5", "loss.normalize=micro_batch", "loss.kernel=torch",
        "data.too_long=truncate", "parallel=auto", "parallel.context=2", "parallel.context=auto", "parallel.tensor=2",
        "parallel.pipeline=2", "activation_checkpointing=dynamic", "data.weights=ignore", "pref.beta=0",
        "pref.gamma=-1", "pref.label_smoothing=0.5", "pref.label_smoothing=-0.1", "pref.weight=-1",
        "pref.sft_weight=-1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", [LORA, WHOLE])
def test_what_does_not_go_together_is_refused(stage: str, override: str) -> None:
    with pytest.raises(ConfigError):
        made(stage, override)


@pytest.mark.parametrize(
    "overrides",
    [
        [WHOLE, "pref.reference=adapters"],
        [LORA, "data.question=q", "data.answer=a"],
        [LORA, "pref.form=hinge", "pref.label_smoothing=0.1"],
        [LORA, "pref.weight=0"],
        ["stage=finetune", "pref.beta=0.2"],
        ["stage=finetune", "data.prompt_once=true"],
        [LORA, "data.prompt_once=true", "pack=false"],
        [LORA, "data.prompt_once=true", "model.balance_loss=0.01"],
        [LORA, "tokens_per_micro_batch=2048"],
    ],
)
def test_combinations_that_are_refused(overrides: list[str]) -> None:
    with pytest.raises(ConfigError):
        made(*overrides)


def test_the_last_accepted_values() -> None:
    keys = "pref.label_smoothing=0.49", "pref.weight=0", "pref.sft_weight=1", "pref.beta=1e-6"
    cfg = made(LORA, *keys)
    assert cfg.pref.label_smoothing == 0.49
    assert made(LORA, "tokens_per_micro_batch=4096").row_tokens == 4096, "room for both answers"
    assert made(LORA, "tokens_per_micro_batch=null", "micro_batch_size=3").row_tokens == 3 * 2 * 2048
    assert made(LORA, "val.every=2", "val.path=other.json").val.every == 2
