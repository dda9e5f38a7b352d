"""Model configurations as keys of caches, so that a model is built and tried once for each configuration."""

import json

from transformers import PretrainedConfig


class ConfigKey:
    """A model configuration that is hashed and compared by its class and values, without the attention implementation,
    as they were when the key was made. Use a key at once: `config` is not a copy."""

    def __init__(self, config: PretrainedConfig):
        self.config = config
        values = json.dumps(config.to_dict(), sort_keys=True, default=str)
        self.content = type(config), values, str(getattr(config, "_experts_implementation", None))

    def __hash__(self) -> int:
        return hash(self.content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfigKey) and self.content == other.content
