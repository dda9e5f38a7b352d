"""What the trainer asks a model."""

from pathlib import Path
from typing import Any

import pytest
from small import Configure

from llava_fsdp.model.architecture import Ability, check_abilities
from llava_fsdp.model.llava.llava import Llava
from llava_fsdp.runtime.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2] / "src/llava_fsdp"
ASKED = {
    Ability.pipeline: ("parallel.pipeline=2", "2"), Ability.tensor: ("parallel.tensor=2", "2"),
    Ability.context: ("parallel.context=2", "2"), Ability.low_precision: ("precision=int8_mixed", "int8_mixed"),
    Ability.quantization: ("model.quantize.mode=nf4", "nf4"), Ability.compilation: ("compile=true", "true"),
    Ability.checkpointing: ("activation_checkpointing=dynamic", "dynamic"),
    Ability.experts: ("parallel.expert=2", "2"), Ability.balance: ("model.balance_loss=0.5", "0.5"),
    Ability.labels: ("labels=llava_v1_5", "llava_v1_5"),
    Ability.aspect_ratio: ("data.image_aspect_ratio=square", "square"),
    Ability.image_delimiters: ("model.image_start_end=true", "true"),
    Ability.template: ("data.template=mpt", "mpt"), Ability.pixels: ("data.pixels=fast", "fast"),
}  # fmt: skip


class Refusing(Llava):
    """A kind of model that can do nothing that it may refuse."""

    def why_not(self, ability: Ability) -> str | None:
        return f"not for {ability.name}"


@pytest.mark.parametrize("ability", Ability)
def test_a_kind_of_model_refuses_what_it_cannot_do_with_its_reason(ability: Ability, configure: Configure) -> None:
    key, value = ASKED[ability]
    model: Any = Refusing.__new__(Refusing)
    able: Any = Llava.__new__(Llava)
    neutral = ["data.template=auto", *(["model.lora.enabled=true"] if ability is Ability.quantization else [])]
    check_abilities(model, configure("data.template=auto"))
    cfg = configure(*neutral, key)
    check_abilities(able, cfg)
    with pytest.raises(ConfigError, match=rf"^{ability.value}={value}: not for {ability.name}$"):
        check_abilities(model, cfg)


@pytest.mark.parametrize("package", ["train", "parallel", "plan", "chat", "evaluate", "doctor", "report", "data"])
def test_only_model_and_export_know_what_kind_of_model_it_is(package: str) -> None:
    known = ("model.llava import", ".language_model.", "lm_head", "multi_modal_projector", ".vision_tower")
    files = sorted((ROOT / package).rglob("*.py"))
    assert files and not [(f.name, word) for f in files for word in known if word in f.read_text()]
