"""Marks that every figure has in common."""

from __future__ import annotations

from matplotlib.axes import Axes

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def title(axis: Axes, place: int, text: str) -> None:
    """A panel's letter in bold, from its place among the panels, and its title, at the left."""
    axis.set_title(rf"$\bf{{{LETTERS[place]}}}$  {text}", loc="left", fontsize=9)
