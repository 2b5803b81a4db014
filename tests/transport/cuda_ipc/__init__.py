"""Tests of aiocomm.transport.cuda_ipc."""
