"""A small random model of every architecture of mlx-lm that has experts.

``CONFIGS`` holds one config a module of ``mlx_lm.models``. Which modules have experts is found by
reading mlx-lm's own source (`expert_modules`), so a new one cannot be forgotten.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.makers import save_shards

VOCAB = 320
HIDDEN = 64
WIDTH = 32
EXPERTS = 8

# Names that most configs share; each takes what it knows.
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "norm_topk_prob": True,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
}
_SHARED = {"n_shared_experts": 1, "num_shared_experts": 1, "shared_expert_intermediate_size": 48}
_MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_GROUPS = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5}
_DEEPSEEK = {**_SHARED, **_MLA, **_GROUPS, "first_k_dense_replace": 1}
_INDEXER = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8}
_LINEAR_QWEN = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "full_attention_interval": 2,
}
_GRANITE = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "intermediate_size": WIDTH,
    "tie_word_embeddings": True,
}
_KDA = {"kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 4, "head_dim": 32}
_LONGCAT = {
    **_MLA,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 96,
    "moe_topk": 2,
    "expert_ffn_hidden_size": WIDTH,
    "zero_expert_num": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "routed_scaling_factor": 1.5,
}
_QWEN3 = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]


def _text(model_type: str, **more: Any) -> dict[str, Any]:
    return {"text_config": {**_BASE, "model_type": model_type, **more}}


_GEMMA4 = {
    "num_hidden_layers": 4,
    "global_head_dim": 32,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "enable_moe_block": True,
    "top_k_experts": 2,
    "use_double_wide_mlp": False,
    "tie_word_embeddings": True,
}
_MISTRAL4 = {
    **_DEEPSEEK,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16,
    },
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Klear": {
        **_SHARED, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [0],
    },
    "afmoe": {
        "layer_types": _SLIDING, "num_shared_experts": 1, "num_dense_layers": 1,
        "n_group": 2, "topk_group": 1, "sliding_window": 16,
    },
    "bailing_hybrid": {
        **_DEEPSEEK, "layer_group_size": 2, "group_norm_size": 2, "num_hidden_layers": 4,
    },
    "bailing_moe": {**_SHARED, "first_k_dense_replace": 1, "use_bias": True},
    "bailing_moe_linear": {
        **_SHARED, "first_k_dense_replace": 1, "layer_group_size": 2, "group_norm_size": 2,
        "num_hidden_layers": 4, "topk_group": 1,
    },
    "bailing_moe_v3": {
        **_DEEPSEEK, "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"],
        "layer_group_size": 2, "num_hidden_layers": 4, "head_dim": 32,
        "moe_shared_expert_intermediate_size": 48,
    },
    "dbrx": {
        "d_model": HIDDEN, "n_layers": 2, "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": WIDTH, "moe_num_experts": EXPERTS, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek": {**_SHARED, "first_k_dense_replace": 1},
    "deepseek_v2": {
        **_DEEPSEEK, "topk_method": "group_limited_greedy",
        "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256,
            "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        },
    },
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": {**_DEEPSEEK, **_INDEXER},
    "deepseek_v41": {
        "head_dim": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 16,
        "rms_norm_eps": 1e-6, "sliding_window": 16, "compress_ratios": [0, 4, 4],
        "kv_source_layer_ids": [1], "index_source_layer_ids": [1], "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 2, "candidate_block_size": 2, "index_n_heads": 2,
        "index_head_dim": 16, "index_topk": 4, "num_key_value_heads": 1, "hc_mult": 2,
    },
    "dots1": {**_SHARED, **_GROUPS, "first_k_dense_replace": 1},
    "ernie4_5_moe": {
        "use_bias": True, "moe_num_experts": EXPERTS, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "exaone_moe": {
        **_SHARED, **_GROUPS, "sliding_window": 16, "layer_types": _SLIDING,
        "is_moe_layer": [False, True, True],
    },
    "gemma4": {
        **_text("gemma4_text", **_GEMMA4), "model_type": "gemma4", "vocab_size": VOCAB,
    },
    "gemma4_text": _GEMMA4,
    "glm4_moe": {
        **_SHARED, **_GROUPS, "first_k_dense_replace": 1, "rope_scaling": None,
        "use_qk_norm": True, "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": {
        **_DEEPSEEK, **_INDEXER, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "moe_layer_freq": 1, "rope_parameters": {"rope_theta": 10000.0},
    },
    "gpt_oss": {
        "intermediate_size": WIDTH, "sliding_window": 16, "layer_types": _SLIDING,
        "rope_theta": 10000,
    },
    "granitemoe": _GRANITE,
    "granitemoehybrid": {
        **_GRANITE, "shared_intermediate_size": 48, "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_proj_bias": False, "mamba_d_state": 32,
        "mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_conv_bias": False,
    },
    "hunyuan": {
        "moe_topk": [2, 1, 3], "num_shared_expert": [1, 1, 2],
        "moe_intermediate_size": [32, 64, 32], "use_mixed_mlp_moe": True, "use_qk_norm": True,
        "use_cla": False, "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        "num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2,
        "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_d_conv": 4,
        "mamba_d_state": 16, "mamba_expand": 2, "intermediate_size": WIDTH,
    },
    "kimi_k25": {**_text("deepseek_v3", **_DEEPSEEK), "model_type": "kimi_k25"},
    "kimi_k3": {
        **_text(
            "kimi_linear", **_MLA, linear_attn_config={**_KDA, "short_conv_kernel_size": 4,
                "use_full_rank_gate": True},
            num_experts_per_token=2, num_shared_experts=1, first_k_dense_replace=1,
            routed_expert_hidden_size=32, latent_moe_use_norm=True, activation_situ_beta=1.0,
            activation_situ_linear_beta=1.0, num_expert_group=1,
        ),
        "model_type": "kimi_k3",
    },
    "kimi_linear": {
        **_MLA, "linear_attn_config": {**_KDA, "short_conv_kernel_size": 4}, "head_dim": 32,
        "model_max_length": 1024, "num_experts_per_token": 2, "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "kimi_vl": {**_text("deepseek_v3", **_DEEPSEEK), "model_type": "kimi_vl"},
    "laguna": {
        "shared_expert_intermediate_size": 48, "sliding_window": 16, "layer_types": _SLIDING,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_attention_heads_per_layer": [4, 4, 4],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "lfm2_moe": {
        "norm_eps": 1e-6, "conv_bias": True, "conv_L_cache": 3, "full_attn_idxs": [1],
        "num_dense_layers": 1, "use_expert_bias": True,
    },
    "llama4": {
        **_text(
            "llama4", attention_chunk_size=16, interleave_moe_layer_step=2, num_hidden_layers=4,
            intermediate_size=WIDTH, intermediate_size_mlp=96, num_experts_per_tok=1,
            use_qk_norm=True, rope_scaling=None,
        ),
        "model_type": "llama4",
    },
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {
        **_LONGCAT, "ngram_vocab_size_ratio": 3, "emb_neighbor_num": 3, "emb_split_num": 2,
    },
    "mellum": {
        "sliding_window": 16, "layer_types": _SLIDING,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")},
    },
    "mimo_v2_flash": {
        **_SHARED, **_GROUPS, "hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [0, 1, 1],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
        "sliding_window_size": 16, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-6, "swa_rope_theta": 10000.0, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "v_head_dim": 16, "swa_head_dim": 16, "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.5,
    },
    "minimax": {
        "intermediate_size": WIDTH, "shared_intermediate_size": 0, "rotary_dim": 8,
    },
    "minimax_m3_vl": {
        **_text(
            "minimax_m3", intermediate_size=WIDTH, dense_intermediate_size=96,
            shared_intermediate_size=WIDTH, moe_layer_freq=[0, 1, 1],
        ),
        "model_type": "minimax_m3_vl",
    },
    "mistral3": {**_text("mistral4", **_MISTRAL4), "model_type": "mistral3"},
    "mistral4": _MISTRAL4,
    "mixtral": {"intermediate_size": WIDTH},
    "muse_spark": {
        **_text(
            "muse_spark_text", post_norm_eps=1e-6, rope_parameters={"rope_theta": 10000.0},
            layer_rope_theta=[10000.0, 0, 10000.0], layer_types=_SLIDING, sliding_window=16,
            final_logit_softcapping=30.0, output_multiplier=1.0, moe_hidden_size=32,
        ),
        "model_type": "muse_spark", "audio_config": {"out_hidden_size": HIDDEN},
    },
    "nemotron_h": {
        **_GROUPS, "mamba_num_heads": 4, "mamba_head_dim": 32, "mamba_proj_bias": False,
        "ssm_state_size": 32, "conv_kernel": 4, "n_groups": 2, "mlp_bias": False,
        "layer_norm_epsilon": 1e-6, "use_bias": False, "use_conv_bias": True,
        "num_hidden_layers": 5, "hybrid_override_pattern": ["M", "E", "*", "E", "-"],
        "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 48,
        "time_step_limit": [0.0, 100.0],
    },
    "olmoe": {"intermediate_size": WIDTH, "mlp_bias": True},
    "phimoe": {
        "intermediate_size": WIDTH,
        "rope_scaling": {
            "type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8,
            "long_mscale": 1.2, "short_mscale": 1.2, "original_max_position_embeddings": 512,
        },
    },
    "phixtral": {
        "num_vocab": VOCAB, "model_dim": HIDDEN, "num_heads": 4, "num_layers": 2, "rotary_dim": 8,
    },
    "prism_hadamard_qwen35": {
        **_text(
            "qwen3_5_moe", **_LINEAR_QWEN, shared_expert_intermediate_size=48, hidden_size=128
        ),
        "model_type": "prism_hadamard_qwen35", "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "lm_head", "embedding": False, "dtype": "float16", "block": 0}],
    },
    "qwen2_moe": {"shared_expert_intermediate_size": 48},
    "qwen3_5": {
        **_text("qwen3_5", **_LINEAR_QWEN, shared_expert_intermediate_size=48),
        "model_type": "qwen3_5",
    },
    "qwen3_5_moe": {
        **_text("qwen3_5_moe", **_LINEAR_QWEN, shared_expert_intermediate_size=48),
        "model_type": "qwen3_5_moe",
    },
    "qwen3_moe": {**_QWEN3, "num_hidden_layers": 4, "mlp_only_layers": [2]},
    "qwen3_next": {**_LINEAR_QWEN, "shared_expert_intermediate_size": 48},
    "qwen3_vl_moe": {**_text("qwen3_moe", **_QWEN3), "model_type": "qwen3_vl_moe"},
    "solar_open": {
        **_SHARED, **_GROUPS, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
    },
    "step3p5": {
        "num_attention_groups": 2, "layer_types": _SLIDING, "sliding_window": 16,
        "moe_num_experts": EXPERTS, "moe_top_k": 2, "share_expert_dim": 48,
        "moe_layers_enum": "1,2", "swiglu_limits": [0.0, 0.0, 0.5],
        "swiglu_limits_shared": [0.0, 0.5, 0.0],
    },
}  # fmt: skip

# Modules that use experts and have no small model here, and why.
EXCEPTIONS: dict[str, str] = {}
# Those whose attention runs on Metal only: on the CPU their containers are compared one by one.
METAL_ONLY = {"muse_spark"}
# Those that are refused, with words of the error, and why.
REFUSED = {"dbrx": "separate modules"}
REASONS = {
    "dbrx": "mlx-lm keeps its experts as separate modules and runs them one by one, not stacked"
}


def config_of(module: str, **more: Any) -> dict[str, Any]:
    """The whole config of the small model of ``mlx_lm.models.<module>``, changed by ``more``."""
    given = {**CONFIGS[module], **more}
    base = {} if "text_config" in given else _BASE
    return {"model_type": module, "torch_dtype": "float32", **base, **given}


def expert_modules() -> set[str]:
    """Modules of ``mlx_lm.models`` that use experts themselves or build another that does."""
    import mlx_lm.models as package

    folder = Path(list(package.__path__)[0])
    sources = {p.stem: p.read_text() for p in folder.glob("*.py") if p.stem != "__init__"}
    del sources["switch_layers"]
    found = {
        name
        for name, text in sources.items()
        if re.search(r"\bSwitch(GLU|MLP|Linear)\b|\bself\.experts = \[", text)
    }
    while True:
        users = "|".join(sorted(found))
        uses = re.compile(rf"from \.({users}) import|from \. import [^\n]*\b({users})\b")
        more = {n for n, text in sources.items() if n not in found and uses.search(text)}
        if not more:
            return found
        found |= more


def build(module: str, seed: int = 0, **more: Any) -> tuple[Any, dict[str, Any]]:
    """The small model of ``module``, with random weights everywhere, and its config."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten
    from mlx_lm.utils import _get_classes

    config = config_of(module, **more)
    mx.random.seed(seed)
    model_class, args_class = _get_classes(json.loads(json.dumps(config)))
    model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    fresh = []
    for name, array in tree_flatten(model.parameters()):
        kind = name.rpartition(".")[2]
        if array.dtype == mx.uint32:
            array = mx.random.randint(0, 1 << 16, array.shape).astype(mx.uint32)
        elif kind == "scales" or "bias" in kind:
            array = 0.02 * mx.random.normal(array.shape)
        elif array.ndim == 2 and not array.any():  # routers, mostly: all tokens would go one way
            array = mx.random.normal(array.shape)
        else:
            array = array.astype(mx.float32)
        fresh.append((name, array))
    model.update(tree_unflatten(fresh))
    model.eval()
    return model, config


def save(path: Path, tensors: dict[str, Any], config: dict[str, Any], shards: int = 2) -> Path:
    """Write a model folder without a tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    save_shards(path, tensors, shards)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def make(path: Path, module: str) -> Path:
    """Write the small model of ``module`` as mlx_lm.convert would: the names it has in memory."""
    from mlx.utils import tree_flatten

    model, config = build(module)
    return save(path, dict(tree_flatten(model.parameters())), config)
