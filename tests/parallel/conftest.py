"""What the tests of this folder share."""

import pytest

from minidist.comm.comm import Comm


@pytest.fixture
def solo():
    """A world of one rank, in this process: its collectives send nothing."""
    return Comm(group=None, ranks=(0,), rank=0)
