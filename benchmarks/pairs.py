"""What does a step of pairs of answers (DPO) cost with a copy of the prompt for each answer, with one prompt for both,
and with trl's DPOTrainer, on the same weights, pairs and steps?

    python benchmarks/pairs.py      # five minutes on two idle cores

All are in one process of one thread, and take turns after each step. This project computes the log-probabilities of
the reference before the first step (`pref.reference=stored`), which is not measured. trl has no such way for images: a
second model runs in each of its steps.
"""

from __future__ import annotations

import tests_support  # noqa: F401

# isort: split
import argparse
import copy
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
import transformers
from bench import MIB, command_line, composed, facts, in_turns, show, spread, write_json
from datasets import Dataset
from families import make_model, make_processor, make_tokenizer, resolve
from family_table import FAMILIES
from harness import single_world
from loaders import agreed_steps
from peers import ADAMW, CLIP
from PIL import Image
from steps import begin
from trl import DPOConfig, DPOTrainer

from llava_fsdp.config import Config
from llava_fsdp.plan import planner
from llava_fsdp.plan.workload import packed_row, samples_in
from llava_fsdp.train.loop import train_step
from llava_fsdp.train.setup.pair_reference import open_references

COPIES, ONCE, TRL = "a prompt for each answer", "data.prompt_once=true", "trl"
PEERS = {
    COPIES: "this project, packed: both answers have a copy of the prompt and see the same image features",
    ONCE: "the same with one prompt for both answers",
    TRL: "trl's DPOTrainer: padded, the image once for each answer, and a second model as the reference in each step",
}
EQUAL_WITHIN = 1e-4
PATCH, SIDE = 14, 224
WORDS = "the quick brown fox jumps over lazy dog how many dogs are there in first image and second one".split()


@dataclass
class Peer:
    """A training that can make one step after another."""

    steps: Iterator[Callable[[], float]]
    """Functions that make a step and return its loss."""
    tokens: list[int]
    """Positions of each step, padding included."""
    images: int
    """Images of a step that the vision tower encodes."""
    planned: int | None = None
    """Bytes at the memory peak of the largest step, by our planner."""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        """Make the next step, and note its loss and its CPU seconds."""
        make = next(self.steps)
        began = time.process_time()
        self.losses.append(make())
        self.seconds.append(time.process_time() - began)


def write_llava(folder: Path, hidden: int, layers: int) -> None:
    """A LLaVA with random weights and 256 tokens for an image, whose template ends an answer with its end token."""
    row = FAMILIES["llava"]
    heads = hidden // 64
    text = {
        **row.config["text_config"], "hidden_size": hidden, "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 64,
        "initializer_range": 0.02,
    }  # fmt: skip
    vision = {
        **row.config["vision_config"], "hidden_size": hidden // 2, "intermediate_size": hidden * 2,
        "num_hidden_layers": layers, "num_attention_heads": heads, "image_size": SIDE, "patch_size": PATCH,
    }  # fmt: skip
    square = {"height": SIDE, "width": SIDE}
    row = replace(
        row,
        config={**row.config, "text_config": text, "vision_config": vision, "image_seq_length": (SIDE // PATCH) ** 2},
        image=(row.image[0], {"size": {"shortest_edge": SIDE}, "crop_size": square}),
        fields={**row.fields, "patch_size": PATCH},
        template="inst",
    )
    tokenizer = make_tokenizer(row)
    make_model(transformers.CONFIG_MAPPING[row.kind](**resolve(row.config, tokenizer))).save_pretrained(folder)
    make_processor(row, tokenizer).save_pretrained(folder)


def write_pairs(folder: Path, count: int) -> list[dict[str, str]]:
    """Pairs with an image, a question of 15 to 40 words and answers of 20 to 90."""
    dice = random.Random(0)
    (folder / "images").mkdir(parents=True)
    records = []
    for number in range(count):
        Image.effect_noise((SIDE, SIDE), 60).convert("RGB").save(folder / "images" / f"{number}.png")
        question, chosen, rejected = (
            " ".join(dice.choices(WORDS, k=dice.randint(*size))) for size in ((15, 40), (20, 90), (20, 90))
        )
        own = {"id": str(number), "image": f"{number}.png", "question": question}
        records.append(own | {"chosen": f"yes {chosen}", "rejected": f"no {rejected}"})
    (folder / "pairs.json").write_text(json.dumps(records))
    return records


def configure(work: Path, options: argparse.Namespace, *more: str) -> Config:
    return composed([
        "stage=prefer", f"model.checkpoint={work / 'weights'}", "data=llava_json", f"data.path={work / 'pairs.json'}",
        f"data.images={work / 'images'}", "data.workers=0", "data.max_length=2048", "data.template=chat_template",
        f"output_dir={work / 'runs' / str(len(more))}", "precision=fp32", "activation_checkpointing=none",
        "compile=false", "export.enabled=false", f"global_batch_size={options.pairs}",
        f"micro_batch_size={options.pairs}", f"max_steps={options.steps}", f"optim.lr={ADAMW['lr']}",
        "optim.projector_lr=null", "optim.schedule=constant", "optim.warmup_ratio=0", "optim.weight_decay=0",
        f"optim.clip={CLIP}", *more,
    ])  # fmt: skip


def open_ours(cfg: Config) -> tuple[Peer, list[list[int]]]:
    """This project's training, and the numbers of the records of each of its steps."""
    Path(cfg.output_dir).mkdir(parents=True)
    state = begin(single_world(), cfg)
    open_references(state, cfg, False, lambda: None)
    state.model.train()
    steps = list(agreed_steps(state.loader))
    made = (lambda step=step: train_step(state, step, cfg, 0.0).loss for step in steps)
    records = [state.loader.steps.sampler.samples(step.facts.step) for step in steps]
    tokens = [step.facts.tokens for step in steps]
    samples = samples_in(state.loader.steps.records, state.loader.steps.image_reader.tokens)
    planned = planner.peak(cfg, 1, "cpu", [packed_row(samples, max(tokens), 1)]).bytes["total"]
    return Peer(made, tokens, cfg.global_batch_size, planned), records


def open_trl(work: Path, records: list[dict[str, str]], steps: list[list[int]], options: argparse.Namespace) -> Peer:
    """trl's trainer, with its own processing of the pairs of our steps in their order."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(work / "weights", dtype=torch.float32).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("vision_tower" not in name)
    rows = [
        {
            "prompt": [{"role": "user", "content": own["question"]}],
            **{key: [{"role": "assistant", "content": own[key]}] for key in ("chosen", "rejected")},
            "images": [Image.open(work / "images" / own["image"])],
        }
        for own in (records[number] for step in steps for number in step)
    ]
    args = DPOConfig(
        output_dir=str(work / "trl"), per_device_train_batch_size=options.pairs, beta=0.1, max_length=None,
        report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        dataloader_pin_memory=False, remove_unused_columns=False, per_device_eval_batch_size=options.pairs,
    )  # fmt: skip
    processor = transformers.AutoProcessor.from_pretrained(work / "weights")
    trainer = DPOTrainer(
        model, copy.deepcopy(model), args, train_dataset=Dataset.from_list(rows), processing_class=processor
    )
    trained = [own for own in model.parameters() if own.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAMW)
    batches = [dict(batch) for batch in trainer.get_eval_dataloader(trainer.train_dataset)]

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss = trainer.compute_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    made = (lambda batch=batch: step(batch) for batch in batches)
    return Peer(made, [batch["input_ids"].numel() for batch in batches], 4 * options.pairs)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    report = facts("what does a step of pairs cost, with a prompt for each answer, one for both, and in trl?", options)
    with tempfile.TemporaryDirectory(prefix="pairs-") as folder:
        work = Path(folder)
        write_llava(work / "weights", options.hidden, options.layers)
        records = write_pairs(work, options.pairs * options.steps)
        cfgs = {COPIES: configure(work, options), ONCE: configure(work, options, "data.prompt_once=true")}
        peers, steps = {}, []
        for name, cfg in cfgs.items():
            peers[name], steps = open_ours(cfg)
        peers[TRL] = open_trl(work, records, steps, options)
        for name in in_turns(list(peers), options.steps):
            peers[name].step()
    rows = [
        {
            "peer": name,
            "tokens": sum(peer.tokens[1:]) / len(peer.tokens[1:]),
            "images": peer.images,
            "cpu_seconds": spread(peer.seconds[1:]),
            "times_once": [own / once for own, once in zip(peer.seconds[1:], peers[ONCE].seconds[1:], strict=True)],
            "planned_bytes": peer.planned,
            "losses": peer.losses,
        }
        for name, peer in peers.items()
    ]
    first, *others = (row["losses"] for row in rows)
    worst = max(abs(a - b) / abs(a) for other in others for a, b in zip(first, other, strict=True))
    assert worst < EQUAL_WITHIN, [row["losses"] for row in rows]
    report |= {"peers": PEERS, "rows": rows, "equality": {"worst": worst, "bound": EQUAL_WITHIN}}
    lines = [
        (row["peer"], f"{row['tokens']:,.0f}", str(row["images"]), f"{row['cpu_seconds']['median']:.2f}",
         f"{median(row['times_once']):.2f} x",
         f"{row['planned_bytes'] / MIB:,.0f} MiB" if row["planned_bytes"] else "")
        for row in rows
    ]  # fmt: skip
    show("A step of pairs", ("peer", "tokens", "images", "CPU seconds", "one prompt is", "planned memory"), lines)
    print(f"losses agree within {worst:.1e}; wrote {write_json(report, 'pairs-cpu', options.folder)}")


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of a step")
    parser.add_argument("--steps", type=int, default=7, help="steps; the first is not timed")
    parser.add_argument("--hidden", type=int, default=512, help="width of the language model")
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
