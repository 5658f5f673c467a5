"""What an error says: all that a person needs, wherever it stands in the message."""

import contextlib
from types import SimpleNamespace


@contextlib.contextmanager
def refused(kind, *parts):
    """What is done raises an error of this kind, whose message has all of the parts: the ``value`` of what this gives."""
    caught = SimpleNamespace(value=None)
    try:
        yield caught
    except kind as error:
        caught.value = error
    assert caught.value is not None, f"nothing was refused with {parts}"
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
