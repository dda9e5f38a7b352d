"""Steps of a loader, for tests that run no training."""

from collections.abc import Iterator

from llava_fsdp.data.batching.batch import Step
from llava_fsdp.data.loader import Loader


def agreed_steps(loader: Loader, first: int = 0) -> Iterator[Step]:
    """The steps from `first` on, as every rank sees them."""
    for step in loader.steps_from(first):
        assert step is not None
        yield loader.agree(step)
