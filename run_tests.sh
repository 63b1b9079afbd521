#!/usr/bin/env bash
# Install what is missing into .venv, then lint and test there, in 14 to 20 minutes on two cores.
# Arguments go to run_tests.py.
set -euo pipefail
cd "$(dirname "$0")"
exec "${EAGLE_TRITON_PYTHON:-python3}" setup_env.py --run run_tests.py "$@"
