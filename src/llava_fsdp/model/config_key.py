"""Model configurations as keys of caches: what transformers' code does with a configuration is found out once."""

import json

from transformers import PretrainedConfig


class ConfigKey:
    """A model configuration that is hashed and compared by its class and values as they were when the key was made."""

    def __init__(self, config: PretrainedConfig):
        self.config = config
        self.content = (type(config), json.dumps(config.to_dict(), sort_keys=True, default=str))

    def __hash__(self) -> int:
        return hash(self.content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfigKey) and self.content == other.content
