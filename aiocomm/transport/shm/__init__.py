"""Bulk between two workers on one host: through memory that both have mapped."""
