"""Watch the routers of a mixture of experts on this rank."""

from llava_fsdp.config import ActivationCheckpointing, Config
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.model.experts import RankPositions, Router, RouterOutputs, find_routers
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.tensor.tensor_parallel import reduction


def routers_to_watch(model: Architecture, cfg: Config, parallelism: Parallelism, compiles: bool) -> list[Router]:
    """Return the routers of a language model whose outputs are to be kept by hooks; empty if there are none or it is
    not possible: with `parallel.context`, where a rank has only a part of each sample, and under selective activation
    checkpointing with compiled blocks (`compiles`), whose graph a hook would break."""
    is_hidden = compiles and cfg.activation_checkpointing.mode is ActivationCheckpointing.selective
    return [] if is_hidden or parallelism.meshes.context is not None else find_routers(model.language)


def watch_routers(
    model: Architecture, routers: list[Router], has_balance_loss: bool, parallelism: Parallelism, compiles: bool
) -> RouterOutputs | None:
    """Install hooks on the routers that this rank has, and return what keeps their outputs; None without routers.

    Args:
        routers: the routers of the whole language model.
        has_balance_loss: whether a load-balancing loss, which is computed from the outputs, is trained.
        compiles: whether blocks will be compiled.
    """
    if not routers:
        return None
    positions, mesh = None, parallelism.meshes.tensor
    if mesh is not None:  # with parallel.tensor, the routers of a rank get only the tokens at its own positions
        positions = RankPositions(mesh.get_local_rank(), mesh.size(), reduction(mesh, "sum"))
    return RouterOutputs(routers, has_balance_loss, model.language, compiles, positions)
