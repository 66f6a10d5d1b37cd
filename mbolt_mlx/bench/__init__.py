"""Benchmarks that every engine runs alike: forced tokens, fresh processes, counted reads."""
