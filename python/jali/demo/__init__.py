"""The demo: eight masks on real text, and three small language models (`python -m jali.demo`)."""
