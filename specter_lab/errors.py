"""The one exception type that a user is meant to read."""


class UserError(Exception):
    """Something the user can put right.

    The message is one sentence that names the thing at fault and the way out;
    the command line prints it without a stack trace and exits with status 2.
    """

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the sentence, without the stack trace."""
        return [f"{type(self).__name__}: {self}"]


class NotTrained(UserError):
    """A model of the project's own that has to be trained before it can be used."""
