"""Rewrite the configuration files that transformers 5 has saved for an exported model, so that transformers 4 reads the
same values from them, or refuses them.

transformers 5 keeps the settings of rotary embeddings in one field, `rope_parameters`, which transformers 4 ignores
without a message: it then takes its default frequencies. Programs on transformers 4 are older vLLM, SGLang and many
notebooks. transformers 5 reads the older fields too, if they agree with the new one.
"""

from typing import Any

from transformers import PretrainedConfig

NEEDS_5 = "needs transformers 5"
"""Value of `rope_theta` for a model that transformers 4 would compute differently. It computes with this field and
therefore fails; transformers 5 does not use it beside `rope_parameters`."""
SCALED = ("gemma", "gemma2", "vaultgemma")
"""Types of language models whose factor for embeddings transformers 4 also multiplies into image features."""
STRICT = ("phi3", "olmo2")
"""Types of language models that in transformers 4 call the kind of rotary scaling `type`, and accept no more keys."""
NESTED = ("gemma3_text", "olmo3")
"""Types of language models whose layers with sliding windows have other rotary embeddings in transformers 4, too."""
PARTIAL = {"gpt_neox": "rotary_pct", "gpt_neox_japanese": "rotary_pct"}
"""Types of language models -> their name of `partial_rotary_factor` in transformers 4, if it is another one."""
LAYERS = ("full_attention", "sliding_attention")
NEWER_KEYS = ("backend", "is_local", "local_files_only", "processor_class")
"""Keys of a `tokenizer_config.json` that transformers 5 writes and that no program needs."""


def with_older_fields(fields: dict[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Return the contents of a `config.json` that transformers 5 has saved (`config`), with fields for transformers 4
    added and the path from which it was loaded removed, also in the language model's and the vision tower's parts."""
    rewritten = {key: value for key, value in fields.items() if key != "_name_or_path"}
    for name in ("text_config", "vision_config"):
        if isinstance(rewritten.get(name), dict):
            rewritten[name] = with_older_fields(rewritten[name], getattr(config, name))
    if "dtype" in rewritten:
        rewritten["torch_dtype"] = rewritten["dtype"]
    for older, name in config.attribute_map.items():  # such as num_experts, which was renamed to num_local_experts
        if name in rewritten:
            rewritten.setdefault(older, rewritten[name])
    return rewritten | older_rope(rewritten)


def older_rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that tell transformers 4 the rotary embeddings of a model. `fields` are those of its
    configuration in the form of transformers 5, or of a part of it. If transformers 4 would compute something else,
    `rope_theta` is a text (`NEEDS_5`), so that it fails."""
    rope: dict[str, Any] = fields.get("rope_parameters") or {}
    kind = fields.get("model_type")
    if kind in SCALED:  # transformers 4 also multiplies image features by the factor for embeddings
        return {"rope_theta": NEEDS_5}
    by_layer = {layer: values for layer, values in rope.items() if isinstance(values, dict)}
    if not rope:
        return {}
    if not by_layer:
        return flat_rope(rope, fields)
    # transformers 4 knows other rotary embeddings for layers with sliding windows only in the types of NESTED, and
    # there without scaling
    full, sliding = (by_layer.get(layer) for layer in LAYERS)
    if kind not in NESTED or full is None or sliding is None or set(by_layer) != set(LAYERS):
        return {"rope_theta": NEEDS_5}
    plain = {"rope_theta": sliding["rope_theta"], "rope_type": "default"}
    same_theta = sliding["rope_theta"] == full["rope_theta"]
    if sliding != plain or (kind == "olmo3" and not same_theta):
        return {"rope_theta": NEEDS_5}
    local = {"rope_local_base_freq": sliding["rope_theta"]} if kind == "gemma3_text" else {}
    return flat_rope(full, fields) | local


def flat_rope(rope: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields, in the form of transformers 4, for rotary embeddings that are equal in all layers. `rope` is
    the field `rope_parameters` of `fields`. `rope_theta` becomes the text NEEDS_5, with which transformers 4 fails, if
    it would compute something else.

    Model types in PARTIAL have another name for `partial_rotary_factor` in transformers 4. Those in STRICT call the
    kind of scaling `type` there, and accept no further keys.
    """
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor", "type")}
    flat: dict[str, Any] = {"rope_theta": rope.get("rope_theta"), "rope_scaling": None}
    if "partial_rotary_factor" in rope:
        flat[PARTIAL.get(str(fields.get("model_type")), "partial_rotary_factor")] = rope["partial_rotary_factor"]
    if fields.get("model_type") in PARTIAL:
        flat["rotary_emb_base"] = flat["rope_theta"]
    kind = scaling["rope_type"]
    if kind in ("default", "axial"):
        return flat
    if kind == "longrope":  # transformers 4 takes the length from the configuration, and the factor from the lengths
        longest = fields["max_position_embeddings"]
        original = scaling.pop("original_max_position_embeddings", None)
        original = fields.get("original_max_position_embeddings") or original or longest
        flat["original_max_position_embeddings"] = original
        if scaling.get("attention_factor") is None and scaling.get("factor") not in (None, longest / original):
            return {"rope_theta": NEEDS_5}
        if fields.get("model_type") not in STRICT:
            scaling["original_max_position_embeddings"] = original
    if fields.get("model_type") in STRICT:
        scaling["type"] = scaling.pop("rope_type")
        names = {"type", "short_factor", "long_factor"} if kind == "longrope" else {"type", "factor"}
        if scaling.keys() != names:
            return {"rope_theta": NEEDS_5}
    return {**flat, "rope_scaling": scaling}


def older_tokenizer(fields: dict[str, Any], frozen: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of a `tokenizer_config.json`, saved by transformers 5, in a form that transformers 4 and 5
    read. `frozen` are the contents of the `tokenizer.json` beside it."""
    rewritten = {key: value for key, value in fields.items() if key not in NEWER_KEYS}
    if rewritten.get("tokenizer_class") == "TokenizersBackend":
        rewritten["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(rewritten.get("extra_special_tokens"), list):
        rewritten["additional_special_tokens"] = rewritten.pop("extra_special_tokens")
    before = frozen.get("pre_tokenizer") or {}
    if "add_prefix_space" in before:  # transformers 4 changes the component to this value, which is False by default
        rewritten["add_prefix_space"] = before["add_prefix_space"]
    return rewritten
