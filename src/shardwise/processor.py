"""A processor that announces AMX, and a hypervisor that forbids it.

torch's bf16 matrix products (oneDNN) use what the processor announces, so there the first of them
ends the process by SIGILL. One such product in a child tells. oneDNN reads its limit from the
environment at its first product, whatever the dtype, not when torch is imported.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

LIMIT, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
# What the child found, for the processes that this one starts: "usable" or "refused".
ANSWER = "SHARDWISE_AMX"

_CPUINFO = Path("/proc/cpuinfo")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# Larger than what torch multiplies without oneDNN.
_PRODUCT = "import torch; a = torch.ones(128, 128, dtype=torch.bfloat16); a @ a"
_PATIENCE_S = 120.0


def settle(probe: bool = True) -> None:
    """Keep oneDNN from AMX where AMX is forbidden, in this process and in those it starts.

    Does nothing where the user has set the limit, and where the processor announces no AMX.
    Otherwise the answer is the one found before on this machine with this torch; else, if `probe`,
    a child's, which takes as long as importing torch.
    """
    if LIMIT in os.environ or not _announces_amx():
        return
    answer = os.environ.get(ANSWER) or _recall()
    if answer is None and probe:
        answer = _ask_a_child()
        if answer is not None:
            _remember(answer)
    if answer is None:
        return
    os.environ[ANSWER] = answer
    if answer == "refused":
        os.environ[LIMIT] = WITHOUT_AMX
        if os.environ.get("RANK", "0") == "0":
            print(
                "shardwise: this processor announces AMX but refuses it, so torch's bf16 products "
                f"would die by SIGILL: {LIMIT}={WITHOUT_AMX} is set for this run",
                file=sys.stderr,
            )


def _announces_amx() -> bool:
    try:
        with _CPUINFO.open("rb") as file:
            first = file.read(8192)  # of many cores, which are alike
    except OSError:
        return False
    return b" amx_tile" in first or b" amx_bf16" in first


def _ask_a_child() -> str | None:
    """None where it ended in some other way: then nothing is known."""
    try:
        code = subprocess.run(
            [sys.executable, "-c", _PRODUCT],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            check=False,
        ).returncode
    except (OSError, subprocess.SubprocessError):
        return None
    return {0: "usable", -signal.SIGILL: "refused"}.get(code)


def _recall() -> str | None:
    try:
        found = _note().read_text(encoding="ascii").strip()
    except (OSError, RuntimeError, ValueError):
        return None
    return found if found in ("usable", "refused") else None


def _remember(answer: str) -> None:
    try:
        note = _note()
        note.parent.mkdir(parents=True, exist_ok=True)
        whole = note.with_suffix(f".{os.getpid()}")
        whole.write_text(answer, encoding="ascii")
        whole.replace(note)  # ranks may write at once
    except (OSError, RuntimeError):  # no home, or one that cannot be written: asked again next time
        pass


def _note() -> Path:
    """The file of the answer: by machine (a home may be shared), its boot and torch's version."""
    import importlib.metadata

    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "unknown"
    boot = _BOOT.read_text(encoding="ascii")
    key = hashlib.sha256(f"{boot} {torch} {sys.executable}".encode()).hexdigest()[:16]
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "shardwise" / f"amx-{key}"
