#!/usr/bin/env bash
# Several hosts that are all known beforehand. Run it on every host, each with its number:
#
#     NODES=2 NODE=0 HEAD=node0 bash examples/launch/static.sh --plan zero3 --out /shared/run
#     NODES=2 NODE=1 HEAD=node0 bash examples/launch/static.sh --plan zero3 --out /shared/run
#
# HEAD: name or address of host 0. PORT: a free one there. NPROC: ranks on this host.
# A rank that fails ends the job. `--out` is a folder that all hosts see.
set -euo pipefail

exec torchrun --nnodes "$NODES" --node-rank "$NODE" \
    --master-addr "$HEAD" --master-port "${PORT:-29500}" \
    --nproc-per-node "${NPROC:-auto}" \
    -m shardwise.cli train "$@"
