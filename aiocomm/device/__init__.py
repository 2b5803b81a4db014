"""Accelerators: the interface, the one that this process has, and the adapter for CUDA."""
