"""The memory that the chunked loss takes, by a formula; tests compare it with what is allocated."""

LOGITS_SIZE = 8
"""Bytes for each logit of a chunk at its peak: two fp32 tensors, whatever the compute dtype."""
SUM_SIZE = 4
"""Bytes of an element of the sum over chunks."""


def loss_bytes(
    labels: int, vocabulary: int, width: int, item_size: int, trains: bool, chunk_tokens: int
) -> tuple[int, int]:
    """Bytes of `chunked_loss` for a micro-batch beyond its inputs: at most at once, and from forward to backward.

    With n labels, c = min(n, chunk_tokens), V x H the output layer and b = item_size of the compute dtype:

        held = b * n * H + G            the gradients: G is b * V * H with one chunk, 4 * V * H with several
        peak = b * n * H + S + max(8 * c * V, b * c * V + D)
                                        S, the sum over chunks: 4 * V * H with several, else 0; a chunk's logits, twice
                                        in fp32; D, its product: b * V * H, 0 where it is added in place (fp32, several)

    G, S and D are 0 where the output layer is frozen. In bf16 with several chunks the backward pass begins with the sum
    rounded, b * V * H bytes beside it; the logits are gone by then. Without a label there are b * V * H zeros.
    """
    size = vocabulary * width * trains
    if not labels:
        return item_size * size, item_size * size
    chunk, several = min(labels, chunk_tokens), labels > chunk_tokens
    of_hidden = item_size * labels * width
    total = SUM_SIZE * size if several else 0
    product = 0 if several and item_size == SUM_SIZE else item_size * size
    logits = chunk * vocabulary
    peak = of_hidden + total + max(LOGITS_SIZE * logits, item_size * logits + product)
    return peak, of_hidden + (total or item_size * size)
