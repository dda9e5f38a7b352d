"""Choose which images of a dataset are decoded with `data.examine=sample`, and estimate the share of bad ones among all
images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llava_fsdp.data.keyed_permutation import permuted

EACH_FILE = 3
"""Number of images of each file of records that are decoded in any case. They are evenly spaced and include the last
one, because an interrupted copy lacks the end of a file."""
CONFIDENCE = 0.95
SEED = 0


@dataclass(frozen=True)
class ImageSample:
    """The images that `data.examine=sample` decodes, as numbers in the order of the records."""

    ends: tuple[int, ...]
    """For each file of records, the number after that of its last image."""
    size: int
    """Number of images that are drawn at random."""

    @property
    def total(self) -> int:
        """Number of images of the dataset. An image that occurs several times counts several times."""
        return self.ends[-1]

    @cached_property
    def drawn_at_random(self) -> np.ndarray:
        """Numbers of the images drawn at random, each with the same probability; int64, ascending."""
        if self.size >= self.total:
            return np.arange(self.total)
        return np.sort(permuted(np.arange(self.size), self.total, "images to examine", SEED))

    @cached_property
    def decoded(self) -> np.ndarray:
        """Numbers of all decoded images: those drawn at random, and EACH_FILE of each file; int64, ascending."""
        begins = (0, *self.ends[:-1])
        pairs = [(begin, end) for begin, end in zip(begins, self.ends, strict=True) if begin < end]
        spread = [  # the last image of each of EACH_FILE equal parts of a file
            begin + (end - begin) * part // EACH_FILE - 1 for begin, end in pairs for part in range(1, EACH_FILE + 1)
        ]
        firsts = [begin for begin, _ in pairs for _ in range(EACH_FILE)]  # for a file with fewer images than EACH_FILE
        return np.union1d(self.drawn_at_random, np.maximum(spread, firsts).astype(np.int64))

    def decoded_between(self, begin: int, end: int) -> np.ndarray:
        """Return the numbers of those of the images begin to end - 1 that are decoded, int64, ascending."""
        first, last = np.searchsorted(self.decoded, (begin, end))
        return self.decoded[first:last]


@dataclass(frozen=True)
class Examined:
    """Counts of the images of a dataset that were decoded before training, if not all were."""

    images: int
    decoded: int = 0
    bad: int = 0
    drawn: int = 0
    """Number of the decoded images that were drawn at random; `bad_drawn` is the number of the bad ones among them."""
    bad_drawn: int = 0

    @classmethod
    def count(cls, sample: ImageSample, digests: np.ndarray) -> "Examined":
        """Count the images of a sample. `digests`: checksum of each image of the dataset; 0: bad or not decoded."""
        bad, bad_drawn = (
            int(np.count_nonzero(digests[rows] == 0)) for rows in (sample.decoded, sample.drawn_at_random)
        )
        return cls(sample.total, len(sample.decoded), bad, len(sample.drawn_at_random), bad_drawn)

    @property
    def bound(self) -> float | None:
        """Upper bound, at 95 % confidence, of the fraction of bad images in the dataset, from those drawn at random;
        None if no image was decoded, or all were."""
        return None if self.decoded in (0, self.images) else upper_bound(self.bad_drawn, self.drawn)

    @property
    def summary(self) -> str:
        """Sentence for the user: how many images were decoded, and how many of these are bad."""
        if not self.decoded:
            return f"none of {self.images:,} images was opened before training; each is checked when it is read"
        found = f"{self.decoded:,} of {self.images:,} images were decoded before training, {self.bad:,} of them are bad"
        if self.bound is None:
            return found
        return f"{found}; at most {100 * self.bound:.2g} % of all are bad ({CONFIDENCE:.0%} confidence)"

    def as_json(self) -> dict[str, Any]:
        """Return the counts for report.json; `bound` is an upper bound of the fraction of bad images in the dataset."""
        return {
            "images": self.images, "decoded": self.decoded, "bad": self.bad, "bound": self.bound,
            "summary": self.summary,
        }  # fmt: skip


def upper_bound(bad: int, drawn: int) -> float:
    """Return the upper bound, at 95 % confidence, of the fraction of bad items in a population of which `bad` of
    `drawn` randomly drawn items are bad (one-sided bound of Clopper and Pearson). It assumes drawing with replacement;
    without replacement, the true bound is smaller."""
    if bad >= drawn:
        return 1.0
    low, high = bad / drawn, 1.0
    while low < (middle := (low + high) / 2) < high:
        if probability_of_at_most(bad, drawn, middle) > 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def probability_of_at_most(bad: int, drawn: int, share: float) -> float:
    """Return the probability that at most `bad` of `drawn` random items are bad, if the fraction of all is `share` (0
    to 1, exclusive)."""
    yes, no = math.log(share), math.log1p(-share)
    log_orders = math.lgamma(drawn + 1)
    terms = (
        log_orders - math.lgamma(k + 1) - math.lgamma(drawn - k + 1) + k * yes + (drawn - k) * no
        for k in range(bad + 1)
    )
    return math.fsum(map(math.exp, terms))


def ends_of(first_picture: np.ndarray, file_begins: Sequence[int]) -> tuple[int, ...]:
    """Return for each file of records the number after that of its last image, from `first_picture` as written by
    `read_facts`."""
    return tuple(first_picture[[*file_begins[1:], len(first_picture) - 1]].tolist())
