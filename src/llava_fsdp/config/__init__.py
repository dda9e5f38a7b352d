"""Define the configuration: every key that a user can set, with its type, its meaning and its checks. Imports no torch.

The values are in the YAML files under `conf/` and on the command line. Hydra composes them, and `load` converts the
result once into the dataclasses of this package, so that other modules do not use OmegaConf. Each module defines the
keys of one area; all classes are exported from here.
"""

from llava_fsdp.config.bounds import AUTO, at_least
from llava_fsdp.config.command_line.load import (
    SOURCES,
    config_dir,
    did_you_mean,
    load,
    nearest,
    schema_keys,
    without_hydra,
)
from llava_fsdp.config.commands import (
    ChatConfig,
    ConversionConfig,
    DoctorConfig,
    EvaluateConfig,
    LaunchConfig,
    PlanConfig,
    PrepareConfig,
    PrepareKeys,
    SweepConfig,
    SweepKeys,
    TrainedModelConfig,
)
from llava_fsdp.config.keys.data import (
    FULL_WEIGHT,
    HELDOUT,
    OWN_TEMPLATE,
    DataConfig,
    HeldOutConfig,
    SamplerConfig,
    SourceConfig,
    StageConfig,
    ValConfig,
    fixed_part,
    is_remote,
    paths_in,
)
from llava_fsdp.config.keys.distributed import (
    ActivationCheckpointingConfig,
    CommConfig,
    OffloadConfig,
    ParallelConfig,
    PrecisionConfig,
    ScalerConfig,
    ShardingConfig,
)
from llava_fsdp.config.keys.enums import (
    ActivationCheckpointing,
    Answers,
    AspectRatio,
    Attention,
    BadRecords,
    CompatName,
    ContextHow,
    Devices,
    DType,
    EmptyThoughts,
    Examine,
    ExportDType,
    Feature,
    FolderFormat,
    Format,
    History,
    KeptDType,
    LabelWeights,
    LinearKind,
    LoraBias,
    LossKernel,
    MasterDType,
    Metric,
    MomentDType,
    Normalize,
    OffloadMode,
    OnSaveError,
    PairForm,
    PairReference,
    Parity,
    Part,
    PatchMerge,
    PipelineSchedule,
    Pixels,
    Quantizer,
    SamplerName,
    Schedule,
    ShownThoughts,
    Source,
    SpecialTokens,
    Strategy,
    SweepMetric,
    Task,
    Thoughts,
    TooLong,
    WandbMode,
)
from llava_fsdp.config.keys.model import LoraConfig, ModelConfig, QuantizeConfig, part_and_blocks
from llava_fsdp.config.keys.train import (
    CheckpointConfig,
    CompatConfig,
    ExportConfig,
    LossConfig,
    NumericConfig,
    OptimConfig,
    PrefConfig,
    TrackConfig,
)
from llava_fsdp.config.rules import Config, check_profile
