#!/usr/bin/env bash
# One host. Words behind the script's name go to `shardwise train`:
#
#     bash examples/launch/one_host.sh --plan zero3 --steps 500 --out run
#
# NPROC: ranks; default: one for each GPU, or for each core where there is none.
set -euo pipefail

exec torchrun --standalone --nproc-per-node "${NPROC:-auto}" \
    -m shardwise.cli train "$@"
