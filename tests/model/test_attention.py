"""Which kernel attends, and which models cannot be packed: refused at the door, with the reason."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import CPU, single_world
from small import command_config, config_of, make_config
from torch import nn
from transformers import AutoConfig, AutoModel, DynamicCache
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from llava_fsdp.config import Attention, PlanConfig
from llava_fsdp.doctor.probes.software import needs_of
from llava_fsdp.model.packed_attention.attention import (
    NAMES,
    AttentionForm,
    Boundaries,
    CachedRows,
    Kernel,
    Lengths,
    PackedRow,
    RowSegments,
    attend_alone,
    attend_in_steps,
    choose_kernel,
    each_alone,
    flash_kernel_missing,
    in_window,
    not_for_flash,
    refuse_other_attention,
)
from llava_fsdp.model.packed_attention.packs import check_lengths, longrope_limit, other_attention, packing_refused
from llava_fsdp.model.packed_attention.row_mask import attention_arguments, make_row_mask, register_attention
from llava_fsdp.plan.main import plan
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.train import main as train
from llava_fsdp.train.setup import dry_run

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def examine(kind: str, **values: object) -> str | None:
    return packing_refused(AutoConfig.for_model(kind, **{**SMALL, **values}))


CAN = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": None},
    "gemma": {"head_dim": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "phi": {},
    "mixtral": {"num_local_experts": 4, "sliding_window": 3},
    "gemma2": {"head_dim": 8, "sliding_window": 3, "attn_logit_softcapping": 0.5},
    "gemma3_text": {"head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"head_dim": 8, "sliding_window": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere2": {"head_dim": 8, "sliding_window": 3},
    "nemotron": {},
}
WINDOWS = {
    "mistral": {"sliding_window": 3},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
}
"""Further values for kinds in `CAN`."""
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 7,
}  # fmt: skip
"""Rotary frequencies that change above 7 tokens. The longest sample of the test has 7, and its row has 12."""
CANNOT = {
    "llama4_text": ({}, "llama4_text has layers of chunked_attention"),
    "minimax": ({"num_local_experts": 4}, "minimax has layers of linear_attention"),
    "lfm2": ({"full_attn_idxs": [1]}, "lfm2 has layers of conv"),
    "mamba": ({}, "mamba does not attend through its AttentionInterface"),
    "falcon": ({"alibi": True}, "falcon does not attend through its AttentionInterface"),
    "doge": ({}, "doge does not run on a packed row"),
    "llama": (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
                             "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}},
        "longrope",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values"),
    [*CAN.items(), *WINDOWS.items(), ("qwen2", DYNAMIC)],
    ids=[*CAN, *(f"{k} window" for k in WINDOWS), "qwen2 dynamic"],
)
def test_models_that_can_be_packed(kind: str, values: dict[str, object]) -> None:
    """And what they compute of a packed row is what transformers' own eager attention computes of each sample alone,
    with its gradients; and token by token from a key-value cache."""
    assert examine(kind, **values) is None
    models = []
    for implementation in (Kernel(Attention.sdpa, "").name, "eager"):
        config = AutoConfig.for_model(kind, **{**SMALL, **values})
        torch.manual_seed(0)
        models.append(AutoModel.from_config(config, attn_implementation=implementation).eval())
    dice = torch.Generator().manual_seed(0)
    for name, value in models[0].named_parameters():  # scores and sinks as large as in a trained model
        if name.endswith("sinks") or ".q_proj." in name or ".k_proj." in name:
            nn.init.normal_(value, generator=dice)
    models[1].load_state_dict(models[0].state_dict())
    embeds, lengths = torch.randn(1, 12, SMALL["hidden_size"]), (4, 7, 1)
    bounds = torch.tensor([0, 4, 11, 12], dtype=torch.int32)
    segments = RowSegments(torch.tensor([[*range(4), *range(7), 0]]), bounds, lengths)
    implementation = models[0].config._attn_implementation
    arguments = attention_arguments(embeds, segments, implementation)
    packed = models[0](inputs_embeds=embeds, use_cache=False, **arguments).last_hidden_state
    alone = [models[1](inputs_embeds=e, use_cache=False).last_hidden_state for e in embeds.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-5)
    for output in (packed, torch.cat(alone, dim=1)):
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    for (name, own), (_, theirs) in zip(*(model.named_parameters() for model in models), strict=True):
        assert (own.grad is None) == (theirs.grad is None), name
        if own.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=name)
    if models[0].main_input_name == "input_ids":
        written = []
        cache, mask = DynamicCache(config=models[0].config), torch.ones((1, 7), dtype=torch.bool)
        for begin, end in ((0, 4), (4, 5), (5, 7)):
            positions = torch.arange(begin, end)[None]
            new = embeds[:, 4 + begin : 4 + end]
            arguments = attention_arguments(new, CachedRows(positions, mask[:, :end], cache), implementation)
            with torch.no_grad():
                written.append(models[0](inputs_embeds=new, **arguments).last_hidden_state)
        torch.testing.assert_close(torch.cat(written, dim=1), alone[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", CANNOT)
def test_models_that_cannot_are_named_with_the_reason(kind: str) -> None:
    values, message = CANNOT[kind]
    assert re.search(message, str(examine(kind, **values)))


@pytest.mark.slow
def test_a_run_with_a_model_that_cannot_is_padded_by_itself(
    parts: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`pack=true` and other keys that need packed rows are refused, with the reason."""
    for part in ("language", "vision"):
        (tmp_path / part).mkdir()
        for file in (parts / part).iterdir():
            (tmp_path / part / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "language" / "config.json"
    raw = json.loads(path.read_text()) | {"model_type": "stablelm", "partial_rotary_factor": 1.0}
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="pack=true: transformers' stablelm does not attend through"):
        train.train(make_config(tmp_path, dataset, tmp_path / "run", "max_steps=1", "pack=true"))
    for demand in ("attention=varlen", "tokens_per_micro_batch=512"):
        with pytest.raises(ConfigError, match=f"stablelm does not attend through .*{demand}"):
            train.train(make_config(tmp_path, dataset, tmp_path / "run", "max_steps=1", demand))
    steps = []
    for name in ("auto", "false"):
        with caplog.at_level(logging.INFO):
            train.train(make_config(tmp_path, dataset, tmp_path / name, "max_steps=1", f"pack={name}"))
        steps.append(json.loads((tmp_path / name / "metrics.jsonl").read_text()))
        assert yaml.safe_load((tmp_path / name / "config.yaml").read_text())["pack"] is False
    assert steps[0]["loss"] == steps[1]["loss"]
    planned = [f"model.language={tmp_path / 'language'}", f"model.vision={tmp_path / 'vision'}", "data.max_length=256"]
    with caplog.at_level(logging.INFO):
        dry_run.settle_auto(make_config(tmp_path, dataset, tmp_path / "dry", "dry_run=2"), single_world())
        plan(command_config(PlanConfig, "plan", *planned, "gpus=1", "gpu=h100"))
    said = [line for line in caplog.messages if "pack=false" in line and "stablelm does not attend through" in line]
    assert len(said) == 3
    needs = needs_of(make_config(tmp_path, dataset, tmp_path / "doctor"))
    assert "pack=false" in needs["attention"]() and "stablelm" in needs["attention"]()


LANGUAGE = AutoConfig.for_model("llama", **SMALL)
CUDA = torch.device("cuda", 0)


def test_the_best_kernel_is_chosen_with_its_reason() -> None:
    kernel = choose_kernel(Attention.auto, LANGUAGE, CPU, torch.float32)
    assert kernel.attention is Attention.sdpa and "varlen_attn needs CUDA, and this run is on cpu" in kernel.reason
    assert choose_kernel(Attention.sdpa, LANGUAGE, CPU, torch.bfloat16).attention is Attention.sdpa
    fp32 = choose_kernel(Attention.auto, LANGUAGE, CUDA, torch.float32)
    assert fp32.attention is Attention.sdpa and "computes in 16 bits, and this run in float32" in fp32.reason


@pytest.mark.parametrize("asked", [Attention.varlen, Attention.flash])
def test_a_kernel_that_cannot_run_is_refused(asked: Attention) -> None:
    with pytest.raises(ConfigError, match=rf"attention={asked.value}: .* needs CUDA, .*; set attention=auto"):
        choose_kernel(asked, LANGUAGE, CPU, torch.bfloat16)


@pytest.mark.parametrize("attention", list(NAMES))
def test_transformers_takes_each_kernel_for_ours(attention: Attention, parts: Path) -> None:
    """It looks for a kernel of its own wherever a name has "flash" in it."""
    config = AutoConfig.from_pretrained(parts / "language")
    register_attention()
    with torch.device("meta"):
        model = AutoModel.from_config(config, attn_implementation=Kernel(attention, "a test").name)
    assert model.config._attn_implementation == NAMES[attention]


def test_heads_and_dropout_that_flash_kernels_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def missing(what: str, **values: object) -> str | None:
        config = AutoConfig.for_model("llama", **{**SMALL, **values})
        return flash_kernel_missing(config, CUDA, torch.bfloat16, what)

    assert missing("varlen_attn") is None
    assert "this model's are 12 wide" in str(missing("flash-attn", head_dim=12))
    assert "attention_dropout of 0.1" in str(missing("varlen_attn", attention_dropout=0.1))
    assert missing("flash-attn", attention_dropout=0.1) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in str(missing("varlen_attn"))


KEYS = {
    "room": (["tokens_per_micro_batch=100", "data.max_length=200"], "tokens_per_micro_batch=100 has no room"),
    "unused room": (["tokens_per_micro_batch=9000", "pack=false"], "tokens_per_micro_batch=9000 is for packed rows"),
    "unused kernel": (["attention=varlen", "pack=false"], "attention=varlen is for packed rows"),
    "means": (["loss.normalize=micro_batch"], "loss.normalize=micro_batch is a mean of means"),
    "cuts of its own": (
        ["sampler=llava_v1_5", "tokens_per_micro_batch=9000"],
        "tokens_per_micro_batch=9000 has no effect",
    ),
}


@pytest.mark.parametrize("case", KEYS)
def test_keys_that_contradict_each_other_are_refused(case: str) -> None:
    overrides, message = KEYS[case]
    with pytest.raises(ConfigError, match=message):
        config_of(overrides)


def test_defaults() -> None:
    cfg = config_of(["micro_batch_size=4", "data.max_length=100"])
    assert cfg.packs and cfg.attention is Attention.auto and cfg.row_tokens == 400
    assert not config_of(["compat=llava_v1_5"]).pack
    assert config_of(["compat=llava_v1_5", "pack=true"]).pack, "its micro-batches may be laid out without padding"


@pytest.mark.parametrize("key_heads", [4, 2])
def test_a_packed_row_attends_as_its_samples_alone(key_heads: int) -> None:
    """To the bit, and causally, within each sample."""
    torch.manual_seed(0)
    lengths = (5, 1, 3)
    query, key, value = (torch.randn(1, heads, sum(lengths), 8) for heads in (4, key_heads, key_heads))
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 4 // key_heads, True
    bounds = torch.tensor([0, 5, 6, 9], dtype=torch.int32)
    found = each_alone(module, query, key, value, PackedRow(Boundaries(bounds, Lengths(lengths, 5)), AttentionForm()))
    whole = [part.repeat_interleave(4 // key_heads, dim=1) for part in (key, value)]
    begin = 0
    for length in lengths:
        own = slice(begin, begin + length)
        k, v = (part[:, :, own] for part in whole)
        scores = query[:, :, own] @ k.transpose(2, 3) / 8**0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        torch.testing.assert_close(found[:, own], (scores.softmax(-1) @ v).transpose(1, 2))
        begin += length


@pytest.mark.parametrize("window", [None, 1, 100, 256, 300])
@pytest.mark.parametrize(("latest", "total"), [(1, 2), (255, 300), (256, 511), (257, 700), (521, 523)])
def test_the_latest_tokens_attend_as_among_all(latest: int, total: int, window: int | None) -> None:
    """Also more of them than one mask is made for; gradients too."""
    torch.manual_seed(0)
    sizes = (4, latest), (2, total), (2, total)
    parts = [torch.randn(1, h, n, 8, dtype=torch.float64, requires_grad=True) for h, n in sizes]
    form = AttentionForm(0.3, window=window)
    allowed = in_window(latest, total, window or total, torch.device("cpu"))
    found, want = attend_alone(nn.Module(), *parts, form), attend_in_steps(*parts, form, allowed)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)  # the expected softmax is in fp32
    up = torch.randn_like(want)
    for own, other in zip(torch.autograd.grad(found, parts, up), torch.autograd.grad(want, parts, up), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_a_packed_row_drops_and_scales_as_its_samples_do() -> None:
    """A model's own dropout and scale, drawn from the generator sample after sample."""
    module = nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    query, key, value = torch.randn(3, 1, 4, 8, 5, generator=torch.Generator().manual_seed(0)).unbind()
    row = PackedRow(Boundaries(torch.tensor([0, 3, 8], dtype=torch.int32), Lengths((3, 5), 5)), AttentionForm(0.7, 0.5))
    torch.manual_seed(1)
    found = each_alone(module, query, key, value, row)
    torch.manual_seed(1)
    alone = [
        nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5, scale=0.7, is_causal=True)
        for q, k, v in zip(*(part.split((3, 5), dim=2) for part in (query, key, value)), strict=True)
    ]
    assert torch.equal(found, torch.cat(alone, dim=2).transpose(1, 2))


def seen_while_answering(mask: torch.Tensor, new: int, rule: Callable[..., Any] = causal_mask_function) -> list[Any]:
    """What the last `new` tokens of rows attend to. `mask`: bool [rows, tokens], False at padding."""
    rows, total = mask.shape
    cached = CachedRows(torch.zeros((rows, new), dtype=torch.int64), mask, DynamicCache())
    given = attention_arguments(mask[:, -new:], cached, NAMES[Attention.varlen])["attention_mask"]
    sizes = {"batch_size": rows, "q_length": new, "kv_length": total, "q_offset": total - new, "device": CPU}
    row = make_row_mask(mask_function=rule, attention_mask=given.to(CPU), **sizes)
    assert row.boundaries is None and row.masks is not None
    return row.masks[0].int().tolist()


def test_what_goes_on_sees_what_was_read_and_no_padding() -> None:
    """Two rows of three positions kept and two new ones; the second row has two of padding on its left."""
    mask = torch.tensor([[True] * 5, [False, False, True, True, True]])
    assert seen_while_answering(mask, 2) == [[[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]], [[[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]]]
    assert seen_while_answering(mask, 2, sliding_window_causal_mask_function(3))[0] == [
        [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    ]
    prompt = torch.tensor([[False, False, True]])
    found = seen_while_answering(prompt, 3)
    assert found == [[[[1, 0, 0], [0, 1, 0], [0, 0, 1]]]], "attending to nothing gives NaN"


def test_what_a_layer_may_hand_to_its_attention() -> None:
    """Nothing that changes what attends to what, or how much."""
    causal, other = nn.Module(), nn.Module()
    for module in (causal, other):
        setattr(module, "is_causal", module is causal)  # noqa: B010  no field of nn.Module
    names = ("position_bias", "sinks")
    refuse_other_attention(nn.Module(), dict.fromkeys(names), is_causal=True)
    refuse_other_attention(causal, {"is_causal": True, "output_attentions": False}, is_causal=True)
    refuse_other_attention(other, {"is_causal": False}, is_causal=False)
    for name in names:
        with pytest.raises(ConfigError, match=name):
            refuse_other_attention(causal, {name: 0}, is_causal=False)
    for module, others in ((other, {}), (causal, {"is_causal": False})):
        with pytest.raises(ConfigError, match="later"):
            refuse_other_attention(module, others, is_causal=True)


@pytest.mark.parametrize(
    ("head", "dtype", "runs"),
    [
        (256, torch.bfloat16, True),
        (8, torch.float16, True),
        (264, torch.bfloat16, False),
        (252, torch.bfloat16, False),
        (64, torch.float32, False),
    ],
)
def test_heads_and_dtypes_of_flash_kernels(head: int, dtype: torch.dtype, runs: bool) -> None:
    """Heads of a multiple of 8 up to 256, in 16 bits."""
    language = AutoConfig.for_model("llama", **SMALL, head_dim=head)
    assert (not_for_flash(language, dtype, "flash-attn") is None) is runs


@pytest.mark.parametrize(("capability", "runs"), [((7, 9), False), ((8, 0), True), ((8, 6), True), ((12, 0), True)])
def test_gpus_of_flash_kernels(capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (flash_kernel_missing(LANGUAGE, CUDA, torch.bfloat16, "flash-attn") is None) is runs


@pytest.mark.parametrize(
    ("values", "full"),
    [
        ({}, True),
        ({"sliding_window": 9, "use_sliding_window": False}, True),
        ({"layer_types": ["full_attention"] * 2}, True),
        ({"sliding_window": 9}, True),
        ({"attention_chunk_size": 9}, False),
        ({"alibi": True}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, True),
        ({"layer_types": ["full_attention", "chunked_attention"]}, False),
        ({"rope_parameters": {"rope_type": "longrope"}}, False),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, False),
    ],
)
def test_what_a_configuration_says_of_attention(values: dict[str, object], full: bool) -> None:
    """Of a kind that attends in full if nothing is said."""
    language = AutoConfig.for_model("llama", **SMALL)
    for name, value in values.items():
        setattr(language, name, value)
    assert (other_attention(language) is None) is full


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ({"rope_parameters": LONGROPE}, 64),
        ({"rope_parameters": {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}}, 64),
        ({"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 32}, 32),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, None),
        ({}, None),
    ],
)
def test_samples_whose_numbers_depend_on_their_neighbours_are_refused(
    values: dict[str, object], limit: int | None
) -> None:
    """transformers chooses longrope's frequencies for a whole batch, by its longest row."""
    language = AutoConfig.for_model("llama", **SMALL)
    for name, value in values.items():
        setattr(language, name, value)
    assert longrope_limit(language) == limit
    check_lengths(language, limit or 1000, is_alone=False)
    check_lengths(language, 1000, is_alone=True)
    if limit is not None:
        with pytest.raises(ConfigError, match=rf"data\.max_length={limit + 1}.*longrope.*data\.max_length={limit} or"):
            check_lengths(language, limit + 1, is_alone=False)
