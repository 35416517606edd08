"""Which frames are the user's."""

import os
import sys
import sysconfig
from dataclasses import dataclass
from types import FrameType


@dataclass(frozen=True)
class Library:
    """Folders whose code is not the user's: minidist's, torch's, the standard library's without site-packages."""

    packages: tuple[str, ...]
    stdlib: str
    site: tuple[str, ...]

    @classmethod
    def here(cls) -> "Library":
        """As this interpreter has them. torch counts only if it is imported."""
        minidist = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        torch = getattr(sys.modules.get("torch"), "__path__", [])
        site = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
        folder = lambda path: os.path.join(path, "")
        return cls(
            (folder(minidist), *map(folder, torch)), folder(sysconfig.get_path("stdlib")), tuple(map(folder, site))
        )

    def holds(self, file: str) -> bool:
        """Whether ``file`` is library code.

        >>> library = Library(("/x/minidist/",), "/usr/lib/python3/", ("/usr/lib/python3/site-packages/",))
        >>> [library.holds(f"/usr/lib/python3/{f}") for f in ("threading.py", "site-packages/mine.py")]
        [True, False]
        >>> library.holds("/x/minidist/comm/comm.py"), library.holds("<ipython-input-1>")
        (True, False)
        """
        if file.startswith((*self.packages, "<frozen ")):
            return True
        return file.startswith(self.stdlib) and not file.startswith(self.site)


def user_frame(library: Library, frame: FrameType | None) -> FrameType | None:
    """The innermost frame at or above ``frame`` that is the user's; None if there is none."""
    while frame is not None and library.holds(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
