#!/bin/bash
# Run from the root of the repository; further arguments are overrides (key=value).
set -e

CONFIG_PATH=$(basename "$(dirname "$0")")
python examples/start_agentic_pipeline.py \
       --config_path "$CONFIG_PATH" \
       --config_name agent_val_frozen_lake \
       "$@"
