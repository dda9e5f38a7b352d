"""Separate the words of a training command into flags and values, as argparse does."""

from collections.abc import Mapping

from llava_fsdp.migrate.flags.llava_flags import canonical
from llava_fsdp.migrate.source.launch_command import TrainingCommand
from llava_fsdp.migrate.source.source_run import Flag

LISTS = frozenset({
    "report_to", "label_names", "lora_target_modules", "target_modules", "dataset", "val_dataset", "cached_dataset",
    "freeze_parameters", "trainable_parameters", "modules_to_save", "adapters", "model_name", "model_author",
    "external_plugins", "custom_register_path", "custom_dataset_info", "callbacks",
})  # fmt: skip
"""Flags that take several values."""


def read_flags(launch: TrainingCommand, table: Mapping[str, Flag]) -> tuple[dict[str, object], list[str]]:
    """Return the flags that a command gives a training program: {name: value}, separated as argparse would do it, but
    not converted; and a remark about each flag that is given twice. `table` has the flags that the program accepts.

    A value is a text, a list of texts, or True for a flag without a value. A word of no flag gets the name `(WORD)`.
    """
    flags: dict[str, object] = {}
    notes = []
    current: str | None = None
    for word in launch.arguments:
        if not word.startswith("--") or len(word) == 2:
            # LISTS: flags that take several values
            if current is None or (current in table and current not in LISTS and flags[current] is not True):
                flags[f"({word})"] = word  # belongs to no flag; reported as an unknown key
            elif flags[current] is True:
                flags[current] = word
            else:
                earlier_values = flags[current]
                flags[current] = (
                    [*earlier_values, word] if isinstance(earlier_values, list) else [str(earlier_values), word]
                )
            continue
        given_name, equals, value = word[2:].partition("=")
        current = canonical(given_name, table) or given_name
        if current in flags:
            notes.append(f"--{current} is given twice; the last one counts")
        flags[current] = value if equals else True
        if given_name.replace("-", "_") == f"no_{current}":
            flags[current] = "False"
    return flags, notes
