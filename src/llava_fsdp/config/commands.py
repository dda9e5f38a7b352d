"""Configuration keys of all commands of `llava-fsdp` except `train`."""

import math
from dataclasses import dataclass, field

from llava_fsdp.config.bounds import at_least
from llava_fsdp.config.keys.data import DataConfig, StageConfig
from llava_fsdp.config.keys.enums import (
    AspectRatio,
    Devices,
    Examine,
    FolderFormat,
    Format,
    KeptDType,
    ShownThoughts,
    SweepMetric,
    Task,
    Which,
)
from llava_fsdp.config.rules import Config
from llava_fsdp.runtime.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    nproc_per_node: int
    """Number of ranks on each node."""
    nnodes: int
    """Number of machines of a run, which is 1 in a sweep."""
    devices: Devices
    """Which GPUs each run of a sweep gets."""


@dataclass(kw_only=True, slots=True)
class SweepKeys:
    metric: SweepMetric
    """Metric by which a sweep compares its runs."""
    last_steps: int
    """Number of last steps whose mean loss is a run's loss."""

    def __post_init__(self) -> None:
        at_least("sweep.last_steps", self.last_steps, 1)


@dataclass(kw_only=True, slots=True)
class SweepConfig(Config):
    """Configuration keys of the command `sweep`, which runs several trainings with different settings: the keys of a
    training, of how the trainings are launched, and of their comparison."""

    launch: LaunchConfig
    sweep: SweepKeys


@dataclass(kw_only=True, slots=True)
class PrepareKeys:
    workers: int | None
    """Number of processes that read records and images; null: one a core."""

    def __post_init__(self) -> None:
        at_least("prepare.workers", self.workers, 1)


@dataclass(kw_only=True, slots=True)
class PrepareConfig(Config):
    """Configuration keys of the command `prepare`, which checks a dataset before a training: the keys of that training,
    and a few more."""

    prepare: PrepareKeys
    report: str | None
    """Folder for the report; null: the folder of the dataset's index."""
    verify: bool = False
    """Whether to compare every record and image with the index, without writing anything."""

    def __post_init__(self) -> None:
        """Raise ConfigError if the configuration of the training is wrong, or `verify` contradicts it."""
        super(PrepareConfig, self).__post_init__()
        if self.verify and self.data.examine in (Examine.head, Examine.lazy):
            raise ConfigError(
                f"verify=true compares whole image files, and data.examine={self.data.examine.value} makes an index "
                "without their checksums; set data.examine=decode"
            )


@dataclass(kw_only=True, slots=True)
class PlanConfig(Config):
    """Configuration keys of the command `plan`, which predicts memory and speed of a training: the keys of that
    training, and a few more."""

    gpus: int
    """Number of ranks on each node."""
    nodes: int
    """Number of nodes."""
    gpu: str
    """Name of a GPU; auto: that of this machine. The names are in the table of `plan/time/hardware.py`."""
    rows: int
    """Maximum number of rows of the printed table."""
    page: str
    """HTML file for the chart, with nodes > 1 or longest=true."""
    longest: bool
    """Whether to predict the longest sample that fits on 1, 2, 4, ... GPUs."""
    format: Format
    runs: str | None = None
    """Folder of runs whose measured seconds correct predictions; null: none."""

    def __post_init__(self) -> None:
        super(PlanConfig, self).__post_init__()
        for name in ("gpus", "nodes", "rows"):
            at_least(name, getattr(self, name), 1)


@dataclass(kw_only=True, slots=True)
class DoctorConfig(Config):
    """Configuration keys of the command `doctor`, which checks whether this machine has what a training needs: the keys
    of that training, and a few more."""

    gpus: int | None
    """Number of ranks on this machine; null: one a GPU, or 1."""
    nodes: int
    """Number of machines of the training."""

    def __post_init__(self) -> None:
        super(DoctorConfig, self).__post_init__()
        at_least("nodes", self.nodes, 1)
        at_least("gpus", self.gpus, 1)


@dataclass(kw_only=True, slots=True)
class TrainedModelConfig:
    """Configuration keys that name the trained model which generates answers."""

    checkpoint: str
    """Folder of a run or of a model. Its format is this project's, transformers' or the original LLaVA's."""


@dataclass(kw_only=True, slots=True)
class EvaluateConfig:
    """Configuration keys of the command `evaluate`, which lets a trained model answer the questions of a benchmark, and
    scores the answers."""

    stage: StageConfig
    data: DataConfig
    model: TrainedModelConfig
    task: Task
    """Kind of questions, which also decides how answers are scored."""
    tasks: list[str] = field(default_factory=list)
    """Tasks of lmms-eval to ask instead of `task`'s questions."""
    tasks_folder: str | None = None
    """Folder with tasks of lmms-eval of your own."""
    reference: str | None = None
    """Model that task=pairs compares with. Its log-probabilities of the answers are subtracted; null: none."""
    questions: str | None
    """File of questions; task=conversations uses data.path instead."""
    annotations: str | None
    """Files with the right answers, if the file of questions lacks them. VQAv2's or TextVQA's annotations, POPE's label
    file or the folder of all its label files, ScienceQA's problems.json or its folder."""
    suffix: bool
    """Whether to append the original LLaVA's instruction for the task to every question. An example is to answer with a
    single word."""
    answers: str | None
    """JSON Lines file to which answers are appended; null: none. An interrupted evaluation continues from it."""
    submission: str | None
    """File for the answers in the format of VQAv2's and VizWiz's test servers. It is a JSON list of answers, normalized
    as in the original LLaVA."""
    limit: int | None
    """Maximum number of questions to answer; null: all."""
    batch_size: int
    """Maximum number of answers that are generated at once."""
    max_new_tokens: int
    """Maximum number of tokens of an answer."""
    show: int
    """Number of answers to print."""
    blank: bool | None
    """Whether to answer every question again with a blank image; null: with task=conversations. The image has the mean
    colour."""
    format: Format
    """Format of the printed result."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value, or a combination of values, is not allowed."""
        if self.tasks:
            self.check_tasks()
        if self.tasks_folder is not None and not self.tasks:
            raise ConfigError(f"tasks_folder={self.tasks_folder} needs the names of tasks in it: tasks=[NAME]")
        if self.reference is not None and self.task is not Task.pairs:
            raise ConfigError(f"reference={self.reference} is for task=pairs, not {self.task.value}")
        if self.task in (Task.conversations, Task.pairs):
            others = "|".join(task.value for task in Task if task is not self.task)
            for key in ("questions", "annotations", "submission"):
                if (value := getattr(self, key)) is not None:
                    raise ConfigError(
                        f"{key}={value} is not for task={self.task.value}, whose questions are data.path; choose "
                        f"another task: task={others}"
                    )
            if self.suffix:
                raise ConfigError(f"suffix=true is not for task={self.task.value}; set suffix=false")
            if self.task is Task.pairs and self.answers is not None:
                raise ConfigError(f"answers={self.answers} is not for task=pairs, which generates none; leave it out")
        elif self.questions is None:
            raise ConfigError(f"task={self.task.value} needs questions=FILE")
        if self.submission is not None and self.task not in (Task.vqa, Task.textvqa):
            raise ConfigError(f"submission={self.submission} is for task=vqa or textvqa, not {self.task.value}")
        at_least("show", self.show, 0)
        for name in ("batch_size", "max_new_tokens", "limit"):
            at_least(name, getattr(self, name), 1)

    def check_tasks(self) -> None:
        """Raise ConfigError if a key is set that has no meaning for tasks of lmms-eval."""
        for key in ("questions", "annotations", "submission", "reference"):
            if (value := getattr(self, key)) is not None:
                raise ConfigError(f"{key}={value} is not for tasks, which bring their own questions; leave it out")
        if self.blank or self.suffix or self.task is not Task.conversations:
            raise ConfigError("tasks are asked as lmms-eval asks them: leave out blank, suffix and task")


@dataclass(kw_only=True, slots=True)
class ChatConfig:
    """Configuration keys of the command `chat`, which starts a conversation with a trained model."""

    model: TrainedModelConfig
    image: str | None
    """Path of an image file, or a list of paths: [a.jpg, b.jpg]."""
    question: str | None
    """A single question to answer; null: a conversation in the terminal."""
    messages: str | None
    """JSON file with one conversation, whose last turn is answered: a question, or the result of a call."""
    max_new_tokens: int
    """Maximum number of tokens of an answer."""
    temperature: float
    """Temperature of sampling; 0: always the most likely token."""
    top_p: float
    """Probability mass to sample from: the most likely tokens whose probabilities add up to this number; needs a
    temperature above 0."""
    seed: int | None
    """Seed of sampling; null: a different seed every time."""
    thoughts: ShownThoughts
    """Whether the terminal shows the thought before an answer, if the model was taught thoughts. It is no part of the
    answer."""
    serve: bool
    """Whether to serve a web page for the browser instead of a conversation in the terminal."""
    host: str
    """Address on which the web page is served."""
    port: int
    max_upload_mb: int
    """Maximum size in MiB of an image that is uploaded to the web page."""
    max_images: int
    """Maximum number of images in a conversation on the web page."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value, or a combination of values, is not allowed."""
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
        if self.messages is not None and (self.image is not None or self.question is not None or self.serve):
            raise ConfigError(
                f"messages={self.messages} has the question and the images; leave image, question and serve out"
            )
        if self.serve and (self.image is not None or self.question is not None):
            raise ConfigError("serve=true takes images and questions from the page; leave image and question out")


@dataclass(kw_only=True, slots=True)
class ConversionConfig:
    """Configuration keys of the command `export`, which converts a trained model from one format to another."""

    source: str
    """Model to convert: a run, one of its checkpoints, or a model folder (in this project's, transformers' or the
    original LLaVA's format)."""
    to: str | None
    """Folder to which the converted model is written."""
    accept: list[str]
    """Files within `source`, as relative paths, that were changed on purpose: their recorded digests are updated, and
    nothing is converted."""
    format: FolderFormat
    """Program that will read the written folder."""
    dtype: KeptDType
    """Dtype of the written weights; keep: the same as in the source."""
    gguf_clip: bool = False
    """With format=gguf: write a CLIP vision tower too, which llama.cpp computes wrongly."""
    base: str | None
    """Language model or whole LLaVA model to which the adapters in `source` belong; null: the model that `source`
    names."""
    language: str | None
    """Language model to use if `source` contains only a projector."""
    vision: str | None
    """If `source` is in the original LLaVA's format: vision tower to use instead of the one that `source` names; with
    format=llava: vision tower to name in the written folder."""
    template: str
    """Conversation template to record in the written folder if `source` does not name one; auto: the
    model's own chat template for LLaVA-NeXT and LLaVA-OneVision, otherwise v1."""
    image_aspect_ratio: AspectRatio | None
    """How images are fitted into the square input of the vision tower; null: the same as in the source."""
    overwrite: bool
    """Whether to replace an existing model folder at `to`."""
    push: str | None = None
    """Name on the Hugging Face hub under which the written folder is pushed: USER/NAME or USER/NAME@BRANCH. Without
    `to`, the folder `source` is pushed as it is, or the export in the run `source`."""
    push_private: bool = True
    """Whether a model that `push` creates on the hub can be seen only by its owner."""
    which: Which = Which.last
    """If `source` is a run: the step whose weights are exported; best needs checkpoint.best in the run."""
    verify: bool
    """Whether to load the written model and compare its logits with the source's."""

    def __post_init__(self) -> None:
        """Raise ConfigError if two keys do not go together."""
        if self.format is not FolderFormat.gguf:
            if self.dtype in (KeptDType.fp16, KeptDType.q8_0):
                raise ConfigError(f"dtype={self.dtype.value} is only for format=gguf; give keep, bf16 or fp32")
            if self.gguf_clip:
                raise ConfigError("gguf_clip=true is only for format=gguf; leave it out")
