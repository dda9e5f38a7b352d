"""What rows of family_table.py are made of: chat templates, and fields that several families share.

Where a row says nothing else, the language model has width 72, 6 heads, and 2 heads of keys and values. The vision
tower has width 36 and 3 heads, and gets images of 20 x 20 pixels in patches of 5 x 5.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Token(str):
    """A special token in a configuration, instead of its id."""

    __slots__ = ()


@dataclass(frozen=True)
class ChatCode:
    """A chat template in Jinja that writes IMAGE for an image and VIDEO for a video."""

    before: str
    """Jinja code before the first message."""
    answer: tuple[str, str]
    """Texts before and after an answer; `user` and `system` likewise."""
    user: tuple[str, str]
    system: tuple[str, str]
    end: str
    """The special token that ends an answer."""
    tokens: tuple[str, ...]
    """All special tokens that the template writes, without `<s>` and `</s>`."""

    @property
    def code(self) -> str:
        content = (
            "{%- if m['content'] is string -%}{{ m['content'] }}{%- else -%}{%- for c in m['content'] -%}"
            "{%- if c['type'] == 'image' -%}{{ 'IMAGE' }}{%- elif c['type'] == 'video' -%}{{ 'VIDEO' }}{%- else -%}"
            "{{ c['text'] }}{%- endif -%}{%- endfor -%}"
            "{%- endif -%}"
        )
        roles = [("user", self.user), ("assistant", self.answer), ("system", self.system)]
        texts = "".join(
            f"{{%- if m['role'] == '{role}' -%}}{{{{ '{begin}' }}}}{content}{{{{ '{end}' }}}}{{%- endif -%}}"
            for role, (begin, end) in roles
        )
        prompt = f"{{%- if add_generation_prompt -%}}{{{{ '{self.answer[0]}' }}}}{{%- endif -%}}"
        return f"{self.before}{{%- for m in messages -%}}{texts}{{%- endfor -%}}{prompt}"


TEMPLATES = {
    "chatml": ChatCode(
        before="",
        answer=(r"<|im_start|>assistant\n", r"<|im_end|>\n"),
        user=(r"<|im_start|>user\n", r"<|im_end|>\n"),
        system=(r"<|im_start|>system\n", r"<|im_end|>\n"),
        end="<|im_end|>",
        tokens=("<|im_start|>", "<|im_end|>"),
    ),
    "turns": ChatCode(
        before="{{ bos_token }}",
        answer=(r"<start_of_turn>model\n", r"<end_of_turn>\n"),
        user=(r"<start_of_turn>user\n", r"<end_of_turn>\n"),
        system=(r"<start_of_turn>system\n", r"<end_of_turn>\n"),
        end="<end_of_turn>",
        tokens=("<start_of_turn>", "<end_of_turn>"),
    ),
    "inst": ChatCode(
        before="{{ bos_token }}",
        answer=("", "</s>"),
        user=("[INST]", "[/INST]"),
        system=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        end="</s>",
        tokens=("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ),
    "roles": ChatCode(
        before="",
        answer=(r"ASSISTANT:\n", r"</s>\n"),
        user=(r"USER:\n", r"\n"),
        system=("", r"\n\n"),
        end="</s>",
        tokens=(),
    ),
}


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    kind: str
    """Type of the model (`model_type`)."""
    config: Mapping[str, Any]
    tokens: Mapping[str, str]
    """{attribute of the tokenizer: special token}."""
    image: tuple[str, Mapping[str, Any]]
    """(model type whose image processor it is, fields)."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the processor."""
    more_tokens: tuple[str, ...] = ()
    """Special tokens without an attribute."""
    image_text: str = "<image>"
    """What the chat template writes for an image."""
    video_text: str = ""
    """What it writes for a video."""
    template: str = "chatml"
    processor: str = ""
    """Model type of the processor; empty: `kind`."""
    video: str = ""
    """Model type of the video processor; empty: without one."""
    video_fields: Mapping[str, Any] = field(default_factory=dict)
    image_attributes: Mapping[str, Any] = field(default_factory=dict)
    adds_bos: bool = False
    """Whether the tokenizer puts the BOS token before a text."""

    @property
    def needs_torchvision(self) -> bool:
        """Whether its processor cannot be made without torchvision."""
        return bool(self.video) or self.image[0] in WITHOUT_PIL or self.processor == "pixtral"


WITHOUT_PIL = ("cohere2_vision", "kimi_k25", "lfm2_vl", "llama4", "minimax_m3_vl", "perception_lm")
"""Types whose only image processor is torchvision's."""

Fields = dict[str, Any]
WIDTH, HEADS, KEYS, HEAD, VOCABULARY = 72, 6, 2, 12, 487
TEXT: Fields = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 88, "num_hidden_layers": 3,
    "num_attention_heads": HEADS, "num_key_value_heads": KEYS, "head_dim": HEAD, "max_position_embeddings": 4096,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0, "initializer_range": 0.2,
}  # fmt: skip
TOWER: Fields = {
    "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 3,
    "attention_dropout": 0.0, "initializer_range": 0.2,
}  # fmt: skip
SIDE, PATCH = 20, 5
SQUARE: Fields = {"height": SIDE, "width": SIDE}
SIZES = {"image_size": SIDE, "patch_size": PATCH}
SIGLIP: Fields = {"model_type": "siglip_vision_model", **TOWER, **SIZES, "vision_use_head": False}
CLIP: Fields = {"model_type": "clip_vision_model", **TOWER, **SIZES, "projection_dim": 36}
PIXTRAL: Fields = {"model_type": "pixtral", **TOWER, "image_size": 80, "patch_size": PATCH, "head_dim": HEAD}
RESNET: Fields = {
    "model_type": "resnet", "embedding_size": 7, "hidden_sizes": [7, 9, 14, 22], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "hidden_size": 22,
}  # fmt: skip
"""A vision tower with batch normalization."""
LLAMA, QWEN2 = {**TEXT, "model_type": "llama"}, {**TEXT, "model_type": "qwen2"}
MISTRAL = {**TEXT, "model_type": "mistral", "sliding_window": None}
COHERE2 = {**TEXT, "model_type": "cohere2", "sliding_window": 4096, "logit_scale": 0.25}
EXPERTS: Fields = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED: Fields = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
GRIDS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]


def rotary(sections: list[int], **fields: object) -> Fields:
    """Rotary positions of three axes: time, height and width."""
    own = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **fields}
    return {"rope_parameters": own}


AXES = rotary([2, 2, 2])
HALF = rotary([1, 1, 1], partial_rotary_factor=0.5)


def ids(**names: str) -> Fields:
    return {field: Token(token) for field, token in names.items()}


def grid_tower(**fields: object) -> Fields:
    """A vision tower for images of any size in whole patches, of which 2 x 2 become a token."""
    return {
        "depth": 2, "hidden_size": 36, "num_heads": 3, "patch_size": PATCH, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "initializer_range": 0.2, "intermediate_size": 50, "out_hidden_size": WIDTH, **fields,
    }  # fmt: skip


VIDEO_SIZE = {"shortest_edge": 16 * PATCH**2, "longest_edge": 512 * PATCH**2}


def qwen(kind: str, text: Fields, vision: Fields, **others: Any) -> Family:
    begin, image, end, video = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
    size = {"shortest_edge": 16 * PATCH**2, "longest_edge": 256 * PATCH**2}
    tokens = ids(image_token_id=image, video_token_id=video, vision_start_token_id=begin, vision_end_token_id=end)
    return Family(
        kind,
        {"text_config": {**TEXT, **text}, "vision_config": vision, "tie_word_embeddings": False, **tokens},
        {"image_token": image, "video_token": video},
        ("qwen2_vl", {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, "size": size}),
        more_tokens=(begin, end),
        image_text=begin + image + end,
        video_text=begin + video + end,
        **{"video": "qwen2_vl", "video_fields": {"patch_size": PATCH, "size": VIDEO_SIZE}, **others},
    )


def glm(kind: str, processor: str, text: Fields) -> Family:
    image, video = "<|image|>", "<|video|>"
    around = ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")
    size = {"shortest_edge": 32 * PATCH**2, "longest_edge": 512 * PATCH**2}
    tokens = ids(
        image_token_id=image, video_token_id=video, image_start_token_id=around[0], image_end_token_id=around[1],
        video_start_token_id=around[2], video_end_token_id=around[3],
    )  # fmt: skip
    vision = grid_tower(image_size=2 * SIDE)
    # with weights as large as elsewhere, the class's own gradients in float32 are up to 2.6e-5 off those in float64;
    # with these, 6e-6
    small = {**TEXT, "initializer_range": 0.1}
    return Family(
        kind,
        {"text_config": {**small, **text}, "vision_config": vision, **tokens},
        {"image_token": image, "video_token": video},
        (processor, {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, "size": size}),
        more_tokens=around,
        image_text=around[0] + image + around[1],
        video_text=around[2] + video + around[3],
        processor=processor,
        video=processor,
        video_fields={"patch_size": PATCH, "size": VIDEO_SIZE},
    )


def pixtral(kind: str, config: Fields, tokens: tuple[str, str, str], merge: int, **others: Any) -> Family:
    """A vision tower for images of any size, whose rows of patches end with a token of their own."""
    names = {"image_token": tokens[0], "image_break_token": tokens[1], "image_end_token": tokens[2]}
    return Family(
        kind,
        {"vision_config": PIXTRAL, **config},
        names,
        ("pixtral", {"size": {"longest_edge": 2 * SIDE}, "patch_size": PATCH}),
        {"patch_size": PATCH, "spatial_merge_size": merge, **others.pop("fields", {})},
        image_text=tokens[0],
        **others,
    )


def tiles(kind: str) -> tuple[str, Fields]:
    """An image processor that cuts an image into up to 4 tiles."""
    return kind, {"size": SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}


def idefics(kind: str, **others: Any) -> Family:
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokens = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    size = {"longest_edge": 2 * SIDE}
    image = {"size": size, "max_image_size": {"longest_edge": SIDE}, "do_image_splitting": True}
    config = {
        "text_config": LLAMA,
        "vision_config": {**TOWER, **SIZES},
        "scale_factor": 2,
        **ids(image_token_id="<image>"),
    }
    return Family(kind, config, tokens, (kind, image), {"image_seq_len": 4}, tuple(places), **others)


QWEN3: dict[str, Any] = {
    "processor": "qwen3_vl", "video": "qwen3_vl", "video_fields": {"patch_size": PATCH, "size": VIDEO_SIZE},
}  # fmt: skip
IMAGE = {"image_token": "<image>"}
IMAGE_INDEX = ids(image_token_index="<image>")
IMG = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
IMG_NAMES = dict(zip(("image_token", "image_break_token", "image_end_token"), IMG, strict=True))
PADS = ("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>")
DEEP = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], "depth": 3}
WINDOWS = {"window_size": 20, "fullatt_block_indexes": [1]}
# The outputs of linear attention are normalized, and here they are small: a tenth of them is below 1e-3. With an
# epsilon of 1e-6, the division makes gradients a thousand times larger, and rounding errors with them: in bf16, the
# gradient norm of transformers' own class is 31 % off that in fp32. With 1e-3 it is 0.5 % off.
LINEAR = {
    "linear_key_head_dim": 12, "linear_value_head_dim": 12, "linear_num_key_heads": 3, "linear_num_value_heads": 6,
    "num_hidden_layers": 4, "rms_norm_eps": 1e-3,
    **rotary([1, 1, 1], partial_rotary_factor=0.5, mrope_interleaved=True),
}  # fmt: skip
COHERE_TOKENS = {
    "image_token": "<image>", "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}  # fmt: skip
OVIS = ("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
LLAMA4 = ("<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
MINIMAX = ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[")
LFM_TILES = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5))
CROP = {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE}
KIMI_TEXT = {
    **{key: value for key, value in TEXT.items() if key != "head_dim"}, **ROUTED, "model_type": "deepseek_v3",
    "q_lora_rank": 18, "kv_lora_rank": 18, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 12,
    "num_key_value_heads": HEADS,
}  # fmt: skip
QFORMER = {
    "model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 50, "cross_attention_frequency": 1,
    "use_qformer_text_input": False, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
VQ = {
    "embed_dim": 4, "num_embeddings": 9, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1, 1],
    "num_res_blocks": 1, "projection_dim": WIDTH, "image_token_embed_dim": WIDTH, "num_patches": 4,
}  # fmt: skip
TIMM = {
    "model_type": "timm_wrapper", "architecture": "vit_pe_core_tiny_patch16_384", "do_pooling": False, "num_labels": 0,
    "num_classes": 0, "global_pool": "",
    "model_args": {
        "embed_dim": 36, "depth": 2, "num_heads": 3, "img_size": [SIDE, SIDE], "patch_size": PATCH, "global_pool": "",
        "use_post_transformer_norm": False, "init_values": 0.1, "ref_feat_shape": [4, 4],
    },
}  # fmt: skip
