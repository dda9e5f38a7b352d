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
    """Ranks on a node."""
    nnodes: int
    devices: Devices
    """Which GPUs each run of a sweep gets."""


@dataclass(kw_only=True, slots=True)
class SweepKeys:
    metric: SweepMetric
    """What runs are compared by."""
    last_steps: int
    """Number of steps at the end of a run whose mean loss counts as the run's loss."""

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
    """Processes that read records and images; null: one for each core."""

    def __post_init__(self) -> None:
        at_least("prepare.workers", self.workers, 1)


@dataclass(kw_only=True, slots=True)
class PrepareConfig(Config):
    """Keys of `prepare`: those of the training that the dataset is examined and indexed for, and some of its own."""

    prepare: PrepareKeys
    report: str | None
    """Folder of the report; null: the index."""
    verify: bool = False
    """Read every record and image again and compare them with the index; nothing is written."""

    def __post_init__(self) -> None:
        super(PrepareConfig, self).__post_init__()
        if self.verify and self.data.examine is not Examine.decode:
            raise ConfigError(
                f"verify=true compares whole image files, and data.examine={self.data.examine.value} makes an index "
                "that knows their sizes alone; set data.examine=decode"
            )


@dataclass(kw_only=True, slots=True)
class PlanConfig(Config):
    """Keys of `plan`: those of the training whose cost is predicted, and some of its own."""

    gpus: int
    """Ranks on a node."""
    nodes: int
    gpu: str
    """A name from the table in `plan/hardware.py`; auto: this machine's GPU."""
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
    """Keys of `doctor`: those of the training that the machine is checked for, and some of its own."""

    gpus: int | None
    """Ranks on this machine; null: its number of GPUs, or 2 without GPUs."""
    nodes: int

    def __post_init__(self) -> None:
        super(DoctorConfig, self).__post_init__()
        at_least("nodes", self.nodes, 1)
        at_least("gpus", self.gpus, 1)


@dataclass(kw_only=True, slots=True)
class TrainedModelConfig:
    """The trained model that answers."""

    checkpoint: str
    """Folder of a run, or a model folder: ours, transformers' or the original's."""


@dataclass(kw_only=True, slots=True)
class EvaluateConfig:
    """Keys of `evaluate`: answer a benchmark's questions with a trained model and score the answers."""

    stage: StageConfig
    data: DataConfig
    model: TrainedModelConfig
    task: Task
    """Kind of questions, and how their answers are scored."""
    questions: str | None
    """File of questions; task=conversations takes data.path instead."""
    annotations: str | None
    """Right answers, if the file of questions has none: VQAv2's or TextVQA's annotations, POPE's label file or the
    folder of them, ScienceQA's problems.json or its folder."""
    split: str
    """Split of ScienceQA's problems, if questions=problems.json: test, val, minival, ..."""
    suffix: bool
    """End every question with the original's last line for its task."""
    answers: str | None
    """JSON Lines file of the answers, written as they come and continued after an interruption; null: not kept."""
    submission: str | None
    """File of the answers as VQAv2's and VizWiz's servers take them: a JSON list, prepared as the original does."""
    limit: int | None
    """Most questions; null: all."""
    batch_size: int
    """Most answers that are generated at once."""
    max_new_tokens: int
    """Most tokens of an answer."""
    show: int
    """Number of answers that are printed."""
    blank: bool | None
    """Answer every question a second time with an image of the mean colour; null: with task=conversations."""
    format: Format

    def __post_init__(self) -> None:
        if self.task is Task.conversations:
            others = "|".join(task.value for task in Task if task is not self.task)
            for key in ("questions", "annotations", "submission"):
                if (value := getattr(self, key)) is not None:
                    raise ConfigError(
                        f"{key}={value} is not for task=conversations, whose questions are data.path; choose another "
                        f"task: task={others}"
                    )
            if self.suffix:
                raise ConfigError("suffix=true is not for task=conversations; set suffix=false")
        elif self.questions is None:
            raise ConfigError(f"task={self.task.value} needs questions=FILE")
        if self.submission is not None and self.task not in (Task.vqa, Task.textvqa):
            raise ConfigError(f"submission={self.submission} is for task=vqa or textvqa, not {self.task.value}")
        at_least("show", self.show, 0)
        for name in ("batch_size", "max_new_tokens", "limit"):
            at_least(name, getattr(self, name), 1)


@dataclass(kw_only=True, slots=True)
class ChatConfig:
    """Keys of `chat`: a conversation with a trained model."""

    model: TrainedModelConfig
    image: str | None
    """An image file, or several: [a.jpg, b.jpg]."""
    question: str | None
    """A single question; null: a conversation in the terminal."""
    max_new_tokens: int
    """Most tokens of an answer."""
    temperature: float
    """Temperature of sampling; 0: always the likeliest token."""
    top_p: float
    """With a temperature: sample from the likeliest tokens whose probabilities add up to this."""
    seed: int | None
    """With a temperature: seed of sampling; null: another one every time."""
    serve: bool
    """Serve a page for the browser instead of the terminal."""
    host: str
    """Address that the page listens on."""
    port: int
    max_upload_mb: int
    """Largest image that can be uploaded to the page, in MiB."""
    max_images: int
    """Most images of a conversation on the page."""

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
            raise ConfigError("question is empty; write one, or leave it out for a conversation in the terminal")
        if self.serve and (self.image is not None or self.question is not None):
            raise ConfigError("serve=true takes images and questions from the page; leave image and question out")


@dataclass(kw_only=True, slots=True)
class ConversionConfig:
    """Keys of `export`: convert a model from one format into another."""

    source: str
    """A run, one of its checkpoints, or a model folder: ours, transformers' or the original's."""
    to: str | None
    """Folder to write."""
    accept: list[str]
    """Paths in `source` of files that were changed on purpose: only their digests are written anew."""
    format: FolderFormat
    """Which program the folder is for."""
    dtype: KeptDType
    """Dtype of the weights; keep: as in the source."""
    merge: bool
    """If the source has adapters, true writes a whole model with them merged into it, false a folder of adapters."""
    base: str | None
    """Language model or whole LLaVA model that the source's adapters are for; null: the one that the source names."""
    language: str | None
    """Language model, for a source that has a projector only."""
    vision: str | None
    """Vision tower, instead of the one that an original's folder names; a folder in the original's format names it."""
    template: str
    """Conversation template, for a source that does not name its own."""
    image_aspect_ratio: AspectRatio | None
    """How images are fitted into the vision tower's square; null: as in the source."""
    overwrite: bool
    """Replace the model folder `to`, if there is one."""
    verify: bool
    """Load what was written and compare its logits with the source's."""
