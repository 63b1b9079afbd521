#!/usr/bin/env bash
# Compare the drafting methods: scripts/run_ablation.sh --prompt "import os" --runner "uv run infer.py --device cpu"
# Writes scripts/ablation_results.csv, or --out FILE. Arguments are those of eagle-triton ablation.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="$root/.venv/bin/python"
[[ -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${EAGLE_TRITON_PYTHON:-$python}" -m eagle_triton.cli.main ablation --out "$root/scripts/ablation_results.csv" "$@"
