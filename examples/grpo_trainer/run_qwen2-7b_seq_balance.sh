#!/bin/bash
# GRPO on GSM8K with Qwen2-7B-Instruct, one response a question, on one node of eight GPUs:
#   python examples/data_preprocess/gsm8k_tool_agent_loop.py      # once: writes ~/data/gsm8k
#   bash examples/grpo_trainer/run_qwen2-7b_seq_balance.sh
# The engine is SGLang; `rollout_name=vllm bash …` takes vLLM. Further arguments are overrides (key=value), such as those for a
# laptop in the first lines of qwen2-7b_seq_balance.yaml.
set -e

rollout_name=${rollout_name:-sglang}
options="{tp_size: 2, mem_fraction_static: 0.6}"
[ "$rollout_name" = vllm ] && options="{tensor_parallel_size: 2, gpu_memory_utilization: 0.6}"

turnwise train "$(dirname "$0")/qwen2-7b_seq_balance.yaml" "rollout_name=$rollout_name" \
  "actor_infer.strategy_args.strategy_config=$options" "$@"
