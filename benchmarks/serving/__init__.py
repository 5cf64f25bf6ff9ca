"""The parts of `benchmarks/bench_serve.py`: what is measured, with what, and how it is told."""
