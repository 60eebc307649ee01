"""When things happen, said once: a Plan's schedule, for whoever executes it.

Pure: no tensor, no device, no process group, no clock. The engine, the predictor and `explain` are
three executors of what stands here.
"""
