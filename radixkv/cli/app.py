"""Commands, their options, and what becomes of errors.

Exit codes: 0 done, 1 failed, 2 bad usage, 130 interrupted. An error is one line on stderr.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import radixkv
from radixkv.cli.bench.app import app as bench_app
from radixkv.cli.serve import serve
from radixkv.cli.tools import inspect, lint
from radixkv.errors import ConfigError, RadixKVError, RequestError

if TYPE_CHECKING:
    from radixkv.llm import LLM

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Any Hugging Face decoder over one paged KV cache that a radix tree organises.",
)

app.add_typer(bench_app, name="bench")

Model = Annotated[
    str, typer.Option("--model", "-m", help="demo, a hub name, a folder or a GGUF file.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
KVMemory = Annotated[str, typer.Option(help="Memory for keys and values, like 2GiB, or auto.")]
KVDtype = Annotated[str, typer.Option(help="Keys and values in: auto, fp8 or fp8_e5m2.")]
Quantization = Annotated[str | None, typer.Option(help="Weights in 8 bits: int8.")]
BlockSize = Annotated[int, typer.Option(min=1, help="Tokens in a block.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Same seed, same tokens.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most new tokens of each continuation.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")]


@dataclass(frozen=True)
class _ModelOptions:
    model: str
    dtype: str
    device: str
    kv_memory: str
    kv_dtype: str
    quantization: str | None
    block_size: int
    seed: int | None

    def load(self, **settings: Any) -> LLM:
        from radixkv.cli.dtypes import command_dtype
        from radixkv.llm import LLM

        return LLM(
            self.model,
            dtype=command_dtype(self.model, self.dtype, self.device),
            device=self.device,
            kv_memory=self.kv_memory,
            kv_dtype=self.kv_dtype,
            quantization=self.quantization,
            block_size=self.block_size,
            seed=self.seed,
            progress=lambda line: print(line, file=sys.stderr),
            **settings,
        )


@app.command()
def demo(
    dtype: Dtype = "auto",
    device: Device = "auto",
    quantization: Quantization = None,
    max_tokens: MaxTokens = 48,
    compare: Annotated[
        bool, typer.Option(help="Run a part of the same work with Hugging Face generate.")
    ] = True,
) -> None:
    """Sixteen conversations over one long system prompt, two turns each, on a real model."""
    from radixkv.cli.demo import run_demo

    run_demo(dtype, device, quantization, max_tokens, compare)


@app.command()
def chat(
    model: Model = "demo",
    dtype: Dtype = "auto",
    device: Device = "auto",
    kv_memory: KVMemory = "auto",
    kv_dtype: KVDtype = "auto",
    quantization: Quantization = None,
    block_size: BlockSize = 16,
    seed: Seed = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
) -> None:
    """Talk with the model; /fork opens a second branch from here, /help lists the commands."""
    from radixkv.cli.chat import run_chat
    from radixkv.decoding import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    options = _ModelOptions(
        model, dtype, device, kv_memory, kv_dtype, quantization, block_size, seed
    )
    run_chat(options.load(), params, system)


@app.command()
def generate(
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with a 'prompt' or 'messages' each.", exists=True, dir_okay=False
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the JSON lines of results go; with --prompts.")
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Continuations of each prompt.")] = 1,
    model: Model = "demo",
    dtype: Dtype = "auto",
    device: Device = "auto",
    kv_memory: KVMemory = "auto",
    kv_dtype: KVDtype = "auto",
    quantization: Quantization = None,
    block_size: BlockSize = 16,
    seed: Seed = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a continuation.")] = None,
) -> None:
    """Continue prompts: from the command line to the terminal, or from a file to a file."""
    from radixkv.cli.batch import run_file, run_prompts
    from radixkv.decoding import SamplingParams

    if bool(prompt) == (prompts is not None):
        raise typer.BadParameter("give either --prompt or --prompts")
    if (prompts is None) != (output is None):
        raise typer.BadParameter("--prompts and --output go together")
    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    options = _ModelOptions(
        model, dtype, device, kv_memory, kv_dtype, quantization, block_size, seed
    )
    if prompt:
        run_prompts(options.load, prompt, params)
    elif prompts is not None and output is not None:
        run_file(options.load, prompts, output, params)


app.command()(inspect)
app.command()(lint)
app.command()(serve)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"radixkv {radixkv.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="And exit.")
    ] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """The console script."""
    sys.exit(_exit_code(arguments))


def _exit_code(arguments: list[str] | None) -> int:
    try:
        code = app(args=arguments, standalone_mode=False)
    except KeyboardInterrupt:
        code = 130
    except (ConfigError, RequestError) as error:
        return _complain(error, 2)
    except RadixKVError as error:
        return _complain(error, 1)
    except BrokenPipeError:
        # Whoever read our output has left; what is still buffered must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _complain(f"{name}{error.strerror or error}", 1)
    except Exception as error:
        # Typer's own errors know their exit code, and how to say themselves in one line.
        code = 130 if type(error).__name__ == "Abort" else getattr(error, "exit_code", None)
        if not isinstance(code, int):
            raise
        format_message = getattr(error, "format_message", None)
        message = format_message() if format_message else str(error)
        if message:
            return _complain(message, code)
    if code == 130:
        print("\nstopped", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _complain(error: object, code: int) -> int:
    print(f"radixkv: {' '.join(str(error).split())}", file=sys.stderr)
    return code
