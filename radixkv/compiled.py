"""Rooms compiled: the same Python source through mypyc, optional, at half the time.

The compiled modules lie in the cache folder, under a name made from the sources. An edited source
has another name, so it runs as it stands until it is compiled anew; no module of the room can
tell. `python -m radixkv.native.build` compiles. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from radixkv.folders import cache_folder

logger = logging.getLogger(__name__)

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"


class Room(NamedTuple):
    """A package of radixkv of which some modules are compiled.

    Parameters
    ----------
    name : str
    modules : tuple of str
        Those that are compiled, together.
    depends_on : tuple of str
        Patterns of the files, in radixkv's folder, that the compiled code depends on.
    follows : bool
        Whether it is compiled against the types of modules that are not compiled. If not, it
        takes all that comes from there for anything, so that it depends on its own files alone.
    """

    name: str
    modules: tuple[str, ...]
    depends_on: tuple[str, ...]
    follows: bool

    def sources(self) -> list[Path]:
        """All that the compiled code depends on, in the package."""
        package = Path(__file__).parent
        return sorted(path for pattern in self.depends_on for path in package.glob(pattern))

    def folder(self) -> Path:
        """Where the compiled modules of exactly these sources, for this Python, (would) lie."""
        digest = hashlib.sha256()
        for path in self.sources():
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode())
            digest.update(content)
        name = f"{self.name}-{digest.hexdigest()[:16]}{Path(SUFFIX).stem}"
        return cache_folder() / "native" / name


# What a request goes through. The rest of each room is data, or is subclassed by users.
CACHE = Room(
    "cache",
    (
        "allocator",
        "children",
        "eviction",
        "hashing",
        "laws",
        "manager",
        "match",
        "node",
        "pool",
        "sequence",
        "together",
        "tree",
        "visibility",
    ),
    ("config.py", "errors.py", "cache/*.py"),
    follows=True,
)
# What a token goes through. Its types are followed no further: torch's would take minutes.
DECODING = Room(
    "decoding",
    ("byte_level", "stopping"),
    ("decoding/byte_level.py", "decoding/stopping.py"),
    follows=False,
)
ROOMS = (CACHE, DECODING)


def use_compiled(room: Room, search_path: list[str]) -> bool:
    """Let a package's modules be found compiled, if they are there; before any is imported.

    Parameters
    ----------
    room : Room
    search_path : list of str
        The package's ``__path__``.

    Returns
    -------
    bool
        Whether they are.
    """
    try:
        folder = room.folder()
        libraries = list(folder.glob(f"*__mypyc{SUFFIX}"))
    except (OSError, RuntimeError) as error:  # No home folder, or sources that are no files.
        logger.info("%s runs as Python: %s", room.name, error)
        return False
    if not libraries:
        logger.info("%s is not compiled; python -m radixkv.native.build compiles it", room.name)
        return False
    try:
        for library in libraries:
            _load(library)
    except (ImportError, OSError) as error:
        logger.warning("compiled %s cannot be loaded, Python's is used: %s", room.name, error)
        return False
    search_path.insert(0, str(folder))
    return True


def _load(library: Path) -> None:
    """Import what all compiled modules share, by the name that they know it by."""
    name = library.name.removesuffix(SUFFIX)
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
