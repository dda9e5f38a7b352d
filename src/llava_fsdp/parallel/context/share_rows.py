"""Let the ranks of a row share its attention."""

from transformers import PretrainedConfig

from llava_fsdp.config import ContextHow, ParallelConfig
from llava_fsdp.model.architecture import Architecture
from llava_fsdp.parallel.context.context import exchange_in, gather_in
from llava_fsdp.parallel.context.context_attention import ContextPlan, plan_context, share_attention
from llava_fsdp.parallel.context.divide_inputs import share_whole_rows
from llava_fsdp.parallel.parallelism import Parallelism
from llava_fsdp.parallel.ranks.rank_layout import RankLayout
from llava_fsdp.runtime.errors import ConfigError
from llava_fsdp.runtime.text.log import log


def context_of(layout: RankLayout, rank: int, language: PretrainedConfig) -> ContextPlan | None:
    """Return how a rank shares the attention of its rows with other ranks; None: it processes whole rows. `language`:
    configuration of the language model. Raise ConfigError if `parallel.context_how=ulysses` is not possible."""
    parallel, index = layout.parallel, layout.context_index(rank)
    if parallel.num_context == 1:
        return None
    return plan_context(parallel.context_how, language, parallel.num_context, index, parallel.tensor)


def check_rows(model: Architecture, parallel: ParallelConfig) -> None:
    """Raise ConfigError if ranks cannot share rows (`parallel.context`) in the attention of this model."""
    if parallel.num_context == 1:
        return
    plan = plan_context(parallel.context_how, model.language_config, parallel.num_context, 0, parallel.tensor)
    # a language model that gets whole rows and their boundaries in its attention mask can share only heads
    if plan.how is ContextHow.gather and model.attends_by_mask:
        raise ConfigError(
            f"parallel.context={parallel.context}: a {type(model.language).__name__} needs "
            "parallel.context_how=ulysses, by which ranks share its "
            f"{model.language_config.num_attention_heads} heads; set parallel.context to a divisor of them"
        )


def share_rows(model: Architecture, parallelism: Parallelism) -> None:
    """Make the ranks that share rows, if any, compute the language model's attention together, and log in which way."""
    mesh = parallelism.meshes.context
    if mesh is None:
        return
    context = context_of(parallelism.layout, parallelism.world.rank, model.language_config)
    assert context is not None and model.kernel is not None, "checked by the configuration"
    if parallelism.is_first:
        ranks, how = context.cut.size, context.how.value
        log().info("%d ranks process each row together, parallel.context_how=%s: %s", ranks, how, context.reason)
    group = mesh.get_group("context")
    if model.attends_by_mask:  # the language model gets whole rows, and their boundaries in its attention mask
        return share_whole_rows(model, model.kernel, context, exchange_in(group))
    share_attention(model.language, model.kernel, context, exchange_in(group), gather_in(group))
