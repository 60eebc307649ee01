#!/usr/bin/env bash
# Everything that needs a GPU, part by part: tests, then the files of benchmarks/results/*-h200*.json.
#
#   benchmarks/h200.sh OUT [PART ...]     default: all parts, in this order
#
# A part that ended well leaves OUT/PART.done and is not run again, so the same command goes on after
# an interruption. Results are written to OUT; results already there (or in benchmarks/results, for
# `attention` and `compile`) are continued. COMMIT: what to record where the code is not in git.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/h200.sh OUT [PART ...]}
shift
mkdir -p "$out"
export PYTHONPATH=src:. PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore KINETO_LOG_LEVEL=99
commit=(${COMMIT:+--commit "$COMMIT"})

shardwise() { python3 -c 'from shardwise.cli import main; main()' "$@"; }

emulate() { # batch: both engines, at 300 and 100 GB/s, with the profiled step of each
    shardwise emulate --mesh 8 --model bench --plan zero3 --engine both --batch "$1" \
        --steps 24 --network 300e9,100e9 --out "$out/emulate-$1" --json "$out/emulate-$1-h200.json" "${commit[@]}"
}

go_on() { # a file of results that `--resume` continues
    [ -e "$out/$1" ] || cp "benchmarks/results/$1" "$out/$1" 2>/dev/null || true
}

run_part() {
    case $1 in
        test-parity) python3 -m tests.gpu.test_parity ;;
        test-dropin) python3 -m tests.gpu.test_dropin ;;
        test-nccl) python3 -m tests.gpu.test_nccl ;;
        test-emulated) python3 -m tests.gpu.test_emulated ;;
        test-profile) python3 -m tests.gpu.test_profile ;;
        test-attention) python3 -m tests.gpu.test_attention ;;
        step) shardwise bench step --cases h200 --steps 20 --json "$out/step-h200.json" "${commit[@]}" ;;
        step-dropin) shardwise bench step --through fully_shard --cases h200 --steps 20 \
            --json "$out/step-h200-dropin.json" "${commit[@]}" ;;
        peers) go_on peers-h200.json
            shardwise bench peers --cases h200 --resume --json "$out/peers-h200.json" "${commit[@]}" ;;
        check) shardwise emulate --mesh 8 --model bench --plan zero3 --network 300e9,100e9 --check \
            --json "$out/emulate-check-h200.json" "${commit[@]}" ;;
        emulate) emulate 4 && emulate 1 ;;
        llama8b) shardwise emulate --world 128 --mesh 16x8 --cluster h100x8 --model llama8b \
            --plan zero3 --json "$out/emulate-llama8b-h200.json" "${commit[@]}" ;;
        accuracy) shardwise bench accuracy --cases h200 --json "$out/accuracy-h200.json" "${commit[@]}" ;;
        attention) go_on attention-h200.json
            shardwise bench attention --resume --json "$out/attention-h200.json" "${commit[@]}" ;;
        attention-untuned) shardwise bench attention --shapes untuned --resume \
            --json "$out/attention-untuned-h200.json" "${commit[@]}" ;;
        profile) shardwise bench profile --cases h200 --json "$out/profile-h200.json" "${commit[@]}" ;;
        ffn) shardwise bench ffn --json "$out/ffn-h200.json" "${commit[@]}" ;;
        grouped) go_on grouped-step-h200.json
            shardwise bench grouped-step --frameworks torch --resume \
                --json "$out/grouped-step-h200.json" "${commit[@]}" ;;
        hsdp) go_on hsdp-h200.json
            shardwise bench hsdp --resume --measured-steps 5 --json "$out/hsdp-h200.json" \
                --plot "$out/hsdp-h200.svg" "${commit[@]}" ;;
        overlap) shardwise bench overlap --json "$out/overlap-h200.json" \
            --plot "$out/overlap-h200.svg" "${commit[@]}" ;;
        kernels) shardwise bench kernels --precision fp32,bf16 --json "$out/kernels-h200.json" \
            --plot "$out/kernels-h200.svg" "${commit[@]}" ;;
        memory) go_on memory-h200.json
            shardwise bench memory --parts residual,attention --resume \
                --json "$out/memory-h200.json" "${commit[@]}" ;;
        ddp) shardwise bench ddp --resume --json "$out/ddp-h200.json" "${commit[@]}" ;;
        optimizer-sharding) shardwise bench optimizer-sharding --resume \
            --json "$out/optimizer-sharding-h200.json" "${commit[@]}" ;;
        compile) go_on compile-h200.json
            shardwise bench compile --parts model --scopes whole --jobs 5 --resume \
                --json "$out/compile-h200.json" "${commit[@]}" ;;
        *) echo "no part is called $1" >&2; return 2 ;;
    esac
}

parts=("$@")
((${#parts[@]})) || parts=(test-parity test-dropin test-nccl test-emulated test-profile test-attention
    step step-dropin peers check emulate llama8b accuracy ffn hsdp attention attention-untuned
    profile overlap grouped kernels memory ddp optimizer-sharding compile)
failed=()
for part in "${parts[@]}"; do
    [ -e "$out/$part.done" ] && continue
    began=$SECONDS
    echo "== $part"
    if run_part "$part" 2>&1 | tee "$out/$part.log"; then touch "$out/$part.done"; else failed+=("$part"); fi
    echo "== $part: $((SECONDS - began)) s"
done
((${#failed[@]})) && echo "failed: ${failed[*]}" && exit 1
exit 0
