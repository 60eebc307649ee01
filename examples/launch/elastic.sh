#!/usr/bin/env bash
# Several hosts that meet at one of them (c10d), and begin again when a rank or a host fails. Run
# the same line on every host:
#
#     NODES=2 HEAD=node0 bash examples/launch/elastic.sh --plan zero3 --out /shared/run
#
# NODES: 2, or 1:4 for any number between. HEAD: the host where they meet. JOB: one name for all
# of them. Ranks that were started again resume from the newest checkpoint of `--out`, a folder
# that all hosts see.
set -euo pipefail

exec torchrun --nnodes "$NODES" --nproc-per-node "${NPROC:-auto}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "${JOB:-shardwise}" \
    --max-restarts "${RESTARTS:-3}" \
    -m shardwise.cli train --save-every "${SAVE_EVERY:-50}" --resume "$@"
