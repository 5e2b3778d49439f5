"""Stop strings in text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes text on as soon as no stop string can begin in it; `found` once one is complete, and then nothing more.

    The string that is complete first ends the text (of several, the one that began first), so the result does not depend on how
    the text is cut into pieces. What is passed on never contains any part of it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops, self._held = tuple(stops), ""

    def feed(self, text: str) -> str:
        """Add text; returns what is sure to stay."""
        if self.found:
            return ""
        text = self._held + text
        places = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)[1]]
        safe = len(text) - self._longest_beginning(text)
        self._held = text[safe:]
        return text[:safe]

    def rest(self) -> str:
        """What was held back: the text is over."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max((len(stop) for stop in self._stops), default=0))
        return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
