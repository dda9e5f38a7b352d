"""Trains a small LLaVA from records to an export, in one file to be read from top to bottom.

    python examples/train_small.py
    torchrun --standalone --nproc-per-node 2 examples/train_small.py --sharding zero2 --output outputs/small-2

The order is that of `llava-fsdp train`: data, model, sharding, step, checkpoint, export. The parts come from the
package, and what connects them is written out here. docs/architecture.md says where each part is. With one recipe both
programs give the same losses and weights, bit for bit (tests/train/test_train_small.py). This file leaves out what
makes a run safe, fast and observable: checks before the first step, worker processes, saves between steps, resuming,
skipped steps, signals, metrics, validation.

Sizes in comments: T tokens of a packed row, I image tokens in it, L labels in it, H width of the language model.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import llava_fsdp
from llava_fsdp.checkpoint.saver import SavedState, Saver
from llava_fsdp.config import Config
from llava_fsdp.data.batching.batch import MicroBatch, StepFacts
from llava_fsdp.data.batching.collate import Row
from llava_fsdp.data.batching.cost_model import CostModel
from llava_fsdp.data.batching.packing import pack_step
from llava_fsdp.data.batching.sampler import open_sampler
from llava_fsdp.data.batching.step_dataset import Steps
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.data.images.preprocess import ImageReader, read_preprocessor
from llava_fsdp.data.index.examine.bad_records import open_records
from llava_fsdp.data.loader import Loader
from llava_fsdp.data.text.chat_template.jinja_template import open_template
from llava_fsdp.data.text.encode import ExactEncoder
from llava_fsdp.data.text.tokens.tokenizer import open_tokenizer
from llava_fsdp.data.toy_shapes import draw_shapes
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.flops import count_flops
from llava_fsdp.model.llava.llava import build_llava
from llava_fsdp.model.load_weights import find_weights, fingerprint, load_weights, weight_digests
from llava_fsdp.model.packed_attention.attention import choose_kernel
from llava_fsdp.model.sources.pretrained import find_parts
from llava_fsdp.parallel.apply import apply_parallelism
from llava_fsdp.parallel.local_shards import local_shards
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.precision.precision import DTYPES, MasterWeights
from llava_fsdp.parallel.ranks.consensus import on_first_rank
from llava_fsdp.parallel.ranks.mesh import distributed, first_rank_first, gather_lists
from llava_fsdp.parallel.sharding_strategies import begin_micro_batch
from llava_fsdp.runtime.text.progress import watch_silently
from llava_fsdp.train.checkpoints.checkpoint_contents import facts_of, tensors
from llava_fsdp.train.final_export import export
from llava_fsdp.train.gradients import clip_gradients
from llava_fsdp.train.optimizer import build_optimizer
from llava_fsdp.train.state import TrainState

RECIPE = [
    "model=tiny",  # two million parameters with random weights
    "model.projector=random",  # without stage 1, which trains the projector alone
    "precision=fp32",  # bf16 computes in 16 bits, and keeps the weights that it updates in fp32
    "compile=false",
    "pack=true",
    "data.max_length=512",
    "tokens_per_micro_batch=512",  # so few that a step has several micro-batches
    "data.workers=0",
    "export.dtype=fp32",
]
"""Keys of `llava-fsdp train stage=finetune`. This file does what they say, and not what every other value says."""


# Data: from records to the micro-batches of a step


def open_data(cfg: Config, model: Architecture, parallelism: Parallelism) -> Loader:
    """Open the dataset, and what turns its records into tensors. Collective: all ranks must call it."""
    with first_rank_first(parallelism.world):
        draw_shapes(cfg.data)  # generates the built-in dataset; does nothing for any other
    parts = model.parts
    # The number of tokens of an image is known before the model runs, so token ids have their final length here.
    rule = ImageTokens.of_config(cfg, model.image_size, model.image_tokens)
    image_reader = ImageReader(
        Path(cfg.data.images or ""), read_preprocessor(parts.vision_folder), rule, cfg.data.pixels
    )
    tokenizer = open_tokenizer(parts.language_folder, model.language_config.vocab_size)
    template = open_template(cfg.data.template, parts.language_folder, tokenizer)
    # The encoder marks labels while it tokenizes: exactly the answers, and what ends them.
    encoder = ExactEncoder(
        tokenizer, template, image_reader.image_rows, cfg.data.max_length, cfg.data.too_long,
        special_tokens=cfg.trained_special_tokens,
    )  # fmt: skip
    # The index, made at first use, has the number of tokens, labels and tiles of every record. With it all ranks make
    # the same plan for a step without reading a record or asking each other.
    records = open_records(cfg, encoder, image_reader, watch_silently)
    cost = CostModel(*count_flops(model, activation_checkpointing=False))
    group = parallelism.row_group
    sampler = open_sampler(records, cfg, group.count)
    steps = Steps(records, sampler, encoder, image_reader, cfg, group.number, group.count, cost)
    return Loader(steps, cfg, parallelism.device)


def micro_batches_of(step: int, steps: Steps, cfg: Config) -> list[MicroBatch]:
    """Read this rank's samples of a step, and lay them out as tensors. The trainer does this in worker processes, some
    steps ahead (`Steps.prepare`).

    A micro-batch is one row of T tokens: several samples, one after the other. This does not change the maths, because
    positions count from 0 in each sample, a token attends only to earlier tokens of its own sample, and the loss is a
    sum over labels. It saves the work on padding.
    """
    # A step is a set of samples that depends on the seed and the step alone. How they are divided into ranks and rows
    # changes the result only by rounding.
    records, numbers = steps.records, np.array(steps.sampler.samples(step))
    lengths, labels = records.lengths[numbers], records.labels[numbers]
    costs = steps.cost(lengths, labels, records.tiles[numbers])
    # Ranks get equal work, and the same number of micro-batches: in each one they wait for each other in FSDP's
    # collectives. A rank without samples for a micro-batch runs one of a single token without a label.
    plan = pack_step(lengths.tolist(), costs.tolist(), steps.world_size, cfg.row_tokens)[steps.rank]

    def read(number: int) -> Row:
        record = records[number]
        sample = steps.encoder(record)
        assert sample is not None, "a sample that is too long is truncated"
        return sample, [steps.image_reader.tiles(record, name) for name in sample.images]

    # The collator sets the factor of each loss to 1 / labels of the step on all ranks. A mean over each rank's own
    # labels would give a label more weight on a rank with few labels, and the result would depend on the division.
    facts = StepFacts(step, samples=len(numbers), label_tokens=int(labels.sum()))
    total = len(plan) * steps.world_size
    return [steps.collate([read(int(numbers[place])) for place in micro], facts, total) for micro in plan]


# Model and sharding


def build_state(cfg: Config, parallelism: Parallelism) -> TrainState:
    """Build the model, its shards with their first weights, and the optimizer. Collective: all ranks must call it."""
    world = parallelism.world
    parts, dtype = find_parts(cfg.model), DTYPES[cfg.precision.param_dtype]
    kernel = choose_kernel(cfg.attention, parts.language, world.device, dtype)  # keeps the samples of a row apart
    # On the meta device a model has shapes and no memory, so that no rank ever holds all weights. What is not in
    # model.train is frozen: here the vision tower.
    model = build_llava(parts, cfg.model, dtype, kernel, cfg.loss)
    loader = open_data(cfg, model, parallelism)
    # For each parameter a tensor in a file, or a rule by which it is drawn. A rank reads only the rows of its shard.
    sources = find_weights(model, parts, cfg.model, seed=cfg.seed)
    # A run is not continued with other data or other frozen weights than those it began with.
    digests = weight_digests(model, sources, world.rank, world.size, gather_lists)
    fingerprints = {**loader.steps.fingerprints(), "model": fingerprint(model, digests)}

    def load(model: Architecture, masters: MasterWeights) -> None:
        load_weights(sources, local_shards(model, masters))

    # Parallelism is applied from outside: the model's own code knows no ranks. Each block becomes a unit of FSDP. With
    # zero3 a rank holds a shard of each unit, gathers the unit's weights just before its forward pass, frees them, and
    # gathers them again for its backward pass. With zero2 they stay gathered from the forward pass to the end of the
    # backward pass. On one rank nothing is wrapped.
    applied = apply_parallelism(model, cfg, parallelism, load)
    optimizer, learning_rate = build_optimizer(model, applied.masters, cfg, loader.total_steps)
    return TrainState(
        model, applied.masters, optimizer, learning_rate, loader, parallelism, sources, fingerprints, digests
    )


# Step


def run_micro_batch(model: torch.nn.Module, micro: MicroBatch) -> torch.Tensor:
    """Run a micro-batch forward and backward. Return its part of the step's loss, float32 [].

    The vision tower makes features of tiles, float32 [tiles, 3, size, size]. The projector brings them to width H, and
    they replace the embeddings of I tokens, [T, H]. The language model runs, and the output layer computes logits for
    labels only, [L, vocabulary], some at a time.

    Every rank runs the projector, on an empty tensor if its samples have no image: the ranks reduce its gradients
    together, and would wait forever for one that left it out. The frozen vision tower has no gradients and is whole on
    every rank, so that a rank without images may leave it out.
    """
    loss = micro.scale * model(**micro.inputs)
    loss.backward()  # FSDP reduces the gradients of a unit as soon as they are complete, and frees its weights
    return loss.detach()


def train_step(state: TrainState, cfg: Config) -> float:
    """Run one optimizer step. Return its loss, the same on every rank. Collective: all ranks must call it."""
    lr = state.learning_rate.apply(state.optimizer, state.step)
    loader, plan = state.loader, state.parallelism.plan
    micro_batches = micro_batches_of(state.step, loader.steps, cfg)
    loss_sum = torch.zeros((), device=loader.device)
    for number, micro in enumerate(micro_batches, start=1):
        # zero0 and zero1 reduce gradients and free weights only in the last micro-batch
        begin_micro_batch(state.model, plan, is_last=number == len(micro_batches))
        loss_sum += run_micro_batch(state.model, loader.to_device(micro))
    # FSDP adds gradients over ranks and is told not to average them, as each loss is divided by the labels of all ranks
    # already. So the loss of the step is a sum over ranks, too.
    norm = clip_gradients(state.masters, cfg.optim.clip)
    if dist.is_initialized():
        dist.all_reduce(loss_sum)
    loss = loss_sum.item()
    assert math.isfinite(loss) and math.isfinite(norm.item()), f"step {state.step + 1}: loss {loss}, norm {norm}"
    state.optimizer.step()  # each rank updates its own shards, for which alone it has moments
    state.masters.refresh()  # in bf16 on one rank, where the weights that compute are copies of those in fp32
    state.masters.free_gradients()
    state.samples += len(loader.steps.sampler.samples(state.step))
    state.step += 1
    if state.parallelism.is_first:
        print(f"step {state.step:4}  loss {loss:.4f}  gradient norm {norm:.3f}  lr {lr:.2e}", flush=True)
    return loss


# Checkpoint and export


def save(state: TrainState, cfg: Config) -> None:
    """Save the trained weights, their moments and the counters as `llava-fsdp train` does. Collective: all ranks must
    call it.

    Each rank writes the rows that it holds, with digests. The folder gets its name after the files have been read back,
    so that a folder with this name is whole, whenever the process dies. The place in the data is the number of the
    step. Frozen weights are not saved.
    """
    saved = SavedState(lambda: tensors(state), lambda: facts_of(state, cfg))
    saver = Saver(Path(cfg.output_dir) / "checkpoints", cfg.checkpoint, saved)
    saver.save()  # in a thread, beside further steps if there were any
    saver.close()


# The whole


def train(cfg: Config) -> list[float]:
    """Train from records to the export. Return the loss of each step. Collective: all ranks must call it."""
    folder = Path(cfg.output_dir)
    with distributed(cfg) as world:  # joins the process group that torchrun describes; a single rank has none
        on_first_rank(lambda: folder.mkdir(parents=True), f"cannot make {folder}, which must be a new folder")
        state = build_state(cfg, Parallelism.of(cfg, world))
        state.model.train()
        losses = [train_step(state, cfg) for _ in range(state.loader.total_steps)]
        save(state, cfg)
        # Gathers one weight at a time, writes transformers' LLaVA, and compares its logits with those of this model.
        exported = export(state, cfg, world.is_first)
        if world.is_first:
            print(f"the model is in {exported}")
    return losses


def words_of(flags: argparse.Namespace) -> list[str]:
    """Return the keys of `llava-fsdp train stage=finetune` for the flags of this program."""
    words = [*RECIPE, f"output_dir={flags.output}", f"max_steps={flags.steps}", f"sharding={flags.sharding}"]
    if flags.records is not None:
        words += ["data=llava_json", f"data.path={flags.records}", f"data.images={flags.images}"]
    return words


def parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(description="Trains a small LLaVA in one file.")
    own.add_argument("--records", help="JSON file in LLaVA's form (default: generated images of shapes)")
    own.add_argument("--images", default=".", help="folder of the images of --records")
    own.add_argument("--output", default="outputs/small", help="folder for the checkpoint and the export")
    own.add_argument("--steps", type=int, default=100)
    own.add_argument("--sharding", default="zero3", choices=["zero0", "zero1", "zero2", "zero3"])
    return own


if __name__ == "__main__":
    train(llava_fsdp.compose("finetune", words_of(parser().parse_args())))
