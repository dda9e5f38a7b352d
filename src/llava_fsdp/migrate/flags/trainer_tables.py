"""The tables of flags of ms-swift, LLaMA-Factory and TRL, and what differs from each whatever the flags say."""

from collections.abc import Mapping

from llava_fsdp.migrate.flags.factory_flags import FACTORY_FLAGS
from llava_fsdp.migrate.flags.swift_flags import SWIFT_FLAGS
from llava_fsdp.migrate.flags.trl_flags import TRL_FLAGS
from llava_fsdp.migrate.source.source_run import Flag
from llava_fsdp.migrate.source.trainers import Trainer

TABLES: Mapping[Trainer, Mapping[str, Flag]] = {
    Trainer.swift: SWIFT_FLAGS,
    Trainer.factory: FACTORY_FLAGS,
    Trainer.trl: TRL_FLAGS,
}
DIFFERS: Mapping[Trainer, str] = {
    Trainer.swift: "prompts are those of the checkpoint's chat template, not ms-swift's own; a broken record ends the "
    "run before its first step",
    Trainer.factory: "prompts are those of the checkpoint's chat template, not LLaMA-Factory's own; images are resized "
    "as its preprocessor_config.json says, where LLaMA-Factory has image_max_pixels (589,824 unless set)",
    Trainer.trl: "answers alone have labels; of records with messages TRL also learns the questions",
}
"""Cautions that are printed for every run of a program."""
