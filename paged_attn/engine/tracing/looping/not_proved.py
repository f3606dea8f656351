"""Why a block stays as it is."""


class NotProved(Exception):
    """Something about a block of experts that is not known, in words that follow its name."""
