"""One peer of whole_peers.py, which starts it: it builds its training and runs rounds of steps.

    python benchmarks/whole_peers_rank.py PLAN.json

Only "ours" imports this project.
"""

from __future__ import annotations

import tests_support  # noqa: F401

# isort: split
import argparse
import contextlib
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from peers_rank import Rounds, run_ours, stream_of, trainer_arguments
from torch.nn import functional

IGNORE = -100
EACH_SAMPLE = "sdpa_each_sample"
Sample = dict[str, torch.Tensor]


def run_this_trainer(plan: dict[str, Any]) -> None:
    from whole_peers_data import BLANK, configure

    from llava_fsdp.data.processor.inputs import ProcessorInputs

    class BesideOthers(ProcessorInputs):
        def completed(self, rows: Any, others_show: bool) -> Any:
            return super().completed(rows, True)

    def change(data: str, loader: Any) -> None:
        if data == BLANK:
            loader.steps.collate.images = BesideOthers(loader.steps.collate.images.reader)

    options = argparse.Namespace(**plan["options"])
    folders = {data: "text" if data == BLANK else data for data in plan["data"]}
    cfgs = {data: configure(Path(plan["work"]), folder, options) for data, folder in folders.items()}
    run_ours(plan, cfgs, change)


def samples_of(plan: dict[str, Any]) -> dict[str, list[list[Sample]]]:
    """By data set, the samples of every step as transformers' class takes them, one at a time."""
    return {data: torch.load(Path(plan["work"]) / f"{data}.pt") for data in plan["data"]}


def in_rows(samples: list[Sample]) -> Sample:
    """Samples padded on the right to the longest, as transformers' processors pad a batch; images one after another."""
    longest = max(sample["input_ids"].shape[1] for sample in samples)
    made: Sample = {}
    for name in samples[0].keys() | {name for sample in samples for name in sample}:
        values = [sample[name] for sample in samples if name in sample]
        if values[0].shape[:1] == (1,) and name not in ("pixel_values", "image_grid_thw"):
            fill = IGNORE if name == "labels" else 0
            values = [functional.pad(own, (0, longest - own.shape[1]), value=fill) for own in values]
        made[name] = torch.cat(values)
    return made


def transformers_model(plan: dict[str, Any], attention: str = "sdpa") -> Any:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        str(Path(plan["work"]) / "weights"),
        dtype=torch.float32,
        attn_implementation={"text_config": attention, "vision_config": "sdpa"},
    )
    if plan["options"]["frozen"]:  # all but the merger, which is the projector
        model.model.visual.requires_grad_(False)
        model.model.visual.merger.requires_grad_(True)
    return model


def run_hf(plan: dict[str, Any]) -> None:
    """transformers' Trainer with padded batches."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**trainer_arguments(plan, "hf"))
    rounds = Rounds(plan)
    steps = rounds.steps({data: [in_rows(own) for own in steps] for data, steps in samples_of(plan).items()})

    class MeasuredTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return stream_of(steps)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            rounds.losses.append(loss)
            return loss

        def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
            norm: Any = super()._get_grad_norm(*args, **kwargs)
            rounds.norms.append(norm)
            return norm

    MeasuredTrainer(transformers_model(plan), arguments).train()


def run_by_hand(plan: dict[str, Any]) -> None:
    """An expert's loop: packed rows, SDPA a sample at a time, and logits of labels alone."""
    register_each_sample()
    model = transformers_model(plan, EACH_SAMPLE).train()
    prepared = {data: [in_one_row(model, own) for own in steps] for data, steps in samples_of(plan).items()}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, **plan["adamw"])
    rounds = Rounds(plan)
    for step in rounds.steps(prepared):
        inputs = dict(step)
        places, labels = inputs.pop("places"), inputs.pop("labels")
        hidden = model.model(**inputs, use_cache=False).last_hidden_state
        loss = functional.cross_entropy(model.lm_head(hidden[0].index_select(0, places)), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, plan["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rounds.losses.append(loss.item())
        rounds.norms.append(norm.item())


def in_one_row(model: Any, samples: list[Sample]) -> dict[str, Any]:
    """Samples one after another, with their boundaries, the positions that the class gives each, and the places in
    the row at which labels are predicted. Nothing of it is left to the step."""
    lengths = torch.tensor([sample["input_ids"].shape[1] for sample in samples])
    ends = functional.pad(lengths.cumsum(0), (1, 0)).int()
    labels = torch.cat([functional.pad(sample["labels"][0, 1:], (0, 1), value=IGNORE) for sample in samples])
    positions = [
        model.model.get_rope_index(
            sample["input_ids"], sample["mm_token_type_ids"], image_grid_thw=sample.get("image_grid_thw")
        )[0]
        for sample in samples
    ]
    row = {
        "input_ids": torch.cat([sample["input_ids"] for sample in samples], 1),
        "position_ids": torch.cat(positions, 2),
        "places": (labels != IGNORE).nonzero()[:, 0],
        "labels": labels[labels != IGNORE],
        "boundaries": ends.tolist(),
    }
    for name in ("pixel_values", "image_grid_thw"):
        values = [sample[name] for sample in samples if name in sample]
        row |= {name: torch.cat(values)} if values else {}
    return row


def register_each_sample() -> None:
    """Make `EACH_SAMPLE` known to transformers: no mask, and SDPA for each sample between two boundaries."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def each_sample(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        scaling: float | None = None, boundaries: list[int] | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """[1, heads, tokens, size] each; returns [1, tokens, heads, size]."""
        assert boundaries is not None and attention_mask is None
        lengths = [end - begin for begin, end in pairwise(boundaries)]
        parts = zip(*(tensor.split(lengths, 2) for tensor in (query, key, value)), strict=True)
        found = [
            functional.scaled_dot_product_attention(*qkv, is_causal=True, scale=scaling, enable_gqa=True)
            for qkv in parts
        ]
        return torch.cat(found, 2).transpose(1, 2), None

    AttentionInterface.register(EACH_SAMPLE, each_sample)
    AttentionMaskInterface.register(EACH_SAMPLE, lambda *_, **__: None)


PEERS = {"ours packed": run_this_trainer, "hf": run_hf, "row": run_by_hand}


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt):
        PEERS[plan["peer"]](plan)


if __name__ == "__main__":
    main()
