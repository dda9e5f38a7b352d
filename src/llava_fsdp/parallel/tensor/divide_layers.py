"""Divide the layers of a model among the ranks that compute them together."""

from collections.abc import Mapping
from functools import partial

from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.loss import VocabularyPart, chunked_loss
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.pipeline.stages import chains_of_blocks
from llava_fsdp.parallel.tensor.tensor_cut import Cut
from llava_fsdp.parallel.tensor.tensor_parallel import cut_model, own_rows, reduction
from llava_fsdp.parallel.tensor.tensor_plan import divide_dropout, tensor_plan


def cuts_of(model: Architecture, parallelism: Parallelism) -> dict[str, Cut]:
    """Return how the layers of a whole model are divided among ranks (`parallel.tensor`), by name; empty if they are
    not."""
    return tensor_plan(model, parallelism.layer_parts) if parallelism.meshes.tensor is not None else {}


def divide_layers(model: Architecture, plan: Mapping[str, Cut], parallelism: Parallelism, chunk_tokens: int) -> None:
    """Divide the layers of a meta-device model among ranks, in place, and replace its loss by one for a divided
    vocabulary. Do nothing if layers are whole.

    Args:
        plan: how the whole model is divided; the model may be a part of it.
        chunk_tokens: number of tokens whose loss is computed at a time.
    """
    mesh = parallelism.meshes.tensor
    if mesh is None:
        return
    names = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    cuts = {name: cut for name, cut in plan.items() if name in names}
    first, _ = own_rows(model.language_config.vocab_size, mesh)
    # the loss needs the maximum and the sum of logits over the vocabulary, of which each rank has a part
    part = VocabularyPart(first, reduction(mesh, "max"), reduction(mesh, "sum"))
    model.set_label_loss(partial(chunked_loss, chunk_tokens=chunk_tokens, part=part))
    divide_dropout(model, cuts, mesh.size(), mesh.get_local_rank())
    # `chains_of_blocks`: this rank's blocks, in lists of those that follow one another in the whole model
    cut_model(model, cuts, mesh, chains_of_blocks(model))
