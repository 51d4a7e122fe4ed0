#!/bin/bash
# GRPO on GSM8K with Qwen2-7B-Instruct, one response a question, on one node of eight GPUs:
#   python examples/data_preprocess/gsm8k_tool_agent_loop.py      # once: writes ~/data/gsm8k
#   bash examples/grpo_trainer/run_qwen2-7b_seq_balance.sh
# The engine is SGLang; `rollout_name=vllm bash …` takes vLLM. Further arguments are overrides (key=value), such as those for a
# laptop in the first lines of qwen2-7b_seq_balance.yaml.
set -e

turnwise train "$(dirname "$0")/qwen2-7b_seq_balance.yaml" "rollout_name=${rollout_name:-sglang}" "$@"
