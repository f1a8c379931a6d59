"""Measurements of this package against plain torch and against Lightning's own strategies: `python -m benchmarks`."""
