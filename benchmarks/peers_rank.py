"""One rank of one peer of peers.py, which starts it: it builds its training and runs rounds of steps when told to.

    torchrun --standalone --nproc-per-node 2 benchmarks/peers_rank.py PLAN.json

Nothing of this project is imported by a peer that is not ours, but by "by hand, our model", which is there to be
compared with our loop.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file


class Rounds:
    """Runs the rounds of steps that peers.py asks for, and sends it each round's seconds, losses and gradient norms.

    A training takes a round's steps from an iterator. The clock starts when all ranks are ready for the round's first
    step, and stops when the training asks for a step after its last. So whatever it does between two steps is counted.
    """

    def __init__(self, plan: dict[str, Any]):
        self.is_alone = not dist.is_initialized()
        self.rank = 0 if self.is_alone else dist.get_rank()
        self.number = plan["rounds"]
        self.losses: list[torch.Tensor | float] = []
        self.norms: list[torch.Tensor | float] = []
        self.client = Client(plan["address"], authkey=bytes.fromhex(plan["key"]))
        self.client.send((plan["peer"], self.rank))

    def steps(self, prepared: dict[str, list[Any]]) -> Iterator[Any]:
        """The steps of every round, as they are asked for.

        Args:
            prepared: the steps of each data set. A round takes as many as peers.py says, from the first.
        """
        for _ in range(self.number):
            data, count = self.client.recv()
            own = prepared[data][:count]
            gc.collect()
            if not self.is_alone:
                dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            yield from own
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            seconds = {"cpu": cpu, "wall": wall}
            self.client.send(seconds | {"losses": floats(self.losses), "norms": floats(self.norms)})
            self.losses.clear()
            self.norms.clear()


def floats(values: list[torch.Tensor | float]) -> list[float]:
    return [float(v) for v in values]


# Ours


def run_ours(plan: dict[str, Any], cfgs: dict[str, Any], change: Callable[[str, Any], None] | None = None) -> None:
    """`fit` with everything that `train` gives it: reports, heartbeats, votes and a saver.

    Args:
        cfgs: the configuration of each data set; the first is that of the training.
        change: called with the name of each data set and its loader, before steps are prepared.
    """
    from llava_fsdp.parallel.parallelism import Parallelism
    from llava_fsdp.parallel.ranks import mesh as ranks
    from llava_fsdp.runtime.files.run_dir import claiming_folder
    from llava_fsdp.runtime.process.watchdog import Watchdog
    from llava_fsdp.train.events.gc_schedule import GarbageCollection
    from llava_fsdp.train.events.reporting.reports import Reports, open_reports
    from llava_fsdp.train.events.run_events import EventList, RunEvents
    from llava_fsdp.train.events.save_and_stop import RunController, open_saver
    from llava_fsdp.train.loop import fit
    from llava_fsdp.train.setup.build_state import build_state
    from llava_fsdp.train.state import StepResult

    cfg = cfgs[plan["data"][0]]
    folder = Path(cfg.output_dir)
    with (
        claiming_folder(folder, ranks.own_rank(), cfg.private),
        Watchdog(folder, ranks.own_rank(), cfg.comm.timeout, cfg.comm.warn_after) as watchdog,
        ranks.distributed(cfg) as world,
        watchdog.watching_peers(ranks.rank_identities()),
    ):
        state = build_state(cfg, Parallelism.of(cfg, world))
        last = state.loader.total_steps
        reports = open_reports(state, cfg) if world.is_first else Reports()
        steps = prepared_steps(cfgs, world, state.model, plan, change)
        rounds = Rounds(plan)
        state.loader = kept(state.loader, rounds.steps(steps))
        controller = RunController(state, open_saver(state, cfg), cfg, last, watchdog)

        class Noted(RunEvents):
            def after_step(self, result: StepResult) -> None:
                rounds.losses.append(result.loss)
                rounds.norms.append(result.grad_norm)

        events = EventList([reports, controller, Noted(), GarbageCollection(cfg.gc_every)])
        with watchdog.steps():
            fit(state, cfg, events, watchdog)


def ours_configured(plan: dict[str, Any], pack: bool) -> dict[str, Any]:
    """Our configuration for each data set."""
    import argparse

    from peers_data import configure

    options = argparse.Namespace(**plan["options"])
    return {data: configure(Path(plan["work"]), data, pack, options) for data in plan["data"]}


def prepared_steps(
    cfgs: dict[str, Any], world: Any, model: Any, plan: dict[str, Any], change: Callable[[str, Any], None] | None = None
) -> dict[str, list[Any]]:
    """Every data set's steps as our loader prepares them, out of what is timed."""
    from peers_data import Fixed

    from llava_fsdp.train.setup.build_state import open_data

    prepared, steps = {}, plan["options"]["steps"]
    for data, cfg in cfgs.items():
        loader = open_data(cfg, world, model)
        loader.steps.sampler = Fixed(steps, "ours", plan["options"]["ranks"], plan["options"]["rows"])
        if change is not None:
            change(data, loader)
        prepared[data] = [loader.steps.prepare(n) for n in range(steps)]
    return prepared


def kept(loader: Any, steps: Iterator[Any]) -> Any:
    """The loader, with steps that have been prepared."""
    from llava_fsdp.data.loader import Loader

    class Kept(Loader):
        def __init__(self) -> None:
            vars(self).update(vars(loader))

        def steps_from(self, first: int, give_up: Any = None) -> Iterator[Any]:
            return steps

    return Kept()


# Loops as somebody writes them by hand


def run_by_hand_ours(plan: dict[str, Any]) -> None:
    """Our model, our packed micro-batches, our weights, and a loop of ten lines: what the trainer adds is the rest."""
    from llava_fsdp.model.load_weights import find_weights, load_weights
    from llava_fsdp.model.sources.pretrained import find_parts
    from llava_fsdp.model.weights.init_weights import computed_buffers, restore_buffers
    from llava_fsdp.parallel.local_shards import local_shards
    from llava_fsdp.parallel.precision.precision import MasterWeights
    from llava_fsdp.parallel.ranks.mesh import distributed
    from llava_fsdp.train.setup.build_model import build_model
    from llava_fsdp.train.setup.build_state import open_data

    cfgs = ours_configured(plan, pack=True)
    cfg = cfgs[plan["data"][0]]
    with distributed(cfg) as world:
        parts = find_parts(cfg.model)
        model = build_model(cfg, parts, world.device)
        loader = open_data(cfg, world, model)
        sources, buffers = find_weights(model, parts, cfg.model, seed=cfg.seed), computed_buffers(model)
        shard_by_hand(model, model.language_model.layers, set(model.vision_tower.parameters()))
        model.to_empty(device=world.device)
        trained = MasterWeights({n: p for n, p in model.named_parameters() if p.requires_grad})
        load_weights(sources, local_shards(model, trained))
        restore_buffers(model, buffers)
        steps = prepared_steps(cfgs, world, model, plan)

        def losses(step: Any) -> Iterator[torch.Tensor]:
            for micro in step.micro_batches:
                micro = loader.to_device(micro)
                yield micro.scale * model(**micro.inputs)

        loop_by_hand(plan, model, Rounds(plan), steps, losses)


def run_by_hand(plan: dict[str, Any]) -> None:
    """transformers' model, padded, under `fully_shard`: what PyTorch's own tutorial does."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=plan["timeout"]))
    model = transformers_model(plan)
    shard_by_hand(model, model.model.language_model.layers, set(model.model.vision_tower.parameters()))
    loop_by_hand(plan, model, Rounds(plan), transformers_steps(plan), lambda step: iter([model(**step).loss]))
    end_process_group()


def shard_by_hand(model: Any, layers: Any, whole: set[torch.nn.Parameter]) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in layers:
        fully_shard(layer)
    fully_shard(model, ignored_params=whole)


def loop_by_hand(plan: dict[str, Any], model: Any, rounds: Rounds, steps: dict[str, list[Any]], losses: Any) -> None:
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **plan["adamw"])
    for step in rounds.steps(steps):
        total = torch.zeros(())
        for loss in losses(step):
            (loss * dist.get_world_size()).backward()  # FSDP2 averages over the ranks, and the step's loss is a sum
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(trained, plan["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        rounds.losses.append(float(total))
        rounds.norms.append(float(norm.full_tensor()))


# transformers' model


def transformers_model(plan: dict[str, Any], attention: str = "sdpa") -> Any:
    """In fp32; the tower is frozen, and has SDPA."""
    from transformers import LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(
        str(Path(plan["work"]) / "weights"),
        dtype=torch.float32,
        attn_implementation={"text_config": attention, "vision_config": "sdpa"},
    )
    model.model.vision_tower.requires_grad_(False)
    return model


def transformers_steps(plan: dict[str, Any], with_count: bool = True) -> dict[str, list[dict[str, Any]]]:
    """By data set, this rank's micro-batch of every step as arguments of the model.

    Args:
        with_count: of the labels that the loss of the whole step is divided by; HF's Trainer counts for itself.
    """
    steps: dict[str, list[dict[str, Any]]] = {}
    for data in plan["data"]:
        tensors = load_file(Path(plan["work"]) / "samples" / data / f"rank{dist.get_rank()}.safetensors")
        fields = ("input_ids", "attention_mask", "labels", "pixel_values")
        steps[data] = [
            {name: tensors[f"{number}.0.{name}"] for name in fields}
            | ({"num_items_in_batch": tensors[f"{number}.label_tokens"]} if with_count else {})
            for number in range(plan["options"]["steps"])
        ]
    return steps


def trainer_arguments(plan: dict[str, Any], name: str) -> dict[str, Any]:
    """The arguments of transformers' Trainer and of TRL's."""
    optimizer = plan["adamw"]
    return {
        "output_dir": str(Path(plan["work"]) / "runs" / name),
        "max_steps": plan["rounds"] * plan["options"]["steps"] + 1,  # one more is asked for, and there is none
        "learning_rate": optimizer["lr"], "lr_scheduler_type": "constant", "weight_decay": optimizer["weight_decay"],
        "adam_beta1": optimizer["betas"][0], "adam_beta2": optimizer["betas"][1], "adam_epsilon": optimizer["eps"],
        "optim": "adamw_torch_fused", "max_grad_norm": plan["clip"], "use_cpu": True, "logging_strategy": "no",
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False, "dataloader_pin_memory": False,
    }  # fmt: skip


def stream_of(steps: Iterator[Any]) -> torch.utils.data.DataLoader:
    """A loader of what is cut over the ranks already."""

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return steps

    return torch.utils.data.DataLoader(Stream(), batch_size=None)


def run_hf(plan: dict[str, Any]) -> None:
    """transformers' Trainer, which is DDP on a CPU: accelerate takes FSDP for accelerators alone."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**trainer_arguments(plan, "hf"))  # makes the process group
    rounds = Rounds(plan)
    steps = rounds.steps(transformers_steps(plan, with_count=False))

    class MeasuredTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return stream_of(steps)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            rounds.losses.append(loss)  # of this rank, times the ranks
            return loss

        def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
            norm = super()._get_grad_norm(*args, **kwargs)
            rounds.norms.append(norm)
            return norm

    MeasuredTrainer(transformers_model(plan), arguments).train()
    end_process_group()


def run_deepspeed(plan: dict[str, Any], activation_checkpointing: bool = False) -> None:
    """DeepSpeed's engine around transformers' model."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=plan["timeout"]))
    model = transformers_model(plan)
    if activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **plan["adamw"])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=plan["deepspeed"])
    rounds = Rounds(plan)
    for step in rounds.steps(transformers_steps(plan)):
        loss = engine(**step).loss
        engine.backward(loss * dist.get_world_size())  # it averages over the ranks
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        rounds.losses.append(float(total))
        rounds.norms.append(float(engine.get_global_grad_norm()))
    end_process_group()


def end_process_group() -> None:
    """Close the process group once all ranks are done."""
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    time.sleep(0.2)  # gloo's thread may abort the interpreter otherwise (pytorch#179291)


def packed(name: str) -> Any:
    """A function of peers_packed.py, which imports this module."""

    def run(plan: dict[str, Any]) -> None:
        import peers_packed

        getattr(peers_packed, f"run_{name}")(plan)

    return run


PEERS = {
    "ours packed": lambda plan: run_ours(plan, ours_configured(plan, pack=True)),
    "ours padded": lambda plan: run_ours(plan, ours_configured(plan, pack=False)),
    "by hand, our model": run_by_hand_ours,
    "by hand": run_by_hand,
    "hf": run_hf,
    "zero2": run_deepspeed,
    "zero3": run_deepspeed,
    "original": lambda plan: run_deepspeed(plan, activation_checkpointing=True),
    "rows": packed("filled_rows"),
    "row": packed("one_row"),
    "trl": packed("trl"),
    "automodel": packed("automodel"),
}


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt):
        PEERS[plan["peer"]](plan)


if __name__ == "__main__":
    main()
