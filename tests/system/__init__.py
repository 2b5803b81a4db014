"""Whole runtimes together, most of them in processes of their own."""
