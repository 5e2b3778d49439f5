"""Random tests of this folder try the same examples every time, and leave nothing behind."""

from hypothesis import settings

settings.register_profile("house", derandomize=True, database=None, deadline=None)
settings.load_profile("house")
