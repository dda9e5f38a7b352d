"""Simulate one optimizer step on one rank: the bytes in device memory at every moment, and the moment with the most.

Gathers, frees and reductions happen in FSDP2's order: `pre_forward`, `wait_for_unshard`, `pre_backward` and
`post_backward` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py. Every block is simulated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from llava_fsdp.config import ShardingConfig
from llava_fsdp.parallel.memory.memory import NORMS, OUTPUT, ROOT, unit_of_experts
from llava_fsdp.parallel.sharding_strategies import ShardPlan, Sync
from llava_fsdp.plan.memory.activations import LEVELS, Live, PassSegment
from llava_fsdp.plan.memory.fsdp_units import Unit

CATEGORIES = ("parameters", "gradients", "optimizer", "gathered", "reducing", "activations", "logits", "buffers")


@dataclass
class Ledger:
    """Simulated bytes in device memory by category: now (`held`), and at the highest peak so far (`worst`). In all
    methods, `moment` names the present moment, such as `forward of model.layers.3`, for the report of the peak."""

    held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    worst: dict[str, int] = field(default_factory=dict)
    moment: str = ""
    """Name of the moment of the highest peak so far."""
    most: int = 0

    def note_peak(self, moment: str, **more: int) -> None:
        """Record this moment as the peak if it has more bytes than all before it. `more`: bytes, by category, that
        exist only at this moment, on top of those that are held."""
        total = sum(self.held.values()) + sum(more.values())
        if total > self.most:
            self.most, self.moment = total, moment
            self.worst = {name: size + more.get(name, 0) for name, size in self.held.items()}

    def add(self, moment: str, **sizes: int) -> None:
        """Add bytes, by category, to those held from now on. `moment`: name of this moment for the highest peak."""
        for name, size in sizes.items():
            self.held[name] += size
        self.note_peak(moment)

    def set_live(self, level: Live) -> None:
        """Set the bytes of activations and logits that are held to those of `level`. The gradients of `level` are not
        used: they are counted apart."""
        self.held["activations"], self.held["logits"] = level.activations, level.logits

    def drop(self, **sizes: int) -> None:
        """Subtract bytes, by category, from what is held."""
        for name, size in sizes.items():
            self.held[name] -= size
            assert self.held[name] >= 0, f"{name} is negative"

    def finish(self, states: "States") -> None:
        """Note the memory of the optimizer's step, which ends the simulated training step. By then the ledger
        must hold `states.gradients`, no more and no less."""
        assert self.held["gradients"] == states.gradients
        self.note_peak("optimizer step", buffers=states.updating)


@dataclass(frozen=True)
class States:
    """Bytes that a rank holds on its device throughout a step."""

    parameters: int
    gradients: int
    """Bytes of the gradients of this rank's shards, once those of all weights have been reduced."""
    optimizer: int
    buffers: int
    """The model's registered buffers, and the inputs that are on the device for the whole step."""
    updating: int = 0
    """Temporary buffers during the optimizer's step."""
    inputs: tuple[int, ...] = ()
    """For each pass, bytes of the inputs that are on the device until the next pass begins."""

    def open_ledger(self) -> Ledger:
        """Return a ledger with what is held when a step begins, before any gradient exists."""
        ledger = Ledger()
        ledger.add("at rest", parameters=self.parameters, optimizer=self.optimizer, buffers=self.buffers)
        return ledger

    def begin_pass(self, ledger: Ledger, number: int) -> None:
        """Replace the inputs of the previous micro-batch by those of micro-batch `number`, counted from 0."""
        ledger.held["buffers"] = self.buffers + self.inputs[number]


Pass = Sequence[PassSegment]
"""Memory of the forward and backward pass of one micro-batch, as consecutive segments."""


def simulate_unsharded_step(passes: Sequence[Pass], states: States) -> Ledger:
    """Simulate the device memory of one rank in a training step without FSDP. As soon as a gradient is complete, it is
    cast to the master weight's dtype, and added to that of earlier micro-batches. `passes`: for each micro-batch, the
    segments of both passes, with their memory peaks. `states`: bytes held throughout the step."""
    ledger = states.open_ledger()
    # gradients that no segment makes are sums which products add to (`precision.linear=fp32_sums`); they always exist
    ledger.add("at rest", gradients=states.gradients - sum(segment.master_gradient_bytes for segment in passes[0]))
    for number, segments in enumerate(passes):
        states.begin_pass(ledger, number)
        for segment in segments:
            # the peak of activations and new gradients: later micro-batches add theirs to those that exist
            peak = segment.peak_in_later_micro_batches if number else segment.peak_in_first_micro_batch
            ledger.set_live(peak)
            ledger.note_peak(describe(segment), gradients=peak.gradients)
            ledger.set_live(segment.end)
            if number == 0:
                ledger.held["gradients"] += segment.master_gradient_bytes  # in the dtypes of the master weights
    ledger.finish(states)
    return ledger


def simulate_step(
    passes: Sequence[Pass],
    units: dict[str, Unit],
    plan: ShardPlan,
    states: States,
    unit_names: dict[str, str],
    sharding: ShardingConfig,
) -> Ledger:
    """Simulate the device memory of one rank in a training step under FSDP. Return its bytes at the highest peak.

    Args:
        passes: for each micro-batch the segments of its forward and backward pass.
        units: the FSDP units by name.
        plan: the FSDP2 settings of the sharding strategy.
        states: what the rank holds throughout the step.
        unit_names: block name -> name of its FSDP unit.
        sharding: says how many units are gathered ahead of their use, and reduced at the same time.
    """
    ledger = states.open_ledger()
    rank = FsdpRank(ledger, units, plan, unit_names, sharding)
    for number, segments in enumerate(passes, start=1):
        states.begin_pass(ledger, number - 1)
        rank.run_micro_batch(segments, is_last=number == len(passes))
    ledger.finish(states)
    return ledger


class FsdpRank:
    """Simulates FSDP on one rank: gathered weights, buffers and gradients while segments run."""

    def __init__(
        self,
        ledger: Ledger,
        units: dict[str, Unit],
        plan: ShardPlan,
        unit_names: dict[str, str],
        sharding: ShardingConfig,
    ):
        """Begin to simulate FSDP on one rank.

        Args:
            ledger: gets the bytes that the rank holds at each moment.
            units: the FSDP units by name; the weights of a unit are gathered and freed together.
            unit_names: block name -> name of its FSDP unit.
            sharding: says how many units are gathered ahead of their use, and reduced at the same time.
        """
        self.ledger = ledger
        self.units = units
        self.plan = plan
        self.unit_names = unit_names
        # without the key, FSDP2 gathers one unit ahead, in the backward pass only
        self.prefetch_forward, self.prefetch_backward = sharding.prefetch or 0, sharding.prefetch or 1
        self.reductions = sharding.reductions
        self.gathered: set[str] = set()
        self.buffers: dict[str, int] = {}
        """Bytes of each unit's all-gather buffer until it is copied into the weights; in the forward pass until the
        next unit is copied."""
        self.copied: str | None = None
        """The unit whose all-gather buffer has been copied into its weights but is not yet freed."""
        self.reduce_inputs: list[int] = []
        """Bytes of the input buffers of the most recent reduce-scatters, the oldest first; at most `reductions`."""
        self.waiting: dict[str, int] = {}
        """Unit -> bytes of whole gradients in the reduction dtype that wait for the step's last micro-batch."""
        self.shards: dict[str, int] = {}
        """Unit -> bytes of gradients of this rank's shards; in the reduction dtype until an all-reduce over
        replicas."""
        self.root_made = 0
        """Bytes of the existing gradients of the root unit, which FSDP reduces last."""
        self.kept_by_other_micro_batches = Live()
        """In a pipeline, what other micro-batches keep for their backward passes; it is held while a segment runs."""

    def run_micro_batch(self, segments: Sequence[PassSegment], is_last: bool) -> None:
        """Simulate the forward and backward pass of a micro-batch. `is_last`: it is the last one of the step."""
        forward, backward = ([s for s in segments if s.backward is of_backward] for of_backward in (False, True))
        self.run_forward(forward)
        with_backward = self.order(backward)[1]  # names of the units, in the order in which they run
        # units without a backward pass, the last first: FSDP prefetches in the reverse order of the forward pass
        forward_only = [name for name in reversed(self.order(forward)[1]) if name not in with_backward]
        self.run_backward(backward, is_last, forward_only)

    def run_forward(self, segments: Sequence[PassSegment]) -> None:
        """Simulate the forward pass of a micro-batch. The weights of an FSDP unit are gathered before its first block
        runs, and freed after its last block if the sharding strategy says so. A unit has one or more blocks of the
        model, and `segment.block` is the name of a block; experts of a block have a unit of their own."""
        # weights outside of blocks, and all norms that compute in fp32, have a unit each
        for name in (ROOT, NORMS):
            self.gather(name, "root unit")
        blocks, order = self.order(segments)  # names of the blocks of each unit; names of the units
        for segment in segments:
            unit = self.unit_names.get(segment.block, "")
            if segment.block == OUTPUT:
                self.gather(OUTPUT, describe(segment))
            # true if the segment is the first block of its unit
            if blocks.get(unit, [""])[0] == segment.block != "":
                self.gather(unit, describe(segment))
                for ahead in following(order, unit, self.prefetch_forward):
                    self.prefetch(ahead)
            for name in self.experts(segment):
                self.gather(name, describe(segment))
            self.run(segment)
            if self.plan.reshard_after_forward:
                # true if the segment is the last block of its unit
                is_end = blocks.get(unit, [""])[-1] == segment.block != ""
                for name in (*self.experts(segment), *[unit] * is_end):
                    self.free(name)
        self.drop_buffers()

    def run_backward(self, segments: Sequence[PassSegment], is_last: bool, forward_only: Sequence[str] = ()) -> None:
        """Simulate the backward pass of a micro-batch.

        Args:
            is_last: whether the micro-batch is the last one of the step.
            forward_only: units that ran forward but have no backward pass, because no gradient reaches them; the one
                that ran last stands first. FSDP prefetches them, too: the order of its prefetches is the reverse of
                the forward pass.
        """
        blocks, order = self.order(segments)  # names of the blocks of each unit; names of the units
        order = [*order, *forward_only]
        for ahead in order[:1]:  # FSDP2 always prefetches for the root unit
            self.prefetch(ahead)
        made_before = 0
        for segment in segments:
            unit = self.unit_names.get(segment.block, "")
            if unit not in blocks:  # the output layer, or what is between the blocks, whose weights the root unit has
                self.run(segment)
                if segment.block == OUTPUT and OUTPUT in self.units:
                    made = 0 if self.adds_in_place(OUTPUT) else segment.gradient_bytes
                    self.finish_unit(OUTPUT, made, is_last, describe(segment))
                    continue
                made = 0 if self.adds_in_place(ROOT) else segment.gradient_bytes
                self.root_made += made
                self.ledger.add(describe(segment), reducing=made)
                continue
            if blocks[unit][0] == segment.block:
                self.prefetch(unit)
                self.copy_out(unit, describe(segment))
                for ahead in following(order, unit, self.prefetch_backward):
                    self.prefetch(ahead)
            of_experts = self.run_with_experts(segment, is_last)
            made = 0 if self.adds_in_place(unit) else segment.gradient_bytes - of_experts
            # a unit of several blocks holds the gradients of those that have run until its last block has run
            if blocks[unit][-1] != segment.block:
                made_before += made
                self.ledger.add(describe(segment), reducing=made)
                continue
            self.ledger.drop(reducing=made_before)  # `finish_unit` adds it again
            self.finish_unit(unit, made_before + made, is_last, describe(segment))
            made_before = 0
        self.ledger.drop(reducing=self.root_made)  # `finish_unit` adds it again
        self.finish_unit(ROOT, self.root_made, is_last, "end of backward")
        self.finish_unit(NORMS, 0, is_last, "end of backward")  # 0: the blocks' `gradient_bytes` have its gradients
        self.ledger.drop(reducing=sum(self.reduce_inputs))
        self.reduce_inputs.clear()
        self.root_made = 0
        self.drop_buffers()

    def run_with_experts(self, segment: PassSegment, is_last: bool) -> int:
        """Run one block backward, with the FSDP unit of its experts if it has one. Return the bytes of the experts'
        gradients, which are among `segment.gradient_bytes` and must not be counted for the block's own unit again."""
        experts = self.experts(segment)
        for name in experts:
            self.prefetch(name)  # the all-gather's buffer; `copy_out` makes the weights of it
            self.copy_out(name, describe(segment))
        self.run(segment)
        made = {
            name: sum(self.units[name].backward_gradients) for name in experts
        }  # gradients in the backward pass's dtype
        for name, size in made.items():  # `finish_unit` reduces them
            self.finish_unit(name, 0 if self.adds_in_place(name) else size, is_last, describe(segment))
        return sum(made.values())

    def experts(self, segment: PassSegment) -> list[str]:
        """Return the name of the FSDP unit of experts in a segment, in a list; empty without experts."""
        name = unit_of_experts(segment.block)
        return [name] if name in self.units else []

    def order(self, segments: Sequence[PassSegment]) -> tuple[dict[str, list[str]], list[str]]:
        """Return, in running order, the block names of each FSDP unit (by unit name), and the names of the units."""
        blocks: dict[str, list[str]] = {}
        for segment in segments:
            unit = self.unit_names.get(segment.block, "")
            # the root unit has the empty name, and is no unit of blocks
            if unit in self.units and unit and segment.block not in blocks.setdefault(unit, []):
                blocks[unit].append(segment.block)
        return blocks, list(blocks)

    def run(self, segment: PassSegment) -> None:
        """Run one segment: note its peak together with the bytes that FSDP holds, then hold what the segment leaves,
        except its gradients: the caller adds them to the ledger."""
        unit = OUTPUT if segment.block == OUTPUT else self.unit_names.get(segment.block, ROOT)
        # autograd adds gradients in place if earlier ones wait in the same dtype: then no new ones are held
        peak = segment.peak_in_later_micro_batches if self.adds_in_place(unit) else segment.peak_with_fsdp
        self.ledger.set_live(peak + self.kept_by_other_micro_batches)
        self.ledger.note_peak(describe(segment), reducing=peak.gradients)
        self.ledger.set_live(segment.end + self.kept_by_other_micro_batches)

    def adds_in_place(self, name: str) -> bool:
        """Return whether autograd adds a unit's gradients in place to those of earlier micro-batches, so that they take
        no more memory: earlier ones wait, and the dtype in which they wait is that of the backward pass."""
        return name in self.waiting and self.units[name].kept_gradients == self.units[name].backward_gradients

    def gather(self, name: str, moment: str) -> None:
        """All-gather a unit's weights in the forward pass. FSDP frees the buffer of an all-gather only when the next
        unit's weights have been copied out of theirs, so two buffers exist at once."""
        if name in self.gathered or name not in self.units:
            return
        self.prefetch(name)
        self.copy_out(name, moment, keep=True)
        if self.copied is not None:
            self.ledger.drop(gathered=self.buffers.pop(self.copied))
        self.copied = name

    def prefetch(self, name: str) -> None:
        """Start the all-gather of a unit, unless it is gathered or under way. Does nothing if no unit has this name."""
        unit = self.units.get(name)
        if unit is None or name in self.gathered or name in self.buffers:
            return
        self.buffers[name] = unit.buffer
        self.ledger.held["gathered"] += unit.buffer
        self.ledger.note_peak(f"all-gather of {name or 'the root unit'}", gathered=unit.cast)

    def copy_out(self, name: str, moment: str, keep: bool = False) -> None:
        """Copy a unit's all-gather buffer, which `prefetch` has made, into its weights. At that moment, which `moment`
        names, the buffer and the weights exist, and another copy of weights that are sharded by columns. Then free the
        buffer, unless `keep` is set. Does nothing if the unit is gathered already, or no unit has this name."""
        unit = self.units.get(name)
        if unit is None or name in self.gathered:
            return
        self.gathered.add(name)
        self.ledger.note_peak(moment, gathered=unit.gathered + unit.second_copy)
        self.ledger.add(moment, gathered=unit.gathered)
        if not keep:
            self.ledger.drop(gathered=self.buffers.pop(name))

    def drop_buffers(self) -> None:
        """Free the all-gather buffers of all units, and forget which unit's buffer was copied last."""
        self.ledger.drop(gathered=sum(self.buffers.values()))
        self.buffers.clear()
        self.copied = None

    def free(self, name: str) -> None:
        """Free a unit's gathered weights, if it has any."""
        if name in self.gathered:
            self.gathered.remove(name)
            self.ledger.drop(gathered=self.units[name].gathered)

    def finish_unit(self, name: str, made: int, is_last: bool, moment: str) -> None:
        """Simulate the memory of the gradients of an FSDP unit (weights that are gathered and reduced together) from
        the end of its backward pass on: they are reduced over the ranks, or kept whole for a later micro-batch.

        Args:
            name: the unit's name.
            made: bytes of the gradients that the backward pass has produced. The ledger must not hold them yet.
            is_last: whether this is the step's last micro-batch.
            moment: name of this moment, as in `Ledger`.
        """
        unit = self.units.get(name)
        if unit is None:  # the strategy neither shards nor reduces any of these weights
            return
        added = 0 if self.adds_in_place(name) else made
        self.ledger.held["reducing"] += added
        self.ledger.note_peak(moment)
        reduces = is_last or self.plan.gradient_sync is not Sync.LAST_MICRO_BATCH
        if is_last or self.plan.reshard_every_micro_batch:
            self.free(name)
        if not reduces:
            self.keep_gradients(name, added, moment)  # they wait in the reduction dtype
            return
        while len(self.reduce_inputs) >= self.reductions:  # FSDP holds those of units before until now
            self.ledger.drop(reducing=self.reduce_inputs.pop(0))
        if unit.reduce_input:  # a frozen unit waits for those before it, and has none of its own
            self.reduce_inputs.append(unit.reduce_input)
        # bytes of each weight's gradient: in the reduction dtype if it has waited, else as the backward pass made it
        sizes = unit.kept_gradients if name in self.waiting else unit.backward_gradients
        # `foreach_reduce` replaces gradients of weights sharded along dimension 1 by copies, one after the other
        copied = [size for size, is_copied in zip(sizes, unit.is_copied, strict=True) if is_copied] or [0]
        self.ledger.note_peak(moment, reducing=max(copied))
        # Until `foreach_reduce` returns, its variable `chunks` holds the original of the last copy, `copied[-1]`. If
        # several ranks shard the unit (it then has a buffer), `unsharded_grad` holds the gradient of its last weight.
        last = sizes[-1] if sizes and unit.buffer and not unit.is_copied[-1] else 0
        self.ledger.add(moment, reducing=unit.reduce_input + copied[-1])
        self.ledger.drop(reducing=added + self.waiting.pop(name, 0))
        self.ledger.note_peak(moment, reducing=unit.reduce_output + last)
        self.ledger.drop(reducing=copied[-1])
        # a hybrid strategy keeps the reduce-scatter's output, and reduces it over replicas in the last micro-batch
        waits = self.plan.gradient_sync is Sync.SCATTER_EVERY_REDUCE_LAST and not is_last
        held = self.shards.get(name, 0)
        self.shards[name] = unit.waiting_output if waits else unit.shard_gradients
        self.ledger.add(moment, gradients=self.shards[name] - held)

    def keep_gradients(self, name: str, added: int, moment: str) -> None:
        """Count the memory of a unit's gradients that wait, unreduced, for the step's last micro-batch. FSDP casts
        those of the first one to the reduction dtype, one weight at a time, and adds those of later ones to them.
        `added`: bytes of this micro-batch's gradients in the dtype of the backward pass, which the ledger holds."""
        unit = self.units[name]
        if name in self.waiting:  # added to the gradients that wait, and freed
            self.ledger.drop(reducing=added)
            return
        held = 0  # by how much the gradients that have been cast have grown
        for kept, made in zip(unit.kept_gradients, unit.backward_gradients, strict=True):
            self.ledger.note_peak(moment, reducing=held + kept)
            held += kept - made
        self.waiting[name] = sum(unit.kept_gradients)
        self.ledger.held["reducing"] += self.waiting[name] - added


def following(order: Sequence[str], unit: str, count: int) -> Sequence[str]:
    """Return up to `count` names that come after `unit` in `order`, which contains it."""
    index = order.index(unit)
    return order[index + 1 : index + 1 + count]


def describe(segment: PassSegment) -> str:
    """Return the name of the moment at which a segment runs, such as `forward of model.layers.3`."""
    where = segment.block or "between the blocks"
    return f"{'backward' if segment.backward else 'forward'} of {where}"


def interpolate(first: PassSegment, second: PassSegment, share: float) -> PassSegment:
    """Estimate a segment's memory linearly between two micro-batches; a share of 0 gives `first`, 1 gives `second`."""

    def mix(a: int, b: int) -> int:
        return round(a + share * (b - a))

    def between(a: Live, b: Live) -> Live:
        return Live(mix(a.activations, b.activations), mix(a.logits, b.logits), mix(a.gradients, b.gradients))

    # LEVELS: the fields of a segment that count bytes
    return replace(first, **{name: between(getattr(first, name), getattr(second, name)) for name in LEVELS})


def inputs_of_blocks(segments: Pass) -> dict[str, int]:
    """Return {name of each transformer block that has a backward pass: bytes of the block's input}. `segments`: the
    segments of a forward and backward pass with activation checkpointing.

    A block's input is as large as its output. The output is what the forward pass of a checkpointed block leaves
    allocated, so that its bytes are the growth of the activations from the begin to the end of that segment.
    """
    outside_blocks = {"", OUTPUT}  # segments before and between the blocks, and the output layer
    with_backward = {s.block for s in segments if s.backward} - outside_blocks
    forward = [s for s in segments if s.block in with_backward and not s.backward]
    return {s.block: max(0, s.end.activations - s.begin.activations) for s in forward}


def inputs_on_host(segments: Pass) -> Pass:
    """Return a pass whose blocks' inputs are offloaded to host memory. At each moment the inputs of the two blocks that
    ran forward last, and not yet backward, still count: they are being copied."""
    inputs = inputs_of_blocks(segments)
    moved, entered = [], []
    for segment in segments:
        if segment.block in inputs and not segment.backward:
            entered.append(segment.block)
        away = sum(inputs[unit] for unit in entered[:-2])
        moved.append(segment.shifted(Live(activations=-away), segment.block))
        if segment.block in inputs and segment.backward:
            entered.remove(segment.block)
    return moved
