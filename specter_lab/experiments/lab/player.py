"""A slider, a play button, and below them what they move through: a figure, a text or both.

    player(lambda token: draw(decoded, token), last=63, label="token")

What is shown lies in the cell's own output, so an executed notebook keeps the last picture also where no kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ipywidgets as widgets
from IPython.display import display

PLAY_INTERVAL_MS = 400


def player(draw: Callable[[int], Sequence[object]], *, last: int, label: str, start: int = 0) -> widgets.IntSlider:
    """Show `draw(start)` and let a reader move through `draw(0)` .. `draw(last)`.

    Args:
        draw: what to show at a step, one or more objects that a notebook can display, as many at every step.
        label: what a step is called.

    Returns:
        The slider; setting its `value` moves it as a hand would.
    """
    slider = widgets.IntSlider(start, 0, last, description=label, layout=widgets.Layout(width="520px"))
    play = widgets.Play(value=start, min=0, max=last, interval=PLAY_INTERVAL_MS)
    widgets.jslink((play, "value"), (slider, "value"))
    display(widgets.HBox([play, slider]))
    shown = [display(part, display_id=True) for part in draw(start)]

    def move(change: dict) -> None:
        for place, part in zip(shown, draw(change["new"])):
            place.update(part)

    slider.observe(move, "value")
    return slider
