#!/bin/bash
# Further arguments are overrides (key=value).
set -e

FOLDER=$(cd "$(dirname "$0")" && pwd)
python "$FOLDER/../start_agentic_pipeline.py" \
       --config_path "$(basename "$FOLDER")" \
       --config_name agent_val_sokoban \
       "$@"
