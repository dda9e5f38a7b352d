"""Table of rules: what the flags become that LLaVA-NeXT's training program has beside those of LLaVA's (LLaVA-NeXT
train.py:60-173), and those to which it gives another meaning or default."""

from collections.abc import Mapping

from llava_fsdp.migrate.flags import flag_functions as rules
from llava_fsdp.migrate.flags.llava_flags import FLAGS, METRICS, flags_with
from llava_fsdp.migrate.source.source_run import Flag
from llava_fsdp.migrate.to_keys.keys import (
    OFF,
    IfDecided,
    OnlyIf,
    RuleContext,
    Translation,
    becomes,
    implied,
    mapped,
    no_effect,
    only_off,
    unsupported,
)
from llava_fsdp.migrate.to_keys.next_overrides import LIMITED, PARTS, grid_of

NO_RESAMPLER = "models here have no resampler between vision tower and projector"
RESAMPLER = no_effect("only with --mm_resampler_type")
VIDEO = no_effect("only for videos, which are read with data.image_aspect_ratio=anyres_max")


def is_next(flags: Mapping[str, object]) -> bool:
    """Return whether the flags of a command are for LLaVA-NeXT's program: at least one is a flag that LLaVA's program
    lacks, or `image_aspect_ratio` has a value that only LLaVA-NeXT knows."""
    aspect = str(flags.get("image_aspect_ratio", ""))
    return bool(NEXT_ALONE.keys() & flags.keys()) or aspect.startswith(("anyres", "highres", "crop_split"))


def aspect_ratio(context: RuleContext, value: object) -> Translation:
    """Return what --image_aspect_ratio, with LLaVA-NeXT's values, becomes in llava_fsdp."""
    text = context.text_of_override("data.image_aspect_ratio")
    if value in ("square", "pad", "anyres"):
        return mapped(text)
    if LIMITED.fullmatch(str(value)):
        return mapped(f"{text}, {context.text_of_override('data.max_tiles')}")
    return unsupported(f"{value}: images are square, padded, or cut into tiles by anyres or anyres_max_N; {text}")


def patch_merge(context: RuleContext, value: object) -> Translation:
    """Return what --mm_patch_merge_type (how the features of an image's tiles are joined) becomes in llava_fsdp. The
    command has an override for it (in `context.decided`) only if images are cut into tiles."""
    if "model.patch_merge" not in context.decided:
        return no_effect("only for images of several tiles")
    text = context.text_of_override("model.patch_merge")
    if value in ("flat", "spatial", "spatial_unpad"):
        return mapped(text)
    return unsupported(f"{value}: tiles are joined flat, spatial or spatial_unpad; {text}")


def grid(context: RuleContext, value: object) -> Translation:
    """Return what --image_grid_pinpoints (the sizes to which images of several tiles are resized) becomes. The command
    has an override of `model.patch_merge` (in `context.decided`) only if images are cut into tiles."""
    if "model.patch_merge" not in context.decided:
        return no_effect("only for images of several tiles")
    found = grid_of(context.run)  # None: llava_fsdp's default; a text: why the sizes are not known
    if isinstance(found, str):
        return unsupported(found)
    return (
        implied("the default of anyres and anyres_max here")
        if found is None
        else mapped(context.text_of_override("data.grid_pinpoints"))
    )


def tunable(context: RuleContext, value: object) -> Translation:
    """Return what --mm_tunable_parts (the parts of the model that train) becomes in llava_fsdp. `context.run.tunable`
    has the parts; None without the flag."""
    if context.run.tunable is None:  # other flags, such as tune_mm_mlp_adapter, say what trains
        return implied("by the other flags")
    text = context.text_of_override("model.train")
    unknown = sorted(set(context.run.tunable) - PARTS.keys())
    if unknown:
        return unsupported(f"{', '.join(unknown)}: parts are {', '.join(PARTS)}; {text}")
    return mapped(f"{context.text_of_override('stage')}, {text}")


def replaced_by_tunable(context: RuleContext, value: object) -> Translation:
    """Return what a flag that turns the training of a part on or off becomes in llava_fsdp; nothing if LLaVA-NeXT's
    --mm_tunable_parts is given, which replaces it."""
    if context.run.tunable is not None:
        return no_effect("--mm_tunable_parts replaces it") if value else OFF
    return mapped(context.text_of_override("model.train")) if value else OFF


def vision_lr(context: RuleContext, value: object) -> Translation:
    """Return what --mm_vision_tower_lr, the vision tower's learning rate, becomes: `optim.vision_lr`, if the command
    has it."""
    if value is None:
        return implied("the rate of all other parts")
    return IfDecided("optim.vision_lr", no_effect("the vision tower is not trained"))(context, value)


def prompt(context: RuleContext, value: object) -> Translation:
    """Return what LLaVA-NeXT's --version (the template of the conversations) becomes in llava_fsdp. Values that LLaVA
    knows too are translated by the rule for LLaVA's flag."""
    if value in ("qwen_1_5", "qwen_2"):
        return mapped(f"{context.text_of_override('data.template')}: the prompts that Qwen's own chat template makes")
    return rules.version(context, value)


def video_folder(context: RuleContext, value: object) -> Translation:
    """Return what --video_folder (the folder to which paths of videos are relative) becomes in llava_fsdp."""
    if not value or value == context.run.trainer_value("image_folder"):
        return implied("videos are looked for below data.images")
    return unsupported("videos are looked for below data.images: give a folder with both, and their paths in it")


def frames(key: str) -> IfDecided:
    return IfDecided(key, VIDEO)


NEXT_ALONE: Mapping[str, Flag] = {
    # ModelArguments
    "model_class_name": Flag(None, implied("the language model's class is that of its folder"), str),
    "mm_tunable_parts": Flag(None, tunable, str),
    "tune_mm_vision_resampler": Flag(False, only_off(NO_RESAMPLER)),
    "vision_tower_pretrained": Flag(None, only_off("model.vision names the folder of the weights"), str),
    "unfreeze_mm_vision_tower": Flag(False, replaced_by_tunable),
    "unfreeze_language_model": Flag(False, no_effect("never read (LLaVA-NeXT train.py:76)")),
    "mm_resampler_type": Flag(None, only_off(NO_RESAMPLER), str),
    **flags_with(RESAMPLER, mm_mask_drop_mode="fixed", mm_mask_drop_skip_percentage=0.0, mm_mask_drop_ratio=0.25,
           mm_mask_drop_ratio_upper=float, mm_mask_drop_ratio_lower=float, mm_spatial_pool_out_channels=int,
           mm_perceiver_depth=3, mm_perceiver_latents=32, mm_perceiver_ff_mult=4.0, mm_perceiver_pretrained=str,
           mm_qformer_depth=3, mm_qformer_latents=32, mm_qformer_pretrained=str),
    "mm_spatial_pool_stride": Flag(None, only_off("features of a video's frames are halved, as with 2", 2), int),
    "mm_spatial_pool_mode": Flag("bilinear", only_off("features of a video's frames are halved bilinearly",
                                                      "bilinear")),
    **flags_with(only_off("the language model keeps the rotary embeddings of its config.json"),
           rope_scaling_factor=float, rope_scaling_type=str),
    "s2": Flag(False, only_off("the vision tower sees every tile at one size")),
    "s2_scales": Flag("336,672,1008", no_effect("only with --s2")),
    "use_pos_skipping": Flag(False, only_off("positions follow each other")),
    "pos_skipping_range": Flag(4096, no_effect("only with --use_pos_skipping")),
    "mm_newline_position": Flag("grid", OnlyIf(
        ("grid", "one_token"), "of videos alone; the features of a video end with one line break, as transformers'",
        "the features of a video end with one line break, as transformers'")),
    "delay_load": Flag(True, implied("every part is read once")),
    "add_faster_video": Flag(False, only_off("a video has one sequence of features")),
    "faster_token_stride": Flag(10, no_effect("only with --add_faster_video")),
    # DataArguments
    "early_mix_text": Flag(False, only_off("records without images are trained on as they are")),
    "image_grid_pinpoints": Flag(None, grid, str),
    **flags_with(no_effect("only with --image_aspect_ratio highres or crop_split"), image_crop_resolution=int,
           image_split_resolution=int),
    "video_folder": Flag(None, video_folder, str),
    "video_fps": Flag(1.0, frames("data.video_fps")),
    "frames_upbound": Flag(0, frames("data.video_frames")),
    "add_time_instruction": Flag(False, only_off("the prompt does not tell the times of frames")),
    "force_sample": Flag(False, only_off("frames are taken by data.video_fps, at most data.video_frames")),
    # TrainingArguments
    "freeze_mm_vision_resampler": Flag(False, no_effect(NO_RESAMPLER)),
    "mm_vision_tower_lr": Flag(None, vision_lr, float),
    **flags_with(only_off("sampler.group_by_modality_length groups samples"), group_by_varlen=False,
           group_by_modality_length_auto=False),
    "verbose_logging": Flag(False, METRICS),
    "attn_implementation": Flag("flash_attention_2", implied("attention is PyTorch's own")),
    "trainer_mode": Flag("regular", only_off("gradients are those of backpropagation", "regular")),
    **flags_with(no_effect("only with --trainer_mode zo"), zo_eps=1e-3, zo_num_directions=1),
}  # fmt: skip
"""Flags that LLaVA-NeXT's training program has, and LLaVA's does not."""
NEXT_FLAGS: Mapping[str, Flag] = {
    **FLAGS,
    **NEXT_ALONE,
    "version": Flag("v0", prompt),
    "freeze_mm_mlp_adapter": Flag(False, replaced_by_tunable),
    "tune_mm_mlp_adapter": Flag(False, replaced_by_tunable),
    "mm_patch_merge_type": Flag("flat", patch_merge),
    "image_aspect_ratio": Flag("square", aspect_ratio),
    "model_max_length": Flag(4096, becomes("data.max_length", note="image tokens included")),
    "gradient_checkpointing": Flag(True, FLAGS["gradient_checkpointing"].rule),
}
