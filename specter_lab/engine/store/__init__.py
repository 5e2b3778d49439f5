"""Experts on disk: one file per model and an index (ZipMoE's flat file), packed once, checked, read past the page cache or not."""
