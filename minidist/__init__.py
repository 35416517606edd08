"""minidist: how one model is trained across many chips, small enough to read in a weekend."""

from minidist.launch import LaunchError as LaunchError
from minidist.launch import launch as launch

__all__ = ["LaunchError", "launch"]
