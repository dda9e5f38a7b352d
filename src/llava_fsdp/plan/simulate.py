"""One optimizer step on one rank, walked through with a ledger: what is held when, and the worst moment.

The order of what is gathered, freed and reduced is FSDP2's own: `pre_forward`, `wait_for_unshard`, `pre_backward` and
`post_backward` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py. Every block is walked through, so that the
worst moment is found and not guessed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from llava_fsdp.distributed.zero import ShardPlan, Sync
from llava_fsdp.plan.activations import LEVELS, Live, Segment
from llava_fsdp.plan.fsdp_units import NORMS, ROOT, Unit

CATEGORIES = ("parameters", "gradients", "optimizer", "gathered", "reducing", "activations", "logits", "buffers")


@dataclass
class Ledger:
    """Bytes held now, by category, and at the worst moment so far."""

    held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    worst: dict[str, int] = field(default_factory=dict)
    moment: str = ""

    most: int = 0

    def look(self, moment: str, **more: int) -> None:
        """Is this the worst moment? `more` is held for this moment alone."""
        total = sum(self.held.values()) + sum(more.values())
        if total > self.most:
            self.most, self.moment = total, moment
            self.worst = {name: size + more.get(name, 0) for name, size in self.held.items()}

    def add(self, moment: str, **sizes: int) -> None:
        for name, size in sizes.items():
            self.held[name] += size
        self.look(moment)

    def reach(self, level: Live) -> None:
        """What the passes hold now."""
        self.held["activations"], self.held["logits"] = level.activations, level.logits

    def drop(self, **sizes: int) -> None:
        for name, size in sizes.items():
            self.held[name] -= size
            assert self.held[name] >= 0, f"{name} below nothing"


@dataclass(frozen=True)
class Rest:
    """Bytes that a rank holds whatever runs."""

    parameters: int
    gradients: int
    """Of the shards, once a micro-batch has been reduced."""
    optimizer: int
    buffers: int
    """Computed buffers of the model, and a step's tensors."""
    updating: int = 0
    """Beside them, while the optimizer steps."""


Pass = Sequence[Segment]
"""Forward and backward of one micro-batch."""


def walk_one_rank(passes: Sequence[Pass], rest: Rest) -> Ledger:
    """A step where nothing is sharded: gradients go into masters one weight at a time."""
    ledger = Ledger()
    ledger.add("at rest", parameters=rest.parameters, optimizer=rest.optimizer, buffers=rest.buffers)
    for number, segments in enumerate(passes):
        for segment in segments:
            worst = segment.worst_later if number else segment.worst_first
            ledger.reach(worst)
            ledger.look(describe(segment), gradients=worst.gradients)
            ledger.reach(segment.end)
            if number == 0:
                ledger.held["gradients"] += segment.made_masters
    assert ledger.held["gradients"] == rest.gradients
    ledger.look("optimizer step", buffers=rest.updating)
    return ledger


def walk(
    passes: Sequence[Pass],
    units: dict[str, Unit],
    plan: ShardPlan,
    rest: Rest,
    unit_names: dict[str, str],
    prefetch: int | None = None,
) -> Ledger:
    """A step under FSDP.

    Args:
        unit_names: of blocks.
        prefetch: units that are gathered ahead explicitly; None: the next one, and in the backward pass alone.
    """
    ledger = Ledger()
    ledger.add("at rest", parameters=rest.parameters, optimizer=rest.optimizer, buffers=rest.buffers)
    rank = Rank(ledger, units, plan, unit_names, prefetch)
    for number, segments in enumerate(passes, start=1):
        rank.micro_batch(segments, is_last=number == len(passes))
    assert ledger.held["gradients"] == rest.gradients
    ledger.look("optimizer step", buffers=rest.updating)
    return ledger


class Rank:
    """What FSDP holds on a rank while segments run."""

    def __init__(
        self,
        ledger: Ledger,
        units: dict[str, Unit],
        plan: ShardPlan,
        unit_names: dict[str, str],
        prefetch: int | None,
    ):
        self.ledger = ledger
        self.units = units
        self.plan = plan
        self.unit_names = unit_names
        self.prefetch_forward, self.prefetch_backward = prefetch or 0, prefetch or 1
        self.gathered: set[str] = set()
        self.buffers: dict[str, int] = {}
        """All-gather buffers by unit, until they have been copied out; in the forward pass, one unit longer."""
        self.copied: str | None = None
        """The unit whose buffer has been copied out and is still there."""
        self.reduce_input = 0
        """Of the unit that was reduced last."""
        self.waiting: dict[str, int] = {}
        """Whole gradients in the reduction dtype, by unit."""
        self.shards: dict[str, int] = {}
        """Gradients of shards, by unit; where replicas are not reduced yet, in the reduction dtype."""
        self.root_made = 0
        """Gradients of the root unit's weights, which are reduced last."""

    def micro_batch(self, segments: Sequence[Segment], is_last: bool) -> None:
        forward = [s for s in segments if not s.backward]
        backward = [s for s in segments if s.backward]
        for name in (ROOT, NORMS):
            self.gather(name, "root unit")
        blocks, order = self.order(forward)
        for segment in forward:
            unit = self.unit_names.get(segment.unit, "")
            if blocks.get(unit, [""])[0] == segment.unit != "":
                self.gather(unit, describe(segment))
                for ahead in following(order, unit, self.prefetch_forward):
                    self.prefetch(ahead)
            self.run(segment)
            if blocks.get(unit, [""])[-1] == segment.unit != "" and self.plan.reshard_after_forward:
                self.free(unit)
        self.drop_buffers()
        blocks, order = self.order(backward)
        for ahead in order[:1]:  # the root unit's own prefetch is always FSDP2's
            self.prefetch(ahead)
        made_before = 0
        for segment in backward:
            unit = self.unit_names.get(segment.unit, "")
            if unit in blocks:
                if blocks[unit][0] == segment.unit:
                    self.prefetch(unit)
                    self.copy_out(unit, describe(segment))
                    for ahead in following(order, unit, self.prefetch_backward):
                        self.prefetch(ahead)
                self.run(segment)
                made = 0 if self.adds_in_place(unit) else segment.made
                if blocks[unit][-1] != segment.unit:
                    made_before += made
                    self.ledger.add(describe(segment), reducing=made)
                    continue
                self.ledger.drop(reducing=made_before)  # `finish` holds what it is given
                self.finish(unit, made_before + made, is_last, describe(segment))
                made_before = 0
            else:
                self.run(segment)
                made = 0 if self.adds_in_place(ROOT) else segment.made
                self.root_made += made
                self.ledger.add(describe(segment), reducing=made)
        self.finish(NORMS, 0, is_last, "end of backward")
        self.ledger.drop(reducing=self.root_made)  # `finish` holds what it is given
        self.finish(ROOT, self.root_made, is_last, "end of backward")
        self.ledger.drop(reducing=self.reduce_input)
        self.root_made = self.reduce_input = 0
        self.drop_buffers()

    def order(self, segments: Sequence[Segment]) -> tuple[dict[str, list[str]], list[str]]:
        """The blocks of every unit and the units, as they run."""
        blocks: dict[str, list[str]] = {}
        for segment in segments:
            unit = self.unit_names.get(segment.unit, "")
            if unit in self.units and unit and segment.unit not in blocks.setdefault(unit, []):
                blocks[unit].append(segment.unit)
        return blocks, list(blocks)

    def run(self, segment: Segment) -> None:
        """A segment's own worst moment, with what FSDP holds beside it."""
        worst = segment.worst_later if self.adds_in_place(self.unit_names.get(segment.unit, ROOT)) else segment.worst
        self.ledger.reach(worst)
        self.ledger.look(describe(segment), reducing=worst.gradients)
        self.ledger.reach(segment.end)

    def adds_in_place(self, name: str) -> bool:
        """Gradients of whole weights wait in the dtype that they are made in, so that autograd adds to them."""
        return name in self.waiting and self.units[name].widened == self.units[name].narrow

    def gather(self, name: str, moment: str) -> None:
        """Forward: the buffer of the unit before is kept until this one has been copied out."""
        if name in self.gathered or name not in self.units:
            return
        self.prefetch(name)
        self.copy_out(name, moment, keep=True)
        if self.copied is not None:
            self.ledger.drop(gathered=self.buffers.pop(self.copied))
        self.copied = name

    def prefetch(self, name: str) -> None:
        """Begin an all-gather."""
        unit = self.units.get(name)
        if unit is None or name in self.gathered or name in self.buffers:
            return
        self.buffers[name] = unit.buffer
        self.ledger.held["gathered"] += unit.buffer
        self.ledger.look(f"all-gather of {name or 'the root unit'}", gathered=unit.cast)

    def copy_out(self, name: str, moment: str, keep: bool = False) -> None:
        unit = self.units.get(name)
        if unit is None or name in self.gathered:
            return
        self.gathered.add(name)
        self.ledger.add(moment, gathered=unit.gathered)
        if not keep:
            self.ledger.drop(gathered=self.buffers.pop(name))

    def drop_buffers(self) -> None:
        self.ledger.drop(gathered=sum(self.buffers.values()))
        self.buffers.clear()
        self.copied = None

    def free(self, name: str) -> None:
        if name in self.gathered:
            self.gathered.remove(name)
            self.ledger.drop(gathered=self.units[name].gathered)

    def finish(self, name: str, made: int, is_last: bool, moment: str) -> None:
        """A unit's backward is done: its gradients are reduced, or kept for a later micro-batch."""
        unit = self.units.get(name)
        if unit is None:
            return
        own = 0 if self.adds_in_place(name) else made
        self.ledger.held["reducing"] += own
        self.ledger.look(moment)
        reduces = is_last or self.plan.gradient_sync is not Sync.LAST_MICRO_BATCH
        if is_last or self.plan.reshard_every_micro_batch:
            self.free(name)
        if not reduces:
            self.widen(name, own, moment)
            return
        self.ledger.drop(reducing=self.reduce_input)
        self.reduce_input = unit.reduce_input
        self.ledger.add(moment, reducing=unit.reduce_input)
        self.ledger.drop(reducing=own + self.waiting.pop(name, 0))
        self.ledger.look(moment, reducing=unit.reduce_output)
        waits = self.plan.gradient_sync is Sync.SCATTER_EVERY_REDUCE_LAST and not is_last
        held = self.shards.get(name, 0)
        self.shards[name] = unit.reduce_output if waits else unit.shard_gradients
        self.ledger.add(moment, gradients=self.shards[name] - held)

    def widen(self, name: str, own: int, moment: str) -> None:
        """Gradients in the compute dtype become gradients in the reduction dtype, weight by weight."""
        unit = self.units[name]
        if name in self.waiting:
            self.ledger.drop(reducing=own)
            return
        held = 0
        for wide, narrow in zip(unit.widened, unit.narrow, strict=True):
            self.ledger.look(moment, reducing=held + wide)
            held += wide - narrow
        self.waiting[name] = sum(unit.widened)
        self.ledger.held["reducing"] += self.waiting[name] - own


def following(order: Sequence[str], unit: str, count: int) -> Sequence[str]:
    """The next units."""
    place = order.index(unit)
    return order[place + 1 : place + 1 + count]


def describe(segment: Segment) -> str:
    where = segment.unit or "between the blocks"
    return f"{'backward' if segment.backward else 'forward'} of {where}"


def blend(one: Segment, other: Segment, part: float) -> Segment:
    """A segment of a micro-batch between two: bytes grow in proportion to positions."""

    def between(a: Live, b: Live) -> Live:
        return Live(*(round(x + part * (y - x)) for x, y in zip(parts_of(a), parts_of(b), strict=True)))

    return replace(one, **{name: between(getattr(one, name), getattr(other, name)) for name in LEVELS})


def parts_of(live: Live) -> tuple[int, int, int]:
    return live.activations, live.logits, live.gradients


def inputs_of_blocks(segments: Pass) -> dict[str, int]:
    """Bytes of each block's input, which are those of its output; of blocks that run backward."""
    backward = {s.unit for s in segments if s.backward}
    forward = [s for s in segments if s.unit in backward and s.unit and not s.backward]
    return {s.unit: max(0, s.end.activations - s.begin.activations) for s in forward}


def inputs_away(segments: Pass) -> Pass:
    """Blocks' inputs on the host, but for the one that runs and the one before it, whose copies are under way."""
    inputs = inputs_of_blocks(segments)
    found, entered = [], []
    for segment in segments:
        if segment.unit in inputs and not segment.backward:
            entered.append(segment.unit)
        away = sum(inputs[unit] for unit in entered[:-2])
        found.append(segment.moved(Live(activations=-away), segment.unit))
        if segment.unit in inputs and segment.backward:
            entered.remove(segment.unit)
    return found
