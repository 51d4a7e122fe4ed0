#!/bin/bash
# Sokoban with Qwen2.5-0.5B-Instruct on one node of eight GPUs, Megatron and vLLM:
#   bash examples/qwen2.5-0.5B-agentic/run_agentic_pipeline_sokoban.sh
# The first lines of agent_val_sokoban.yaml have the command for a laptop: arguments that this script takes, too.
# Further arguments are overrides (key=value).
set -e

FOLDER=$(cd "$(dirname "$0")" && pwd)
python "$FOLDER/../start_agentic_pipeline.py" \
       --config_path "$(basename "$FOLDER")" \
       --config_name agent_val_sokoban \
       "$@"
