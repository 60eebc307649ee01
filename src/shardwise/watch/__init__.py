"""The watch: a process beside each rank that sees what the rank itself no longer can tell.

    rank 0 <--- pipes, page ---> watcher 0, the hub <--- TCP ---> watcher 1 <---> rank 1

`rank.py` is the rank's side, `watcher.py` the process beside it, `hub.py` what the watcher of rank
0 decides for all, `page.py` the memory that a rank and its watcher share. docs/faults.md says what
is watched and what each fault says.
"""
