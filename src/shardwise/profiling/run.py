"""`python -m shardwise.profiling.run SCRIPT ...` (or `-m MODULE ...`): the program as
python would run it. Importing shardwise for this module has begun to watch it (`watch.py`).
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    if sys.argv[1:2] == ["-m"]:
        module, sys.argv[:] = sys.argv[2], sys.argv[2:]
        sys.path.insert(0, "")
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    script = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    # In the main module itself, as python does: its names live until the interpreter ends, and
    # processes that the script starts find the script.
    namespace = sys.modules["__main__"].__dict__
    namespace.update(__file__=script, __spec__=None, __package__=None, __doc__=None)
    try:
        source = Path(script).read_bytes()
    except OSError as error:
        sys.exit(f"shardwise profile: cannot read {script}: {error.strerror}")
    exec(compile(source, script, "exec"), namespace)


if __name__ == "__main__":
    main()
