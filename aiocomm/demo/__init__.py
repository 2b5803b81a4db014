"""The main job: a trainer and a rollout that exchange weights and trajectories.

An application of the public interface, and of nothing else of the package. Only ``command``,
``display`` and ``report`` need rich and typer; the rest is torch and the standard library, so that
benchmarks and tests can use it.
"""
