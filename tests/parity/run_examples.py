"""Runs examples one after the other on the ranks that torchrun has started.

    torchrun --nproc-per-node 2 tests/parity/run_examples.py RUNS.json

RUNS.json lists runs: `name`, `script`, `arguments`, and `port` where the ranks of this run meet;
without a port it runs on rank 0 alone, as without torchrun. Transformers takes seconds to import:
each rank imports it once, and forks for each run. What a run prints is in NAME.RANK.out and
NAME.RANK.err beside RUNS.json, its exit code in NAME.RANK.code.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "shardwise.fsdp2",
    "accelerate",
    "transformers.models.llama.modeling_llama",
)
LIMIT_S = 150  # of one run, that takes a few: one that hangs is killed, and the next begins


def become(run: dict[str, Any], output: Path) -> None:
    """In a fork: run the script as Python would."""
    if run["port"]:
        os.environ["MASTER_PORT"] = str(run["port"])
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 of the run has the store
    else:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    for stream, ending in ((1, "out"), (2, "err")):
        with output.with_name(f"{output.name}.{ending}").open("w") as file:
            os.dup2(file.fileno(), stream)
    sys.argv = [run["script"], *run["arguments"]]
    sys.path[0] = str(Path(run["script"]).parent)
    runpy.run_path(run["script"], run_name="__main__")


def main() -> None:
    file = Path(sys.argv[1])
    for name in PRELOADED:
        if importlib.util.find_spec(name.split(".")[0]) is not None:
            importlib.import_module(name)
    rank = int(os.environ["RANK"])
    forks = multiprocessing.get_context("fork")
    for run in json.loads(file.read_text()):
        if rank and not run["port"]:
            continue
        output = file.with_name(f"{run['name']}.{rank}")
        process = forks.Process(target=become, args=(run, output))
        process.start()
        process.join(LIMIT_S)
        process.kill()
        process.join()
        output.with_name(f"{output.name}.code").write_text(str(process.exitcode))


if __name__ == "__main__":
    main()
