"""Side-by-side measurements: `python -m benchmarks.NAME --out FILE.json`."""
