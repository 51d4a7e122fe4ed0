#!/bin/bash
# GRPO on GSM8K with Qwen2.5-3B-Instruct as an agent with a tool, on one node of eight GPUs with SGLang, followed in MLflow:
#   pip install -e '.[mlflow]'
#   python examples/data_preprocess/gsm8k_tool_agent_loop.py      # once: writes ~/data/gsm8k with the column agent_name
#   bash examples/sglang_multiturn/run_qwen2.5-3b_gsm8k_tool_agent_mlflow.sh
#   mlflow ui -h 0.0.0.0 -p 5000 --backend-store-uri sqlite:////tmp/mlruns.db
# The page shows metrics, and traces of one question's episodes a step: `tags.step = '3'` finds those of step 3.
# `rollout_name=vllm bash …` takes vLLM. Further arguments are overrides (key=value), such as those for a laptop in the first
# lines of qwen2.5-3b_gsm8k_tool_agent_mlflow.yaml.
set -e

rollout_name=${rollout_name:-sglang}
options="{tp_size: 2, mem_fraction_static: 0.5}"
[ "$rollout_name" = vllm ] && options="{tensor_parallel_size: 2, gpu_memory_utilization: 0.5}"

FOLDER=$(cd "$(dirname "$0")" && pwd)
export MLFLOW_TRACKING_URI=${MLFLOW_TRACKING_URI:-sqlite:////tmp/mlruns.db}
turnwise train "$FOLDER/qwen2.5-3b_gsm8k_tool_agent_mlflow.yaml" "rollout_name=$rollout_name" "actor_infer.strategy_args.strategy_config=$options" \
  "actor_rollout_ref.rollout.multi_turn.tool_config_path=$FOLDER/config/tool_config/gsm8k_tool_config.yaml" \
  trainer.project_name=gsm8k_tool_agent trainer.experiment_name=qwen2.5-3b_function_rm-gsm8k-sgl-tool-agent \
  actor_rollout_ref.rollout.trace.backend=mlflow actor_rollout_ref.rollout.trace.token2text=True "$@"
