"""Measurements of aiocomm, each against a bare thing of the same kind in the same run.

Not installed. ``python -m benchmarks`` runs them all, ``python -m benchmarks latency`` one. Figures
are medians over rounds in which ours and theirs take turns, so a busy machine hurts both; what is
held against a bar is the ratio.
"""
