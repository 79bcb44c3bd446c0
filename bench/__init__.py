"""Benchmarks: parity first, then speed as ratios within one run. Nothing imports this package."""
