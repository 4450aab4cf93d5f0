"""The prefix cache compiled: the same Python source through mypyc, optional, at half the time.

The compiled modules lie in the cache folder, under a name made from the sources. An edited source
has another name, so it runs as it stands until it is compiled anew; no module of the cache can
tell. `python -m radixkv.native.build` compiles. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
import sysconfig
from pathlib import Path

from radixkv.folders import cache_folder

logger = logging.getLogger(__name__)

# What a request goes through. The rest of the room is data, or is subclassed by users.
COMPILED = (
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
)
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def sources() -> list[Path]:
    """All that the compiled code depends on, in the package."""
    package = Path(__file__).parent
    return [package / "config.py", package / "errors.py", *sorted(package.glob("cache/*.py"))]


def compiled_folder() -> Path:
    """Where the compiled modules of exactly these sources, for this Python, lie or would lie."""
    digest = hashlib.sha256()
    for path in sources():
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return cache_folder() / "native" / f"cache-{digest.hexdigest()[:16]}{Path(SUFFIX).stem}"


def use_compiled(search_path: list[str]) -> bool:
    """Let a package's modules be found compiled, if they are there; before any is imported.

    Parameters
    ----------
    search_path : list of str
        The package's ``__path__``.

    Returns
    -------
    bool
        Whether they are.
    """
    try:
        folder = compiled_folder()
        libraries = list(folder.glob(f"*__mypyc{SUFFIX}"))
    except (OSError, RuntimeError) as error:  # No home folder, or sources that are no files.
        logger.info("the cache runs as Python: %s", error)
        return False
    if not libraries:
        logger.info("the cache is not compiled; python -m radixkv.native.build compiles it")
        return False
    try:
        for library in libraries:
            _load(library)
    except (ImportError, OSError) as error:
        logger.warning("the compiled cache cannot be loaded, Python's is used: %s", error)
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
