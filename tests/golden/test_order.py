"""Samples come in the original's order."""

from collections.abc import Callable

import pytest
import torch
from golden_folder import read_json

from llava_fsdp.data.batching.llava_samplers import (
    LlavaSampler,
    even_batches,
    even_chunks,
    group_by_length,
    group_by_modality,
)
from llava_fsdp.runtime.errors import ConfigError


def drawn(case: dict, lengths: list[int], process: torch.Generator) -> list[list[int]]:
    """The case's epochs."""
    seed = case["generator_seed"]
    own = torch.Generator() if seed == "default" else torch.Generator().manual_seed(seed or 0)
    own = process if seed is None else own
    shape = case["batch_size"], case["world_size"]
    if case["fn"] == "get_length_grouped_indices":
        return [group_by_length(lengths, *shape, own)]
    return [group_by_modality(lengths, *shape, own, process) for _ in case.get("epochs", [0])]


def test_samplers(count: Callable) -> None:
    golden = read_json("sampler.json")
    for case in golden["cases"]:
        plain = case["fn"] == "get_length_grouped_indices"
        lengths = golden["positive_lengths_for_plain_grouping" if plain else "lengths"][case["lengths"]]
        if "exception" in case:
            with pytest.raises(ConfigError, match=f"record {lengths.index(0)} has no words"):
                LlavaSampler(lengths, case["batch_size"], 1, case["world_size"], case["seed"], grouped=True)
            count("sampler", "refused as the original stops")
            continue
        process = torch.Generator().manual_seed(case["seed"])
        assert drawn(case, lengths, process) == (case.get("epochs") or [case["indices"]])
        following = int(torch.randint(0, 2**62, (1,), generator=process))
        assert following == case["next_global_randint_2_62"], "as many random numbers were drawn"
        count("sampler", "equal")


def test_even_chunks(count: Callable) -> None:
    for case in read_json("sampler.json")["split_to_even_chunks"]:
        assert even_chunks(case["indices"], case["lengths"], case["num_chunks"]) == case["out"]
        count("even chunks", "equal")


def test_batches_of_ranks(count: Callable) -> None:
    for case in read_json("sampler.json")["accelerate_sharding"]:
        if case["drop_last"]:
            count("batches of ranks", "not compared: drop_last, which the original never sets")
            continue
        assert even_batches(case["order"], case["batch_size"], case["world_size"]) == case["ranks"]
        count("batches of ranks", "equal")
