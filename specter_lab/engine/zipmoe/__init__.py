"""ZipMoE's runtime: experts on disk, a memory budget too small for them, and exactly the model's outputs."""
