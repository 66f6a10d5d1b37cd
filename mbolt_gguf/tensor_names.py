"""What the tensors of a block are called in llama.cpp, from LLM_TENSOR_NAMES of llama-arch.cpp.

A tensor is ``blk.<layer>.<stem>`` and perhaps ``.weight``, ``.bias``, ``.scale`` or
``.input_scale``. Which stems have one entry an expert is in experts.py; those here have none, so
a length that happens to equal the number of experts means nothing.
"""

from __future__ import annotations

import re

BLOCK = re.compile(r"^blk\.(?P<layer>\d{1,6})\.(?P<rest>.+)$")
SUFFIXES = ("weight", "bias", "scale", "input_scale")

PLAIN_STEMS = frozenset(
    """
    altup_correct_coef altup_correct_scale altup_predict_coef altup_router altup_router_norm
    attn_compressor_ape attn_compressor_gate attn_compressor_kv attn_compressor_norm attn_conv_base
    attn_conv_proj attn_gate attn_k attn_k_b attn_k_norm attn_kv attn_kv_a_mqa attn_kv_a_norm
    attn_kv_b attn_norm attn_norm_2 attn_output attn_output_a attn_output_b attn_output_norm attn_q
    attn_q_a attn_q_a_norm attn_q_b attn_q_norm attn_qkv attn_res_score attn_rot_embd attn_sinks
    attn_sub_norm attn_v attn_v_b channel_mix_key channel_mix_lerp_k channel_mix_lerp_r
    channel_mix_receptance channel_mix_value ffn.act ffn_act ffn_conv_base ffn_conv_proj ffn_down
    ffn_down_shexp ffn_gate ffn_gate_inp_shexp ffn_gate_shexp ffn_latent_down ffn_latent_up ffn_norm
    ffn_norm_exps ffn_res_score ffn_routed_down ffn_routed_norm ffn_routed_up ffn_sub_norm ffn_up
    ffn_up_shexp hc_attn_base hc_attn_down hc_attn_fn hc_attn_inject hc_attn_norm hc_attn_scale
    hc_attn_up hc_ffn_base hc_ffn_down hc_ffn_fn hc_ffn_inject hc_ffn_norm hc_ffn_scale hc_ffn_up
    indexer.attn_k indexer.attn_q_b indexer.k_norm indexer.k_proj indexer.proj indexer.q_norm
    indexer.q_proj indexer_compressor_ape indexer_compressor_gate indexer_compressor_kv
    indexer_compressor_norm inp_gate laurel_l laurel_post_norm laurel_r layer_output_norm
    layer_output_scale nextn.eh_proj nextn.embed_tokens nextn.enorm nextn.hnorm
    nextn.shared_head_head nextn.shared_head_norm ple_conv1d ple_key ple_norm_conv ple_norm_key
    ple_norm_query ple_value post_attention_norm post_ffw_norm post_ffw_norm_1 post_ffw_norm_2
    post_norm pre_ffw_norm_2 proj shortconv.conv shortconv.in_proj shortconv.out_proj ssm_a
    ssm_alpha ssm_b_norm ssm_ba ssm_beta ssm_c_norm ssm_conv1d ssm_conv1d_k ssm_conv1d_q
    ssm_conv1d_v ssm_d ssm_dt ssm_dt_norm ssm_f_a ssm_f_b ssm_g ssm_g_a ssm_g_b ssm_in ssm_norm
    ssm_out ssm_x time_mix_a0 time_mix_a1 time_mix_a2 time_mix_decay time_mix_decay_w1
    time_mix_decay_w2 time_mix_first time_mix_g1 time_mix_g2 time_mix_gate time_mix_k_a time_mix_k_k
    time_mix_key time_mix_lerp_fused time_mix_lerp_g time_mix_lerp_k time_mix_lerp_r time_mix_lerp_v
    time_mix_lerp_w time_mix_lerp_x time_mix_ln time_mix_output time_mix_r_k time_mix_receptance
    time_mix_v0 time_mix_v1 time_mix_v2 time_mix_value time_mix_w0 time_mix_w1 time_mix_w2
    vis_attn_output vis_attn_qkv vis_down vis_gate vis_up
    """.split()
)


def parse(name: str) -> tuple[int, str, str] | None:
    """Layer, stem and suffix ("" without one) of the tensor ``name``; None outside the blocks."""
    found = BLOCK.match(name)
    if found is None:
        return None
    stem, _, suffix = found["rest"].rpartition(".")
    if stem and suffix in SUFFIXES:
        return int(found["layer"]), stem, suffix
    return int(found["layer"]), found["rest"], ""
