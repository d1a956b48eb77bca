# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The arguments that SGLang sets itself, whatever was asked for: /server_info tells the result.

Read out of the sources of SGLang 0.5.10 to 0.5.23: every field of ServerArgs that is assigned after parsing, in
ServerArgs' own methods (server_args.py, until 0.5.18 `self.x = ...`) or by the rules of arg_groups/*_hook.py (since
0.5.19 `declare_resolution`), by the model runner and at run time over HTTP. Paths are below sglang/srt/. Left out are
fields that keep a given value (model_path of a local folder, tp_size, context_length, host, port, max_total_tokens,
max_prefill_tokens, hicache_size, ...): one of those that differs is a finding.
"""

from __future__ import annotations

import typing as t

_GROUPS: tuple[tuple[str, str], ...] = (
    (
        "by the GPU's memory and the model (server_args.py _handle_gpu_memory_settings, arg_groups/memory_hook.py)",
        "mem_fraction_static chunked_prefill_size max_running_requests torch_compile_max_bs swa_full_tokens_ratio"
        " max_mamba_cache_size schedule_conservativeness pp_max_micro_batch_size",
    ),
    (
        "by the rules for CUDA graphs (server_args.py, arg_groups/cuda_graph_hook.py)",
        "cuda_graph_max_bs cuda_graph_bs cuda_graph_config cuda_graph_bs_decode cuda_graph_bs_prefill"
        " cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_backend_decode cuda_graph_backend_prefill"
        " disable_cuda_graph debug_cuda_graph piecewise_cuda_graph_compiler piecewise_cuda_graph_max_tokens"
        " piecewise_cuda_graph_tokens disable_piecewise_cuda_graph enable_torch_compile",
    ),
    (
        "by the hardware and the model's attention (server_args.py _handle_attention_backend_compatibility,"
        " arg_groups/attention_hook.py, platform_hook.py)",
        "attention_backend prefill_attention_backend decode_attention_backend dsa_decode_backend dsa_prefill_backend"
        " nsa_decode_backend nsa_prefill_backend dsv4_attn_backend linear_attn_decode_backend"
        " linear_attn_prefill_backend linear_attn_verify_backend sampling_backend page_size kv_cache_dtype dtype device"
        " disable_chunked_prefix_cache disable_radix_cache disable_overlap_schedule enable_mixed_chunk"
        " triton_attention_num_kv_splits enable_deterministic_inference mamba_scheduler_strategy"
        " mamba_radix_cache_strategy mamba_ssm_dtype uses_mamba_radix_cache disable_hybrid_swa_memory"
        " enable_page_major_kv_layout pre_warm_nccl enable_symm_mem enable_torch_symm_mem disable_custom_all_reduce"
        " enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion"
        " flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill"
        " enable_fused_qk_norm_rope",
    ),
    (
        "by the model's weights and experts (server_args.py _handle_moe_kernel_config, arg_groups/moe_hook.py,"
        " model_hook.py)",
        "quantization moe_runner_backend moe_a2a_backend deepep_mode disable_shared_experts_fusion"
        " enforce_shared_experts_fusion flashinfer_a2a_dispatch_type boundary_reduction enable_w4a4_mxfp4_megamoe"
        " eplb_algorithm ep_dispatch_algorithm expert_distribution_recorder_buffer_size"
        " expert_distribution_recorder_mode is_embedding enable_tokenizer_batch_encode",
    ),
    (
        "by the parallel layout (server_args.py _handle_data_parallelism, arg_groups/parallel_hook.py)",
        "ep_size dp_size attn_dp_size attn_cp_size moe_dp_size moe_dense_tp_size enable_dp_attention enable_dp_lm_head"
        " enable_dp_attention_local_control_broadcast load_balance_method cp_strategy prefill_cp_mode"
        " dsa_prefill_cp_mode enable_prefill_cp enable_prefill_context_parallel enable_dsa_prefill_context_parallel"
        " enable_cp_tp_group_sharing elastic_ep_initial_size ep_join_mode mooncake_ib_device",
    ),
    (
        "by the rules for HiCache (server_args.py _handle_hicache, arg_groups/hicache_hook.py), or over HTTP at run"
        " time",
        "hicache_io_backend hicache_mem_layout hicache_ratio hicache_write_policy hicache_storage_backend"
        " hicache_storage_backend_extra_config hicache_storage_prefetch_policy",
    ),
    (
        "by the rules for speculative decoding (server_args.py _handle_speculative_decoding,"
        " arg_groups/speculative_hook.py)",
        "speculative_algorithm speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens"
        " speculative_draft_model_path speculative_draft_model_revision speculative_draft_model_quantization"
        " speculative_draft_load_format speculative_draft_attention_backend speculative_attention_mode"
        " speculative_moe_runner_backend speculative_moe_a2a_backend speculative_draft_window_size"
        " speculative_draft_sink_size speculative_adaptive speculative_use_rejection_sampling enable_multi_layer_eagle"
        " lora_strict_loading",
    ),
    (
        "by where the model comes from (server_args.py _handle_load_format, arg_groups/model_path_hook.py)",
        "load_format tokenizer_path custom_weight_loader model_loader_extra_config revision"
        " remote_instance_weight_loader_start_seed_via_transfer_engine weight_version",
    ),
    (
        "by the chat template or the model (parser/template_detection.py, arg_groups/serving_hook.py)",
        "chat_template served_model_name grammar_backend skip_server_warmup preferred_sampling_params"
        " limit_mm_data_per_request mm_process_config mm_feature_transport image_processor_backend"
        " keep_mm_feature_on_device allowed_media_domains enable_return_hidden_states return_hidden_states_mode"
        " soft_watchdog_timeout tokenizer_worker_num detokenizer_worker_num enable_dynamic_batch_tokenizer"
        " enable_prefill_delayer prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark"
        " smg_grpc_mode grpc_port grpc_worker_threads random_seed json_model_override_args",
    ),
    (
        "by the rules for LoRA (server_args.py check_lora_server_args, arg_groups/lora_hook.py)",
        "enable_lora enable_lora_overlap_loading lora_paths lora_target_modules",
    ),
    (
        "by the rules for split prefill and decode (server_args.py _handle_pd_disaggregation,"
        " arg_groups/pd_disaggregation_hook.py)",
        "disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device"
        " disaggregation_decode_extra_slots disaggregation_decode_retraction_backup encoder_transfer_backend"
        " optimistic_prefill_attempts optimistic_prefill_retries",
    ),
    (
        "by the checks of the arguments (arg_groups/validation_hook.py)",
        "aux_hidden_state_capture load_publish_endpoint prefill_decode_interval prefill_only_disable_kv_cache",
    ),
)

REWRITTEN: t.Mapping[str, str] = {name: why for why, names in _GROUPS for name in names.split()}
"""Name of the field in /server_info -> by what SGLang sets it."""

AUTO = "it was left to SGLang"
"""Why a wanted `auto` is something else."""
