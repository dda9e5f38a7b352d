"""Compare the parts of a model, before its training, with transformers' own classes."""

from llava_fsdp.export.prove.check_causal import check_causal
from llava_fsdp.export.prove.compare_language import compare_language
from llava_fsdp.export.prove.compare_tower import compare_tower
from llava_fsdp.export.prove.compare_whole import compare_whole
from llava_fsdp.export.write.formats import SourceModel
from llava_fsdp.export.write.whole_folder import WholeSource


def check_parts(source: SourceModel | WholeSource) -> None:
    """Compare small copies of the parts of a model, with random weights, with transformers' own classes, and check that
    its language model is causal. A WholeSource is such a class itself. Only rank 0 calls this.

    Raises:
        ModelError: a small copy computes something else than transformers' class, or a token depends on later ones.
    """
    if isinstance(source, WholeSource):
        return
    model = source.model
    if model.parts.whole is None:  # language model and tower come from folders of their own, not from a whole LLaVA
        compare_language(model.parts)
    else:
        compare_whole(source)
    compare_tower(model)
    check_causal(model)
