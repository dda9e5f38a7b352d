"""How close an export must be to its model, and whether it is the one that a run would write."""

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from llava_fsdp.config import AspectRatio, DType, FolderFormat, LinearKind, Quantizer, Which
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.export.prove import verify_logits
from llava_fsdp.export.prove.logit_distance import Distance, distance
from llava_fsdp.export.write.folded_head import HEAD
from llava_fsdp.export.write.weights_writer import Weights
from llava_fsdp.runtime.errors import LlavaFsdpError, ModelError
from llava_fsdp.train import final_export


class Echo(torch.nn.Module):
    """A model whose logits are its first input."""

    def forward(self, first: torch.Tensor, *others: object, return_logits: bool) -> torch.Tensor:
        assert return_logits
        return first


EXPECTED = torch.tensor([[2.0, -4.0], [1.0, 1.0]])
"""Expected logits, whose mean absolute value is 2."""
BOUNDS = [
    # trained in, products, copies computed in, experts, bound of the copy, of transformers' class
    (DType.fp32, LinearKind.same, torch.float32, False, 1e-4, 1e-4),
    (DType.fp32, LinearKind.fp8, torch.float32, False, 0.5 * 2, 1e-4),
    (DType.bf16, LinearKind.same, torch.float32, True, 0.5 * 2, 1e-4),
    (DType.bf16, LinearKind.same, torch.bfloat16, False, 0.5 * 2, 0.05 * 2),
    (DType.bf16, LinearKind.same, torch.bfloat16, True, 0.5 * 2, 0.3 * 2),
]
"""Bounds as shares of the largest logit, where one of four logits differs. Bounds of the mean are for half of that."""


def differing(share: float) -> torch.Tensor:
    """Logits of which one differs from the expected one by a share of the largest."""
    found = EXPECTED.clone()
    found[1, 1] += 4 * share
    return found


@pytest.mark.parametrize(("trained_in", "linear", "compute", "experts", "copied", "exported"), BOUNDS)
def test_how_far_an_export_may_be_from_its_model(
    trained_in: DType,
    linear: LinearKind,
    compute: torch.dtype,
    experts: bool,
    copied: float,
    exported: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A copy of the trained model has its logits, and transformers those of a copy of the exported one: to a share of
    the largest in fp32, and on average in 16 bits. Rounding between the two may move them as far as it will. NaN is too
    far."""
    live: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    ours: list[torch.Tensor] = []
    monkeypatch.setattr(final_export, "logits_of_class", lambda *_: torch.cat([theirs[-1], torch.ones(2, 3)], 1))
    monkeypatch.setattr(final_export, "live_logits", lambda *_: live[-1])
    monkeypatch.setattr(final_export, "logits", lambda *_: ours.pop(0))
    monkeypatch.setattr(final_export, "compute_place", lambda _, device: (device, compute))
    monkeypatch.setattr(final_export, "empty_copy", lambda _, dtype, device: torch.nn.Linear(1, 1, dtype=dtype))
    monkeypatch.setattr(final_export, "has_experts", lambda _: experts)
    for name in ("with_folded_head", "used_dtypes", "check_and_load_weights", "load_weights"):
        monkeypatch.setattr(final_export, name, lambda *_: None)
    monkeypatch.setattr(final_export, "plain_model", lambda _: SimpleNamespace(parts=None))
    monkeypatch.setattr(final_export, "folding_rounds", lambda *_: False)
    monkeypatch.setattr(final_export, "weights_in", lambda _: {})
    micro = SimpleNamespace(input_ids=torch.zeros(0), images={"tiles": torch.zeros(0)}, map=lambda _: micro)
    probe = micro, []
    loader = SimpleNamespace(to_device=lambda own: own, steps=SimpleNamespace(probe=lambda: probe))
    state: Any = SimpleNamespace(loader=loader)
    cfg: Any = SimpleNamespace(
        model=SimpleNamespace(quantize=SimpleNamespace(mode=Quantizer.none), lora=SimpleNamespace(enabled=False)),
        export=SimpleNamespace(dtype=DType.bf16, stored=DType.bf16),
        precision=SimpleNamespace(param_dtype=trained_in, linear=linear),
    )

    def check(copy: float, rounded: float, export: float) -> None:
        """Shares by which the copy differs from the model, its rounded weights from the copy, and the export."""
        live.append(EXPECTED)
        ours[:] = [differing(copy), EXPECTED - 9 * rounded]
        theirs.append(differing(export) - 9 * rounded)
        final_export.verify(state, cfg, Path("export"), Weights({}, {}, lambda _: EXPECTED))

    caplog.set_level(logging.INFO, "llava_fsdp")
    far, wide = 0.9 * copied, 0.9 * exported
    check(far, 0, wide)
    same, copy, export, _ = caplog.messages
    assert "bf16" in same and "to the bit" in same
    halves = [copied == 1e-4, exported == 1e-4]
    for line, bound, by_largest in zip((copy, export), (copied, exported), halves, strict=True):
        words = "largest" if by_largest else "mean"
        bound, found = (bound, 0.9 * bound) if by_largest else (bound / 2, 0.9 * bound / 2)
        assert f": logits differ by {found:.2g} of the {words} logit" in line, line
        assert line.endswith(f"within the bound of {bound:.2g}")
    for near in ((far, 0, 0), (-far, 0, 0), (0, 0, wide), (0, 0, -wide), (0, 1, 0), (0, -1, 0)):
        check(*near)
    far, wide = 1.2 * copied, 1.2 * exported
    for wrong in ((far, 0, 0), (-far, 0, 0), (0, 0, wide), (0, 0, -wide), (math.nan, 0, 0), (0, 0, math.nan)):
        with pytest.raises(ModelError):
            check(*wrong)
    cfg.model.quantize.mode = Quantizer.nf4
    check(1.2 * copied, 0, 0)  # the copy is not quantized


def test_the_effect_of_rounding_is_a_warning_where_a_wider_export_would_lack_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And it names the dtype that training uses: of adapters, which are added to the results of layers, fp32."""
    caplog.set_level(logging.INFO)
    for used, dtype, lora, kl, cure in (
        (DType.fp32, DType.bf16, False, 0.06, "fp32"),
        (DType.fp32, DType.bf16, False, 0.04, None),
        (DType.bf16, DType.bf16, False, 0.06, None),
        (DType.bf16, DType.fp32, False, 0.06, "bf16"),
        (DType.bf16, DType.bf16, True, 0.06, "fp32"),
    ):
        cfg: Any = SimpleNamespace(
            model=SimpleNamespace(lora=SimpleNamespace(enabled=lora)),
            export=SimpleNamespace(dtype=dtype, stored=dtype),
            precision=SimpleNamespace(param_dtype=used),
        )
        final_export.report_rounding(Distance(0, 0, kl, 0), cfg)
        record = caplog.records[-1]
        assert record.levelno == (logging.INFO if cure is None else logging.WARNING)
        assert cure is None or f"export.dtype={cure}," in record.getMessage()


@pytest.mark.parametrize("verify", [True, False])
def test_an_export_is_said_before_it_is_written(
    verify: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "llava_fsdp")
    said: list[str] = []

    def write(*_: object) -> None:
        said.extend(caplog.messages)
        raise ModelError("the disk is full")

    for name in ("whole_model", "source_of_run"):
        monkeypatch.setattr(final_export, name, lambda *_: None)
    monkeypatch.setattr(final_export, "write_folder", write)
    state: Any = SimpleNamespace(sources={}, run="run", step=3)
    cfg: Any = SimpleNamespace(
        output_dir=str(tmp_path), model=SimpleNamespace(lora=SimpleNamespace(enabled=False)),
        export=SimpleNamespace(dtype=DType.bf16, stored=DType.bf16, verify=verify, which=Which.last),
    )  # fmt: skip
    with pytest.raises(ModelError, match="the disk is full"):
        final_export.export(state, cfg, True)
    (line,) = said
    assert f"{tmp_path}/export" in line and ("comparing" in line) is verify


def test_a_weight_is_the_trained_one_to_the_bit_and_finite() -> None:
    """On the first rank; the others only take part in gathering. A copy gets the values that training uses."""
    values = torch.full((3, 2), 1 + 2**-12)
    more = torch.cat([values.bfloat16(), torch.zeros(1, 2)])
    for trained, stored, message in (
        (values, more, None),
        (values + 2**-6, more, "weight in it is not the trained one"),
        (torch.full((3, 2), math.nan), torch.full((3, 2), math.nan), "not finite"),
        (torch.full((3, 2), math.inf), torch.full((3, 2), math.inf), "not finite"),
    ):
        found = Weights({"weight": (3, 2)}, {"weight": torch.bfloat16}, lambda _, trained=trained: trained)
        for used in (torch.float32, torch.bfloat16):
            copies = {"weight": torch.nn.Parameter(torch.zeros(3, 2))}
            written: Any = {"weight": final_export.MemoryTensor(stored)}
            given = found, found, Path("x"), written
            if message is None:
                final_export.check_and_load_weights(*given, copies, {"weight": used})
                assert torch.equal(copies["weight"].detach(), values.to(used).float())
            else:
                with pytest.raises(ModelError, match=message):
                    final_export.check_and_load_weights(*given, copies, {"weight": used})
            final_export.check_and_load_weights(*given, {}, {})


def test_a_weight_that_cannot_be_read_does_not_end_the_gathering() -> None:
    """The other ranks would wait for the first one in the next collective."""
    gathered: list[str] = []

    def read(name: str) -> torch.Tensor:
        gathered.append(name)
        return torch.ones(3, 2)

    class Unreadable:
        def rows(self, begin: int, end: int) -> torch.Tensor:
            raise OSError("Input/output error")

    names = ["one", "two"]
    found = Weights(dict.fromkeys(names, (3, 2)), dict.fromkeys(names, torch.float32), read)
    copies = {name: torch.nn.Parameter(torch.zeros(3, 2)) for name in names}
    written: Any = {name: Unreadable() for name in names}
    with pytest.raises(LlavaFsdpError, match="Input/output error"):
        final_export.check_and_load_weights(
            found, found, Path("x"), written, copies, dict.fromkeys(names, torch.float32)
        )
    assert gathered == names


@pytest.mark.parametrize("tied", [False, True])
def test_a_factor_in_the_output_layer_is_not_the_copys(tied: bool) -> None:
    """The copy multiplies by it itself, so it gets the rounded weight without the factor."""
    head, factor = torch.full((3, 2), 1 + 2**-12), 1.3
    names = ["language_model.embed_tokens.weight"] if tied else [HEAD]
    trained = Weights({n: (3, 2) for n in names}, dict.fromkeys(names, torch.bfloat16), lambda _: head)
    folded = (head.bfloat16().float() * factor).bfloat16()
    exported = Weights(
        {**trained.shapes, HEAD: (3, 2)},
        {**trained.dtypes, HEAD: torch.bfloat16},
        lambda name: folded if name == HEAD else head,
    )
    written: Any = {name: final_export.MemoryTensor(head.bfloat16()) for name in names}
    written[HEAD] = final_export.MemoryTensor(folded)
    copies = {name: torch.nn.Parameter(torch.zeros(3, 2)) for name in names}
    final_export.check_and_load_weights(
        trained, exported, Path("x"), written, copies, dict.fromkeys(names, torch.float32)
    )
    for name in names:
        assert torch.equal(copies[name].detach(), head) and torch.equal(written[name].tensor, head.bfloat16())
    written[HEAD] = final_export.MemoryTensor(head)
    with pytest.raises(ModelError, match=r"lm_head.weight in it is not"):
        final_export.check_and_load_weights(
            trained, exported, Path("x"), written, copies, dict.fromkeys(names, torch.float32)
        )


def test_distances_of_logits() -> None:
    """By hand: a largest logit of 4, a mean of 2, and a token whose likeliest next one changes."""
    found = distance(torch.tensor([[2.0, -4.0, 9.0], [1.0, 1.5, 9.0]]), EXPECTED)
    assert (found.largest, found.mean, found.changed) == (0.125, 0.0625, 0.5)
    kl = 0.5 * (math.log(0.5 * (1 + math.exp(0.5))) + math.log(0.5 * (1 + math.exp(-0.5)))) / 2
    assert found.kl == pytest.approx(kl)
    assert distance(EXPECTED, EXPECTED) == Distance(0, 0, 0, 0)
    assert distance(torch.zeros(2, 2), torch.zeros(2, 2)) == Distance(0, 0, 0, 0)
    many = torch.randn(700, 5)
    assert distance(many.roll(1, 1), many).kl == pytest.approx(
        float(torch.nn.functional.kl_div(many.roll(1, 1).log_softmax(1), many.softmax(1), reduction="batchmean")), 1e-5
    )


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    "other", [{"run": "other"}, {"step": 6}, {"step": 8}, {"dtype": "fp32"}, {"which": "best"}, {"gone": True}]
)
def test_an_export_is_current_if_all_of_it_is(
    lora: bool, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this run, at this step, in this dtype; of a run with adapters their folder too, whose dtype is no matter."""
    state: Any = SimpleNamespace(run="mine", step=7)
    cfg: Any = SimpleNamespace(
        model=SimpleNamespace(lora=SimpleNamespace(enabled=lora)),
        export=SimpleNamespace(merge=True, dtype=DType.bf16, which=Which.last),
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
    monkeypatch.setattr(verify_logits, "folding_rounds", lambda *_: False)
    model: Any = SimpleNamespace(parts=None, with_vocabulary=lambda: {"head"}, language=torch.nn.Module())
    dtypes = {"head": torch.float32}
    outputs = iter((expected, written, written))
    assert verify_logits.prove(form, model, {}, dtypes, Path("x"), RULE) == Distance(0, 0, 0, 0)
    for wrong in (1e-3, math.nan):
        for place in (1, 2) if form is FolderFormat.projector else (1,):
            outputs = iter([expected, *(written + wrong * (place == n) for n in (1, 2))])
            with pytest.raises(ModelError):
                verify_logits.prove(form, model, {}, dtypes, Path("x"), RULE)


def test_what_transformers_does_not_load_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is missing, has no place or another shape; that transformers only warns of it is not enough."""
    found: dict[str, set[str]] = {}
    config = SimpleNamespace(get_text_config=lambda: None, sub_configs={})
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


@pytest.mark.parametrize(
    ("free", "expected"), [(1201, ("cuda", 4)), (1199, ("cuda", 2)), (601, ("cuda", 2)), (599, ("cpu", 4))]
)
def test_logits_are_computed_on_the_gpu_if_its_free_memory_holds_the_weights(
    free: int, expected: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After torch has given back what it holds in reserve. A 7B model takes minutes on the CPU."""
    model: Any = torch.nn.Linear(10, 25, bias=False, device="meta")
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: calls.append(str(device)) or (free, 10**6))
    monkeypatch.setattr(verify_logits, "read_host", lambda: SimpleNamespace(free=10**6))
    device, dtype = verify_logits.compute_place(model, torch.device("cuda", 3))
    assert (device.type, dtype.itemsize) == expected and calls == ["empty", "cuda:3"]
    assert verify_logits.compute_place(model, torch.device("cpu")) == (torch.device("cpu"), torch.float32)
    assert len(calls) == 2


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
        input_ids=torch.tensor([[1, 2, 3], [4, 5, 6]]), images={"positions": torch.tensor([1, 5])},
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
