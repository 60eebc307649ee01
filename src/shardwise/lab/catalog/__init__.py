"""The catalog of benchmarks: what each is called, measures and takes. Needs no torch."""
