"""Weights that are drawn depend on the seed and their name, and not on how they are cut."""

import torch

from llava_fsdp.model.draw import Drawn, DrawRule, Rule

NORMAL = DrawRule(Rule.NORMAL, 0.5)


def test_a_shard_is_rows_of_the_whole_and_every_name_has_values_of_its_own() -> None:
    whole = Drawn("a.weight", (7, 3), NORMAL, 1).rows(0, 7)
    assert torch.equal(Drawn("a.weight", (7, 3), NORMAL, 1).rows(2, 5), whole[2:5])
    assert not torch.equal(Drawn("b.weight", (7, 3), NORMAL, 1).rows(0, 7), whole)
    assert not torch.equal(Drawn("a.weight", (7, 3), NORMAL, 2).rows(0, 7), whole)
