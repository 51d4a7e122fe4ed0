#!/bin/bash
# GRPO of the maths-expression agent with Qwen2.5-3B-Instruct, on one node of two GPUs with vLLM:
#   pip install -e '.[langgraph,vllm,data]'
#   python recipe/langgraph_agent/example/create_dataset.py      # once: writes data/math_expression_tool
#   bash recipe/langgraph_agent/example/run_qwen2.5_3b.sh
# `rollout_name=sglang bash …` takes SGLang. Further arguments are overrides (key=value). It runs from the folder that holds `recipe`.
set -e

rollout_name=${rollout_name:-vllm}
options="{tensor_parallel_size: 2, gpu_memory_utilization: 0.5}"
[ "$rollout_name" = sglang ] && options="{tp_size: 2, mem_fraction_static: 0.5}"

FOLDER=$(cd "$(dirname "$0")" && pwd)
turnwise train "$FOLDER/qwen2.5_3b.yaml" "rollout_name=$rollout_name" "actor_infer.strategy_args.strategy_config=$options" \
  "actor_rollout_ref.rollout.agent.agent_loop_config_path=$FOLDER/agent.yaml" "$@"
