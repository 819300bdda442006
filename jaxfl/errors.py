"""The one exception that jaxfl raises on purpose."""


class JaxflError(Exception):
    """Something the user can mend. The message is one sentence: what is wrong, where, what to do.

    The command line prints the message and exits with code 2; from Python it is raised as it is.
    """
