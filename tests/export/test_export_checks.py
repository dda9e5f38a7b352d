"""How close an export must be to its model, and whether it is the one that a run would write."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from llava_fsdp.config import AspectRatio, DType, FolderFormat, LinearKind, Quantizer
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.export import verify_logits
from llava_fsdp.runtime.errors import ModelError
from llava_fsdp.train import final_export

BOUNDS = [
    (DType.fp32, DType.fp32, LinearKind.same, 1e-4),
    (DType.bf16, DType.fp32, LinearKind.same, 0.05),
    (DType.fp32, DType.bf16, LinearKind.same, 0.05),
    (DType.bf16, DType.bf16, LinearKind.fp8, 0.3),
]


class Echo(torch.nn.Module):
    """A model whose logits are its first input."""

    def forward(self, first: torch.Tensor, *others: object, return_logits: bool) -> torch.Tensor:
        assert return_logits
        return first


@pytest.mark.parametrize(("dtype", "compute", "linear", "bound"), BOUNDS)
def test_how_far_an_export_may_be_from_its_model(
    dtype: DType, compute: DType, linear: LinearKind, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a share of the largest logit; NaN is too far."""
    expected = torch.tensor([[2.0, -4.0], [1.0, 0.0]])
    given: list[torch.Tensor] = []
    monkeypatch.setattr(final_export, "reloaded_logits", lambda *_: given[-1])
    model = Echo()
    micro = SimpleNamespace(inputs=(expected, None), images=torch.zeros(0))
    loader = SimpleNamespace(steps=SimpleNamespace(probe=lambda: (micro, [])), to_device=lambda own: own)
    state: Any = SimpleNamespace(model=model, loader=loader, pipeline=None, roots=[model])
    cfg: Any = SimpleNamespace(
        model=SimpleNamespace(quantize=SimpleNamespace(mode=Quantizer.none)),
        export=SimpleNamespace(dtype=dtype),
        precision=SimpleNamespace(param_dtype=compute, linear=linear),
    )

    def check(difference: float) -> None:
        written = torch.cat([expected, torch.full((2, 3), 99.0)], dim=1)  # rows of the vocabulary that were added
        written[1, 1] += difference * 4
        given.append(written)
        final_export.verify(state, cfg, Path("export"), None, True)

    check(0.9 * bound)
    check(-0.9 * bound)
    for wrong in (1.1 * bound, -1.1 * bound, math.nan):
        with pytest.raises(ModelError):
            check(wrong)
    assert model.training


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("other", [{"run": "other"}, {"step": 6}, {"step": 8}, {"dtype": "fp32"}, {"gone": True}])
def test_an_export_is_current_if_all_of_it_is(
    lora: bool, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this run, at this step, in this dtype; of a run with adapters their folder too, whose dtype is no matter."""
    state: Any = SimpleNamespace(run="mine", step=7)
    cfg: Any = SimpleNamespace(
        model=SimpleNamespace(lora=SimpleNamespace(enabled=lora)),
        export=SimpleNamespace(merge=True, dtype=DType.bf16),
        output_dir="out",
    )
    right = {"run": "mine", "step": 7, "dtype": "bf16", "template": "v1"}
    notes: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(final_export, "read_notes", lambda folder: notes[folder.name])
    monkeypatch.setattr(final_export, "check_folder", lambda folder: None)

    def current(**changed: dict[str, Any]) -> bool:
        notes.clear()
        notes.update({"export": right, "adapter": {**right, "dtype": "keep"}} | changed)
        return final_export.is_current(state, cfg)

    wrong = {} if "gone" in other else {**right, **other}
    assert current() and not current(export=wrong)
    assert current(adapter=wrong) is (not lora or "dtype" in other)
    cfg.export.merge = False
    assert current(export=wrong) is lora


RULE = ImageTokens(AspectRatio.square, 28, 4)


@pytest.mark.parametrize("form", FolderFormat)
def test_a_converted_folder_has_the_logits_of_its_source(form: FolderFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal for our own model, close for transformers'; nan is never close."""
    expected, written = torch.tensor([[2.0, -4.0]]), torch.tensor([[2.0, -4.0]])
    outputs = iter(())
    monkeypatch.setattr(verify_logits, "compute_dtype", lambda _: torch.float32)
    monkeypatch.setattr(verify_logits, "random_rows", lambda *_: (None, []))
    monkeypatch.setattr(verify_logits, "load_copy", lambda *_: None)
    monkeypatch.setattr(verify_logits, "logits", lambda *_: next(outputs))
    monkeypatch.setattr(verify_logits, "logits_of_folder", lambda *_: next(outputs))
    monkeypatch.setattr(verify_logits, "replace_projector", lambda *_: None)
    model: Any = None
    outputs = iter((expected, written, written))
    assert verify_logits.prove(form, model, {}, {}, Path("x"), RULE) == 0
    for wrong in (1e-3, math.nan):
        for place in (1, 2) if form is FolderFormat.projector else (1,):
            outputs = iter([expected, *(written + wrong * (place == n) for n in (1, 2))])
            with pytest.raises(ModelError):
                verify_logits.prove(form, model, {}, {}, Path("x"), RULE)


def test_what_transformers_does_not_load_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is missing, has no place or another shape; that transformers only warns of it is not enough."""
    found: dict[str, set[str]] = {}
    config = SimpleNamespace(get_text_config=lambda: None)
    monkeypatch.setattr(verify_logits, "AutoConfig", SimpleNamespace(from_pretrained=lambda *_, **__: config))
    monkeypatch.setattr(verify_logits, "attention_of_transformers", lambda _: "sdpa")
    loaded = SimpleNamespace(from_pretrained=lambda *_, **__: (Echo(), found))
    monkeypatch.setattr(verify_logits, "AutoModelForImageTextToText", loaded)
    kinds = "missing_keys", "unexpected_keys", "mismatched_keys"
    found |= {kind: set() for kind in kinds}
    assert not verify_logits.open_export(tmp_path, torch.float32).training
    for kind in kinds:
        found |= {other: {"b", "a"} if other == kind else set() for other in kinds}
        with pytest.raises(ModelError, match=f"with {kind}: a, b"):
            verify_logits.open_export(tmp_path, torch.float32)


def test_logits_are_computed_in_fp32_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fifth to spare."""
    model: Any = torch.nn.Linear(10, 25, bias=False, device="meta")
    for free, dtype in ((1201, torch.float32), (1199, torch.bfloat16)):
        monkeypatch.setattr(verify_logits, "read_host", lambda free=free: SimpleNamespace(free=free))
        assert verify_logits.compute_dtype(model) is dtype


def test_both_files_of_a_projector_have_all_of_it(tmp_path: Path) -> None:
    model: Any = torch.nn.ModuleDict(
        {"multi_modal_projector": torch.nn.ModuleDict({"linear_1": torch.nn.Linear(2, 3)})}
    )
    weights = {f"model.mm_projector.0.{kind}": torch.ones(shape) for kind, shape in (("weight", (3, 2)), ("bias", 3))}
    torch.save(weights, tmp_path / "mm_projector.bin")
    verify_logits.replace_projector(model, tmp_path / "mm_projector.bin")
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())
    del weights["model.mm_projector.0.bias"]
    torch.save(weights, tmp_path / "mm_projector.bin")
    with pytest.raises(ModelError, match="was written, but has"):
        verify_logits.replace_projector(model, tmp_path / "mm_projector.bin")


@pytest.mark.parametrize("kind", ["llava", "llava_next", "llava_onevision"])
@pytest.mark.parametrize(
    ("tiles", "sizes", "count"),
    [(3, [(28, 37)], 1), (1, [(28, 37)], 2), (2, [(28, 37), (9, 8)], 2), (3, [(1, 2)] * 3, 3), (0, [], None),
     (2, None, None)],
)  # fmt: skip
def test_what_transformers_is_given_of_images(
    kind: str, tiles: int, sizes: list[tuple[int, int]] | None, count: int | None
) -> None:
    """LLaVA-NeXT's sizes are height and width; LLaVA-OneVision cuts an image into tiles if it is the only one."""
    given: dict[str, torch.Tensor] = {}

    class Model:
        config = AutoConfig.for_model(
            kind, image_token_id=90, **({"video_token_id": 91} if kind[6:] == "onevision" else {})
        )
        dtype = torch.bfloat16

        def __call__(self, **inputs: torch.Tensor) -> Any:
            given.update(inputs)
            return SimpleNamespace(logits=torch.arange(12.0).view(2, 3, 2).bfloat16())

    if sizes is None and kind != "llava_onevision":
        return
    micro: Any = SimpleNamespace(
        input_ids=torch.tensor([[1, 2, 3], [4, 5, 6]]), image_positions=torch.tensor([1, 5]),
        label_positions=torch.tensor([0, 4]),
    )  # fmt: skip
    found = verify_logits.exported_logits(Model(), micro, torch.ones(tiles, 3, 4, 4), sizes)
    assert found.dtype == torch.float32 and found.tolist() == [[0, 1], [8, 9]]
    token = 91 if sizes is None else 90
    assert given["input_ids"].tolist() == [[1, token, 3], [4, 5, token]] and micro.input_ids[0, 1] == 2
    expected = {"input_ids"} | ({"pixel_values_videos"} if sizes is None else {"pixel_values"} if tiles else set())
    expected |= {"image_sizes"} if sizes and kind != "llava" else set()
    expected |= {"batch_num_images"} if sizes and kind == "llava_onevision" else set()
    assert given.keys() == expected
    if sizes and kind != "llava":
        assert given["image_sizes"].tolist() == [[height, width] for width, height in sizes]
    if sizes and kind == "llava_onevision":
        assert given["batch_num_images"].tolist() == [count]
    shown = given.get("pixel_values_videos", given.get("pixel_values"))
    assert shown is None or (shown.dtype, shown.numel()) == (torch.bfloat16, tiles * 48)
