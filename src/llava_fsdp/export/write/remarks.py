"""Tell the user of an exported model what other programs do differently with it than this project."""

from llava_fsdp.config import AspectRatio
from llava_fsdp.data.images.image_tokens import ImageTokens
from llava_fsdp.runtime.text.log import log

TILES_OF_VLLM = 9
"""Number of tiles. If an image has more, vLLM shrinks its features to as many as these tiles have, for every
LLaVA-OneVision, whatever its configuration says (vllm/model_executor/models/llava_onevision.py)."""


def remarks_on(tokens: ImageTokens, stop: str | None) -> list[str]:
    """Return what other programs do differently with an exported model, one text for each difference. `stop` is a text
    that ends an answer, if no token stands for it."""
    found = []
    if stop is not None:
        found.append(
            f"Answers end with the text {stop!r}, which is not one token of this model, so that transformers' generate "
            f"does not end an answer there by itself. Give it generate(..., stop_strings=[{stop!r}], "
            f"tokenizer=processor.tokenizer), or pipeline(..., stop_sequence={stop!r})."
        )
    if tokens.aspect is AspectRatio.anyres_max and tokens.max_tiles != TILES_OF_VLLM:
        most = max((width // tokens.tile * (height // tokens.tile) for width, height in tokens.sizes), default=0)
        if most > min(tokens.max_tiles, TILES_OF_VLLM):
            found.append(
                f"This model was trained with data.max_tiles={tokens.max_tiles}, and vLLM takes {TILES_OF_VLLM} for "
                "every LLaVA-OneVision, whatever its configuration says: there an image of many tiles gets another "
                "number of tokens than in training, and answers differ without an error. Use transformers or "
                f"llava-fsdp chat; or train with data.max_tiles={TILES_OF_VLLM}."
            )
    return found


def log_remarks(remarks: list[str]) -> list[str]:
    """Log remarks about an exported model as warnings, and return them for its model card."""
    for remark in remarks:
        log().warning("%s", remark)
    return remarks
