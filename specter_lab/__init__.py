"""A laboratory for Mixture-of-Experts language models that do not fit the GPU."""

__version__ = "0.1.0"
