"""The cuda_ipc route: bulk between two processes that use one GPU, which NCCL refuses.

The sender tells where its memory is, the receiver's device copies it from there.
"""
