"""Any Hugging Face decoder by name, folder or GGUF file, ready for the engine.

Every source becomes a folder first (a GGUF by conversion, a hub name by download), and one path
reads folders. Weights that are missing or do not fit are an error: transformers would make them up.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from radixkv.devices import computes, resolve_device
from radixkv.errors import ConfigError, ModelLoadError, RequestError, UnsupportedParameterError
from radixkv.model.demo import (
    DEMO_NAME,
    Progress,
    converted_gguf,
    demo_model_path,
    one_line,
    quiet_transformers,
)
from radixkv.model.templates import template_variables

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROLES = ("system", "user", "assistant", "tool")

_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
_TEXT_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_LENGTH_NAMES = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "seq_length")
_CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel")
# The folder is all there is: nothing is fetched any more, and no code that a model brings is run.
_AS_IT_IS = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A model in evaluation mode, without gradients, and what the engine must know about it.

    Attributes
    ----------
    name : str
        The hub name, or that of the folder, of the GGUF or of the demo model.
    eos_token_ids : tuple of int
        What ends an answer by the configuration, generation settings or tokenizer; may be empty.
    max_model_len : int
        The most positions, prompt and answer together, that the model was made for.
    vocab_size : int
        Token ids lie in ``[0, vocab_size)``.
    folder : Path, optional
        Where the weights were read.
    """

    model: PreTrainedModel = field(repr=False)
    tokenizer: PreTrainedTokenizerBase | None = field(repr=False)
    config: PreTrainedConfig = field(repr=False)
    name: str
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    dtype: torch.dtype
    folder: Path | None = field(default=None, repr=False)


def load_model(
    source: str | Path,
    dtype: str | torch.dtype = "auto",
    *,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a causal language model.

    Parameters
    ----------
    source : str or Path
        ``"demo"``, a folder with a Hugging Face checkpoint, a GGUF file, or a hub name. What exists
        on disk wins over a hub name; write ``./demo`` for a folder of that name.
    dtype : str or torch.dtype
        One of `DTYPES`, or ``"auto"``: the type the checkpoint was stored in (float32 for a GGUF
        and for the demo), but float32 where a CPU would only emulate it, which is slower. Only
        float32 gives the same tokens however requests are batched.
    device : str or torch.device
        Where the weights go; see `resolve_device`. On a GPU that does not compute in bfloat16,
        "auto" takes float16 in its stead.
    progress : callable, optional
        Called with a line before each long step (download, conversion).

    Raises
    ------
    ModelLoadError
        When the model cannot be found, fetched, read or stored, or is no causal language model.
    ConfigError
        For a dtype or device that does not exist.
    """
    wanted, place = _dtype(dtype), resolve_device(device)
    if wanted is not None and not computes(wanted, place):
        raise ConfigError(f"{place} does not compute in {dtype}; use float16 or float32")
    folder, name = _folder_of(source, progress)
    with quiet_transformers():
        config = _causal_config(folder)
        model = _read_weights(folder, wanted or "auto")
        tokenizer = _read_tokenizer(folder)
    served = _served_in(model.dtype, place, wanted)
    try:
        # Not converted without need: some parts stay in float32 whatever the rest is in.
        model = model.to(device=place, dtype=None if served is model.dtype else served)
        model.eval().requires_grad_(False)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"cannot put {name} on {place}: {one_line(error)}") from error
    text_config = config.get_text_config(decoder=True)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        name=name,
        eos_token_ids=_eos_token_ids(text_config, model.generation_config, tokenizer),
        max_model_len=_max_model_len(text_config, tokenizer),
        vocab_size=text_config.vocab_size,
        dtype=model.dtype,
        folder=folder,
    )


def load_tokenizer(
    source: str | Path, *, progress: Progress | None = None
) -> tuple[PreTrainedTokenizerBase, str]:
    """A model's tokenizer without its weights, and its name; ``source`` as for `load_model`.

    Raises
    ------
    ModelLoadError
        When the model cannot be found, fetched or read, or brings no tokenizer.
    """
    folder, name = _folder_of(source, progress, _TEXT_FILES)
    with quiet_transformers():
        tokenizer = _read_tokenizer(folder)
    if tokenizer is None:
        raise ModelLoadError(f"{folder} holds no tokenizer")
    return tokenizer, name


def load_on(
    device: str | torch.device,
    model: str | Path | LoadedModel,
    dtype: str | torch.dtype = "auto",
    *,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model on a device, or see that a loaded one is there; "auto" takes it where it is.

    Raises
    ------
    ConfigError
        Before anything is loaded, for a device that is not there.
    """
    place = resolve_device(device)
    if not isinstance(model, LoadedModel):
        return load_model(model, dtype, device=place, progress=progress)
    if device != "auto" and model.model.device != place:
        raise ConfigError(
            f"{model.name} is on {model.model.device}, not on {place}: give load_model the "
            "device, or serve it where it is with device='auto'"
        )
    return model


def render_chat(
    loaded: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The tokens of a conversation in the model's own chat format.

    As a rule they are a prefix of the tokens of the same conversation continued. A template may
    break this by looking back (to drop old reasoning, say); the cache reuses up to that point.

    Parameters
    ----------
    messages : sequence of mappings
        Each with a ``role`` of `ROLES` and a ``content`` string; where an assistant calls tools,
        ``tool_calls`` may stand in its place.
    add_generation_prompt : bool
        Whether to open the assistant's turn at the end.
    tools : sequence of mappings
        Functions that the model may call, as JSON schemas.
    variables : mapping, optional
        What else the template is told, by name (``enable_thinking``, say).

    Raises
    ------
    RequestError
        When the messages are malformed, or the model's template is missing or refuses them.
    UnsupportedParameterError
        When the template would take no notice of the tools, or of a variable.
    """
    _check_messages(messages)
    tokenizer = loaded.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise RequestError(f"{loaded.name} has no chat template; send it a plain prompt instead")
    given = dict(variables or {})
    if tools:
        given["tools"] = [dict(tool) for tool in tools]
    try:
        unread = given.keys() - template_variables(tokenizer, bool(tools)) if given else set()
    except Exception as error:
        raise RequestError(f"{loaded.name}'s template is broken: {one_line(error)}") from error
    if unread:
        names = ", ".join(sorted(unread))
        raise UnsupportedParameterError(
            f"{loaded.name}'s chat template takes no notice of {names}; leave it out"
        )
    try:
        # Not None, and not missing: some templates ask for its length, others print it.
        turns = [{**message, "content": message.get("content") or ""} for message in messages]
        return list(
            tokenizer.apply_chat_template(
                turns, add_generation_prompt=add_generation_prompt, return_dict=False, **given
            )
        )
    except Exception as error:
        raise RequestError(f"{loaded.name}'s template refuses this: {one_line(error)}") from error


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list of at least one {'role': ..., 'content': ...}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}] must be a dict, not {type(message).__name__}")
        if (role := message.get("role")) not in ROLES:
            raise RequestError(f"messages[{index}] has the role {role!r}, not one of {ROLES}")
        content = message.get("content")
        calls = role == "assistant" and message.get("tool_calls")
        if not isinstance(content, str) and not (calls and content is None):
            raise RequestError(f"messages[{index}] needs a 'content' that is a string")


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """The type asked for; None leaves the choice to the checkpoint."""
    if dtype == "auto":
        return None
    known = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if known not in DTYPES.values():
        names = ["auto", *DTYPES]
        near = difflib.get_close_matches(str(dtype), names, n=1) or names
        raise ConfigError(f"unknown dtype {dtype!r}; did you mean {' or '.join(near)}?")
    return known


def _served_in(
    stored: torch.dtype, device: torch.device, wanted: torch.dtype | None
) -> torch.dtype:
    """The type a model is computed in: as asked, else as stored if the device computes in that."""
    if wanted is not None:
        return wanted
    if device.type == "cpu":
        return stored if is_native(stored) else torch.float32
    return stored if computes(stored, device) else torch.float16


def is_native(dtype: torch.dtype) -> bool:
    """Whether this CPU computes in a type itself; where it does not, float32 is faster.

    Measured with SmolLM2-135M on one core with AMX, a prompt of 512 tokens: bfloat16 0.7 s,
    float32 1.8 s, float16 2.2 s; a decode step of one sequence takes the same in all three.
    """
    if dtype is torch.bfloat16:
        # Not in every torch we allow: an old one merely computes in float32.
        has: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        return bool(has.get("amx_bf16") or has.get("avx512_bf16") or has.get("bf16"))
    return dtype is not torch.float16


def _folder_of(
    source: str | Path, progress: Progress | None, hub_files: Sequence[str] = _HUB_FILES
) -> tuple[Path, str]:
    """The checkpoint folder behind a source, and the model's name."""
    if source == "demo":
        return demo_model_path(progress), DEMO_NAME
    path = Path(source).expanduser()
    if path.is_dir():
        return path, path.resolve().name
    if path.is_file():
        return converted_gguf(path, progress), path.stem
    if isinstance(source, Path) or source.endswith(".gguf") or source.startswith((".", "/", "~")):
        raise ModelLoadError(f"there is no folder or file {path}")
    return _from_hub(source, hub_files), source


def _from_hub(name: str, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    copies = ["*/*", "consolidated*"]  # the same weights in other formats
    try:
        return Path(snapshot_download(name, allow_patterns=list(files), ignore_patterns=copies))
    except Exception as error:
        raise ModelLoadError(
            f"cannot find the model {name!r}: there is no folder or file of that name, and neither "
            f"the hub nor its local cache has it: {one_line(error)}"
        ) from error


def _causal_config(folder: Path) -> PreTrainedConfig:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if not (folder / "config.json").is_file():
        files = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; for the GGUF, name the file: {folder / files[0]}" if files else ""
        raise ModelLoadError(f"{folder} is no model: it has no config.json{hint}")
    try:
        config = AutoConfig.from_pretrained(folder, **_AS_IT_IS)
    except Exception as error:
        raise ModelLoadError(f"cannot use {folder / 'config.json'}: {one_line(error)}") from error
    classes = list(getattr(config, "architectures", None) or [])
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        # One class, or a tuple of them; as text, for only the names matter.
        causal = str(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
        if not classes or any(n.endswith(_CAUSAL_ENDINGS) or f".{n}'" in causal for n in classes):
            return config
    found = ", ".join(classes) or type(config).__name__
    raise ModelLoadError(f"{folder} holds {found}, which is not a causal language model")


def _read_weights(folder: Path, dtype: str | torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the report names them, see below
            **_AS_IT_IS,
        )
    except Exception as error:
        raise ModelLoadError(f"cannot read the weights in {folder}: {one_line(error)}") from error
    if mismatched := sorted(report["mismatched_keys"]):
        key, stored, expected = mismatched[0]
        raise ModelLoadError(
            f"{len(mismatched)} weights in {folder} do not fit its config.json, the first is {key}:"
            f" {tuple(stored)} in the file, {tuple(expected)} by the configuration"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelLoadError(f"{folder} lacks {len(missing)} weights, the first is {missing[0]}")
    return model


def _read_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    from transformers import AutoTokenizer

    if not any(True for pattern in _TOKENIZER_FILES for _ in folder.glob(pattern)):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, **_AS_IT_IS)
    except Exception as error:
        raise ModelLoadError(f"cannot read the tokenizer in {folder}: {one_line(error)}") from error


def _eos_token_ids(config: PreTrainedConfig, *others: Any) -> tuple[int, ...]:
    found: list[Any] = []
    for holder in (config, *others):
        value = getattr(holder, "eos_token_id", None)
        found += value if isinstance(value, list | tuple) else [value]
    # Some configurations say -1 for "none".
    valid = (i for i in found if isinstance(i, int) and 0 <= i < config.vocab_size)
    return tuple(dict.fromkeys(valid))


def _max_model_len(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> int:
    # Older families name it in their own way.
    lengths = [getattr(config, name, None) for name in _LENGTH_NAMES]
    lengths.append(getattr(tokenizer, "model_max_length", None))
    for length in lengths:
        # A tokenizer without a limit says 10**30.
        if isinstance(length, int) and 0 < length < 10**9:
            return length
    logger.warning("the model names no longest context; 2048 tokens are assumed")
    return 2048
