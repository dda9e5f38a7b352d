"""Compare the parts of a model, before its training, with transformers' own classes."""

from llava_fsdp.export.prove.check_causal import check_causal
from llava_fsdp.export.prove.compare_language import compare_language
from llava_fsdp.export.prove.compare_tower import compare_tower
from llava_fsdp.export.prove.compare_whole import compare_whole
from llava_fsdp.export.write.formats import SourceModel


def check_parts(source: SourceModel) -> None:
    """Compare small copies of the parts of a model with transformers' own classes, and check that its language model is
    causal. The weights are not read. Only rank 0 calls this.

    Raises:
        ModelError: a small copy computes something else than transformers' class, or a token depends on later ones.
    """
    model = source.model
    if model.parts.whole is None:
        compare_language(model.parts)
    else:
        compare_whole(source)
    compare_tower(model)
    check_causal(model)
