"""Benchmarks against torch (`python -m jali.bench cpu`)."""
