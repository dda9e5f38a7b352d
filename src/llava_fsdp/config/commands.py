"""Keys of the other commands."""

import math
from dataclasses import dataclass

from llava_fsdp.config.checks import at_least
from llava_fsdp.config.data import DataConfig, StageConfig
from llava_fsdp.config.enums import AspectRatio, Devices, Examine, FolderFormat, Format, KeptDType, SweepMetric, Task
from llava_fsdp.config.train import Config
from llava_fsdp.runtime.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    nproc_per_node: int
    nnodes: int
    devices: Devices


@dataclass(kw_only=True, slots=True)
class SweepKeys:
    metric: SweepMetric
    last_steps: int
    """Steps at the end of a run whose mean loss is its loss."""

    def __post_init__(self) -> None:
        at_least("sweep.last_steps", self.last_steps, 1)


@dataclass(kw_only=True, slots=True)
class SweepConfig(Config):
    """A training run, how to launch it, and what a sweep compares it by."""

    launch: LaunchConfig
    sweep: SweepKeys


@dataclass(kw_only=True, slots=True)
class PrepareKeys:
    workers: int | None
    """Processes that read records and pictures; null: one a core."""

    def __post_init__(self) -> None:
        if self.workers is not None:
            at_least("prepare.workers", self.workers, 1)


@dataclass(kw_only=True, slots=True)
class PrepareConfig(Config):
    """A dataset examined and indexed for the training that the same keys describe."""

    prepare: PrepareKeys
    report: str | None
    verify: bool = False
    """Read every record and every image again and compare them with what the index knows of them; nothing is made."""

    def __post_init__(self) -> None:
        super(PrepareConfig, self).__post_init__()
        if self.verify and self.data.examine is not Examine.decode:
            raise ConfigError(
                f"verify=true compares whole image files, and data.examine={self.data.examine.value} makes an index "
                "that knows their sizes alone; set data.examine=decode"
            )


@dataclass(kw_only=True, slots=True)
class PlanConfig(Config):
    """What a training with the same keys would cost, on GPUs that need not be here."""

    gpus: int
    """Ranks of a node."""
    nodes: int
    gpu: str
    """A name of the table in `plan/hardware.py`; auto: this machine's."""
    rows: int
    """Most rows of the table that are printed."""
    page: str
    """HTML file of tokens a second against nodes, for nodes > 1."""
    format: Format

    def __post_init__(self) -> None:
        super(PlanConfig, self).__post_init__()
        for name in ("gpus", "nodes", "rows"):
            at_least(name, getattr(self, name), 1)


@dataclass(kw_only=True, slots=True)
class DoctorConfig(Config):
    """A machine looked at for the training that the same keys describe."""

    gpus: int | None
    """Ranks on this machine; null: its GPUs, or 2 where there is none."""
    nodes: int

    def __post_init__(self) -> None:
        super(DoctorConfig, self).__post_init__()
        at_least("nodes", self.nodes, 1)
        if self.gpus is not None:
            at_least("gpus", self.gpus, 1)


@dataclass(kw_only=True, slots=True)
class AskedConfig:
    """The trained model that is asked."""

    checkpoint: str
    """A run's folder, or a model folder: ours, transformers' or the original's."""


@dataclass(kw_only=True, slots=True)
class EvaluateConfig:
    """Questions, asked of a trained model; and scores, where their answers are known."""

    stage: StageConfig
    data: DataConfig
    model: AskedConfig
    task: Task
    questions: str | None
    """The file of questions; of task=conversations that is data.path."""
    annotations: str | None
    """Right answers, where the questions' file has none: VQAv2's or TextVQA's annotations, POPE's label file or the
    folder of them, ScienceQA's problems.json or the folder that it lies in."""
    split: str
    """Of ScienceQA's problems, where questions=problems.json: test, val, minival, ..."""
    suffix: bool
    """End every question with the original's last line for its task."""
    answers: str | None
    """JSON Lines, written as answers come and continued when that was interrupted; null: answers are not kept."""
    submission: str | None
    """The answers as VQAv2's and VizWiz's servers take them: a JSON list, prepared as the original does."""
    limit: int | None
    batch_size: int
    max_new_tokens: int
    show: int
    blank: bool | None
    """Also ask with pictures of the mean colour; null: of task=conversations."""
    format: Format

    def __post_init__(self) -> None:
        if self.task is Task.conversations:
            given = [k for k in ("questions", "annotations", "submission") if getattr(self, k) is not None]
            if given:
                raise ConfigError(
                    f"{given[0]}={getattr(self, given[0])} is not for task=conversations, whose questions are "
                    f"data.path; say which task it is: task={'|'.join(t.value for t in Task if t is not self.task)}"
                )
            if self.suffix:
                raise ConfigError(
                    "suffix=true: the records of task=conversations are asked as they are; set suffix=false"
                )
        elif self.questions is None:
            raise ConfigError(f"task={self.task.value} needs questions=FILE")
        if self.submission is not None and self.task not in (Task.vqa, Task.textvqa):
            raise ConfigError(f"submission={self.submission} is of task=vqa; task={self.task.value} has none")
        at_least("show", self.show, 0)
        at_least("batch_size", self.batch_size, 1)
        at_least("max_new_tokens", self.max_new_tokens, 1)
        if self.limit is not None:
            at_least("limit", self.limit, 1)


@dataclass(kw_only=True, slots=True)
class ChatConfig:
    """A conversation with a trained model."""

    model: AskedConfig
    image: str | None
    """A picture file, or several: [a.jpg, b.jpg]."""
    question: str | None
    max_new_tokens: int
    temperature: float
    """0: the likeliest token, always."""
    top_p: float
    """With a temperature: the likeliest tokens that have this probability together are drawn from."""
    seed: int | None
    """With a temperature: of what is drawn; null: another one every time."""
    serve: bool
    """A page for the browser instead of the terminal."""
    host: str
    """The address that the page listens on."""
    port: int
    max_upload_mb: int
    """Most that a picture sent to the page may have, in MiB."""
    max_images: int
    """Most pictures of a conversation on the page."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_upload_mb", "max_images"):
            at_least(name, getattr(self, name), 1)
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature} must be 0 (the likeliest token, always) or above")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0, and at most 1 (all tokens)")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be 1 to 65535")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed={self.seed} must be 0 or above, and below 2**63")
        if self.question is not None and not self.question.strip() and self.image is None:
            raise ConfigError("question is empty; say what is asked, or leave it out to talk on the terminal")
        if self.serve and (self.image is not None or self.question is not None):
            raise ConfigError("serve=true takes pictures and questions from the page; leave image and question out")


@dataclass(kw_only=True, slots=True)
class ConversionConfig:
    """A model from one format into another."""

    source: str
    """A run, one of its checkpoints, or a model folder: ours, transformers' or the original's."""
    to: str | None
    """The folder to make."""
    accept: list[str]
    """Paths in `source` of files that were changed there on purpose: nothing is written but their digests, anew."""
    format: FolderFormat
    dtype: KeptDType
    """keep: every weight as the source has it."""
    merge: bool
    """Of a source with adapters: a whole model with these merged into it; false: the folder of the adapters."""
    base: str | None
    """What the adapters of a source are for: a language model, or a whole LLaVA model. null: what the source says."""
    language: str | None
    """The language model, for a source that holds a projector alone."""
    vision: str | None
    """The tower of an original's folder that names it otherwise, and the name that an original's folder gives it."""
    template: str
    """For a source that does not say its own."""
    image_aspect_ratio: AspectRatio | None
    """null: as the source says."""
    overwrite: bool
    verify: bool
    """Read back what was written and compare its logits with the source's."""
