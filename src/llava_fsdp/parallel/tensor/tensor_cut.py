"""How tensor parallelism divides the weights of a module among ranks: the styles of a plan."""

from enum import Enum


class Cut(Enum):
    """How the weights of a module, or a single parameter, are divided among the ranks that compute it together. The
    first six values are the names in transformers' `base_model_tp_plan`."""

    COLWISE = "colwise"
    """Each rank has some rows of a linear layer's weight, and computes these outputs."""
    COLWISE_GATHERED = "colwise_gather_output"
    """As COLWISE, and the outputs are gathered: every rank gets all of them."""
    ROWWISE = "rowwise"
    """Each rank has the columns of a linear layer's weight for the inputs that it holds; the outputs are summed, and
    each rank gets those of its positions."""
    ROWWISE_SPLIT = "rowwise_split_input"
    """As ROWWISE, but every rank holds all inputs, and takes those for its columns."""
    SUMMED = "replicated_with_grad_allreduce"
    """Every rank has the whole weight, and computes a part of its gradient: norms, and the second matrix of an adapter
    behind a sum."""
    OWNER = "local_params"
    """A module with parameters of its own that are divided (`PARAMETER`)."""
    PARAMETER = "parameter"
    """A parameter of which each rank has some rows, such as one attention sink for each head."""
    EMBEDDING = "embedding"
    """Each rank has some rows of the embedding, which are tokens of the vocabulary."""
    OUTPUT = "output"
    """Each rank has some rows of the output layer, and computes the logits of these tokens of the vocabulary."""
