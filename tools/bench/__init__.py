"""Benchmarks against peers measured in the same run. `python -m tools.bench --help`; docs/performance.md says
how to read the results."""
