"""What ``benchmarks/gpu.py`` and ``tests/gpu`` do on a real chip, check by check.

Needs torch, anyio and uvloop only. Each check is a coroutine function that runs in new processes;
it raises where something is wrong, and returns what is worth telling.
"""
