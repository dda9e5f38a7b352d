"""The peers of peers.py that pack: transformers' model with an FSDP2 loop, TRL, and NeMo Automodel's model and packing.

Nothing of this project is imported here. `peers_rank.py` calls the `run_` functions, each in every rank of a torchrun.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers_rank import (
    Rounds,
    end_process_group,
    loop_by_hand,
    shard_by_hand,
    stream_of,
    trainer_arguments,
    transformers_model,
)
from safetensors.torch import load_file
from torch.nn import functional

IGNORE = -100
EACH_SAMPLE = "sdpa_each_sample"


def samples_of(tensors: dict[str, torch.Tensor], number: int) -> list[dict[str, torch.Tensor]]:
    """The samples of a padded micro-batch, without padding; a blank row that has no label is left out."""
    rows = zip(*(tensors[f"{number}.0.{name}"] for name in ("input_ids", "labels", "attention_mask")), strict=True)
    found = []
    for ids, labels, mask in rows:
        length = int(mask.sum())
        if not bool((labels != IGNORE).any()):
            continue
        own = labels[:length].clone()
        own[0] = IGNORE  # no token of its own sample comes before it
        found.append({"input_ids": ids[:length], "labels": own})
    return found


def read(plan: dict[str, Any], data: str) -> dict[str, torch.Tensor]:
    return load_file(Path(plan["work"]) / "samples" / data / f"rank{dist.get_rank()}.safetensors")


def images(tensors: dict[str, torch.Tensor], number: int, data: str) -> dict[str, torch.Tensor]:
    """The argument `pixel_values`; none for text alone, whose padded rows have a blank one."""
    return {} if data == "text" else {"pixel_values": tensors[f"{number}.0.pixel_values"]}


def in_one_row(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Samples one behind the other: ids, labels and position ids [1, tokens], and the samples' boundaries."""
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    return {
        "input_ids": torch.cat([sample["input_ids"] for sample in samples])[None],
        "labels": torch.cat([sample["labels"] for sample in samples])[None],
        "position_ids": torch.cat([torch.arange(int(length)) for length in lengths])[None],
        "cu_seqlens": functional.pad(lengths.cumsum(0), (1, 0)).int(),
    }


# transformers' model and a loop by hand


def run_filled_rows(plan: dict[str, Any]) -> None:
    """Rows as long as the longest sample, each filled with samples; transformers makes the mask of `position_ids`."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=plan["timeout"]))
    steps: dict[str, list[dict[str, Any]]] = {}
    for data in plan["data"]:
        tensors = read(plan, data)
        steps[data] = [
            {
                **filled_rows(samples_of(tensors, number)),
                **images(tensors, number, data),
                "num_items_in_batch": tensors[f"{number}.label_tokens"],
                "use_cache": False,
            }
            for number in range(plan["options"]["steps"])
        ]
    model = sharded(plan, "sdpa")
    loop_by_hand(plan, model, Rounds(plan), steps, lambda step: iter([model(**step).loss]))
    end_process_group()


def filled_rows(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """First fit into rows of the longest sample's length. The order of the images stays as it was: all images of this
    benchmark are the same one."""
    room = max(len(sample["input_ids"]) for sample in samples)
    rows: list[list[dict[str, torch.Tensor]]] = []
    for sample in sorted(samples, key=lambda s: -len(s["input_ids"])):
        length = len(sample["input_ids"])
        fitting = [row for row in rows if sum(len(s["input_ids"]) for s in row) + length <= room]
        fitting[0].append(sample) if fitting else rows.append([sample])
    fields: dict[str, list[torch.Tensor]] = {"input_ids": [], "labels": [], "position_ids": []}
    for row in rows:
        packed = in_one_row(row)
        missing = room - packed["input_ids"].shape[1]
        for name, fill in (("input_ids", 0), ("labels", IGNORE)):
            fields[name].append(functional.pad(packed[name], (0, missing), value=fill))
        fields["position_ids"].append(torch.cat([packed["position_ids"], torch.arange(missing)[None]], 1))
    return {name: torch.cat(rows) for name, rows in fields.items()}


def run_one_row(plan: dict[str, Any]) -> None:
    """One row of all samples, and torch's SDPA a sample at a time."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=plan["timeout"]))
    steps: dict[str, list[dict[str, Any]]] = {}
    for data in plan["data"]:
        tensors = read(plan, data)
        steps[data] = []
        for number in range(plan["options"]["steps"]):
            row = in_one_row(samples_of(tensors, number)) | images(tensors, number, data)
            ends, count = row.pop("cu_seqlens"), tensors[f"{number}.label_tokens"]
            more = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "num_items_in_batch": count, "use_cache": False}
            steps[data].append(row | more)
    transformers_each_sample()
    model = sharded(plan, EACH_SAMPLE)
    loop_by_hand(plan, model, Rounds(plan), steps, lambda step: iter([model(**step).loss]))
    end_process_group()


def sharded(plan: dict[str, Any], attention: str) -> Any:
    """transformers' LLaVA under `fully_shard`, with that attention in its language model."""
    model = transformers_model(plan, attention)
    shard_by_hand(model, model.model.language_model.layers, set(model.model.vision_tower.parameters()))
    return model


def transformers_each_sample() -> None:
    """Make `EACH_SAMPLE` known to transformers: no mask, and SDPA for each sample between two of `cu_seq_lens_q`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def each_sample(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        scaling: float | None = None, cu_seq_lens_q: torch.Tensor | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """[1, heads, tokens, size] each; returns [1, tokens, heads, size]."""
        assert cu_seq_lens_q is not None and attention_mask is None
        lengths = cu_seq_lens_q.diff().tolist()
        parts = zip(*(tensor.split(lengths, 2) for tensor in (query, key, value)), strict=True)
        found = [functional.scaled_dot_product_attention(*qkv, is_causal=True, scale=scaling) for qkv in parts]
        return torch.cat(found, 2).transpose(1, 2), None

    AttentionInterface.register(EACH_SAMPLE, each_sample)
    AttentionMaskInterface.register(EACH_SAMPLE, lambda *_, **__: None)


# Other libraries, on text alone


def run_trl(plan: dict[str, Any]) -> None:
    """TRL's SFTTrainer with its own packing (best fit, padding-free) and collator. It is DDP on a CPU, and its rows of
    a micro-batch become one row, with a mask that transformers makes of `position_ids`."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer
    from trl.data_utils import pack_dataset

    folder, steps = str(Path(plan["work"]) / "language"), plan["options"]["steps"]
    arguments = SFTConfig(
        **trainer_arguments(plan, "trl"), bf16=False, packing=True, packing_strategy="bfd", max_length=1024,
        per_device_train_batch_size=plan["options"]["rows"], gradient_checkpointing=False,
    )  # fmt: skip
    rounds_of: list[Rounds] = []

    class MeasuredTrainer(SFTTrainer):
        def get_train_dataloader(self) -> Any:
            return stream_of(rounds_of[0].steps(self.collated))

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            rounds_of[0].losses.append(loss)  # of this rank, times the ranks
            return loss

    tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="<unk>")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    some = Dataset.from_list([{"input_ids": [1, 2], "labels": [IGNORE, 2]}])
    trainer = MeasuredTrainer(model, arguments, train_dataset=some, processing_class=tokenizer)
    trainer.collated = {}
    for data in plan["data"]:
        tensors = read(plan, data)
        as_lists = [[{k: v.tolist() for k, v in s.items()} for s in samples_of(tensors, n)] for n in range(steps)]
        packed = [pack_dataset(Dataset.from_list(samples), arguments.max_length, "bfd") for samples in as_lists]
        trainer.collated[data] = [trainer.data_collator(list(rows)) for rows in packed]
    rounds_of.append(Rounds(plan))
    trainer.train()
    end_process_group()


def run_automodel(plan: dict[str, Any]) -> None:
    """NeMo Automodel's Llama, its packing and its collator; `fully_shard` and the loop by hand, because its recipe
    needs a GPU (train_ft.py:561)."""
    from datasets import Dataset
    from nemo_automodel.components.datasets.llm.neat_packing import neat_pack_dataset
    from nemo_automodel.components.datasets.utils import neat_packed_collater
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.llama.model import LlamaForCausalLM
    from transformers import AutoConfig

    dist.init_process_group("gloo", timeout=timedelta(seconds=plan["timeout"]))
    folder = Path(plan["work"]) / "language"
    config = AutoConfig.from_pretrained(str(folder), attn_implementation="sdpa", dtype=torch.float32)
    model = LlamaForCausalLM(config, BackendConfig(attn="sdpa", linear="torch", rms_norm="torch", rope_fusion=False))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    shard_by_hand(model, model.model.layers, set())
    steps: dict[str, list[tuple[dict[str, Any], int]]] = {}
    for data in plan["data"]:
        tensors = read(plan, data)
        steps[data] = []
        for number in range(plan["options"]["steps"]):
            samples = samples_of(tensors, number)
            room = max(len(sample["input_ids"]) for sample in samples)
            shifted = [
                {"input_ids": s["input_ids"].tolist(), "labels": [*s["labels"][1:].tolist(), IGNORE]} for s in samples
            ]
            rows = neat_pack_dataset({"train": Dataset.from_list(shifted)}, "train", room)
            inputs = neat_packed_collater(list(rows), "sdpa")
            inputs.pop("_packed_seq_ids", None)  # for kernels of variable length
            steps[data].append((inputs, int(tensors[f"{number}.label_tokens"])))
    loss_of = MaskedCrossEntropy()

    def losses(step: tuple[dict[str, Any], int]) -> Iterator[torch.Tensor]:
        inputs, count = step
        given = {name: value for name, value in inputs.items() if name != "labels"}
        yield loss_of(model(**given, use_cache=False).logits, inputs["labels"], num_label_tokens=count)

    loop_by_hand(plan, model, Rounds(plan), steps, losses)
    end_process_group()
