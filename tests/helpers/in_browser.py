"""The browser of tests."""

import shutil


def chromium():
    """The distribution's Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
