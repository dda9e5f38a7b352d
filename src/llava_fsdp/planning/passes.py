"""Passes that follow from measured ones: of a micro-batch between two, and with blocks' inputs on the host."""

from dataclasses import replace

from llava_fsdp.planning.activations import LEVELS, Live, Segment
from llava_fsdp.planning.step import Pass


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
