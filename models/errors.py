"""The one error a user's mistake raises: it names the key, the value and the fix."""


class UserError(ValueError):
    """A mistake in the input, told in one line. Entry points print it and exit with code 2, without a traceback."""
