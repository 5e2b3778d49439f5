"""Figures and tables of ZipMoE."""
