#!/usr/bin/env bash
# What only a machine with an NVIDIA GPU can show, without a network: tests/gpu/check.sh PYTHON
# PYTHON is that of an environment with torch for this GPU; the server is the one of this checkout.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:?"give the python of an environment that has torch, such as /opt/venv/bin/python"}
server=${SERVER_PYTHON:-.venv/bin/python}
for program in "$python" "$server"; do
    [ -x "$program" ] || { echo "check: $program is not there; make setup makes .venv" >&2; exit 2; }
done
compgen -G '/dev/nvidia[0-9]*' >/dev/null || [ -e /dev/dxg ] || {
    echo "check: there is no GPU here: neither /dev/nvidia0 nor /dev/dxg" >&2
    exit 2
}
"$python" -c 'import torch; assert torch.cuda.is_available()' || {
    echo "check: torch of $python finds no GPU outside of a sandbox either" >&2
    exit 2
}
# each server has a home folder of its own; what kernels need comes from uv's cache
export UV_CACHE_DIR=${UV_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/uv}
exec "$server" -m tests.gpu.check "$python"
