"""Set-up of every test: annotations of `heedful.core` are checked at run time, threads are few, seeds are fixed."""

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

# Before anything imports heedful: shapes, dtypes and plain types of the mathematics are checked here, and only here.
install_import_hook("heedful.core", "beartype.beartype")

torch.set_num_threads(min(2, torch.get_num_threads()))

# The same examples on every run, and no database in the working tree.
settings.register_profile("heedful", deadline=None, database=None, derandomize=True, max_examples=40)
settings.load_profile("heedful")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20240217)
