"""Programs that benchmarks start in processes of their own."""
