"""The example of tests/README.md: two ranks compute what one process computes."""

import pytest
from harness import RankPool, single_world
from small import Configure
from steps import traces


@pytest.mark.ranks
def test_two_ranks_have_the_losses_and_gradient_norms_of_one_process(
    configure: Configure, pools: dict[int, RankPool]
) -> None:
    cfg = configure("sharding=zero3", "global_batch_size=4", "max_steps=2")
    ((losses, norms, _),) = traces(single_world(), [cfg])
    for ((found, found_norms, _),) in pools[2].run(traces, [cfg]):
        assert found == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-4)
