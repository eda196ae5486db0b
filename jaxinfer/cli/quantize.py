"""`jaxinfer quantize`: writes a quantized copy of a checkpoint, by rounding or by GPTQ on calibration texts."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.atomic_file import replacing
from jaxinfer.cli.output import show
from jaxinfer.json_lines import lines_of, parse_line
from jaxinfer.validation import require, require_int

if TYPE_CHECKING:
    import numpy as np

    from jaxinfer.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

METHODS = ("round", "gptq")
SCHEME_HELP = "int4 (default), int3 or int2: a scale per 128 inputs; int8 or fp8: a scale per channel"
METHOD_HELP = (
    "round each weight (default), or gptq: calibrate on texts, so that later inputs make up for errors; int3 and int2"
    " need gptq"
)
FILE_HELP = 'text, or lines of {"text": …} in a file .jsonl; without it the model writes the texts'
# The options of calibration: the attribute, its default, and what it is.
NUMBERS = {
    "num_texts": (128, "texts of calibration"),
    "text_length": (512, "tokens of each"),
    "seed": (0, "of their choice, or of the model's own"),
}
MAX_TEXTS = 2**14


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    command.add_argument("source", metavar="MODEL", help="folder or name of a checkpoint in floating point")
    command.add_argument("target", metavar="OUT", help="folder of the copy, in the format of compressed-tensors")
    command.add_argument("--scheme", choices=("int4", "int3", "int2", "int8", "fp8"), default="int4", help=SCHEME_HELP)
    command.add_argument("--method", choices=METHODS, default="round", help=METHOD_HELP)
    command.add_argument("--calibration", metavar="FILE", type=Path, help=FILE_HELP)
    for name, (default, what) in NUMBERS.items():
        option = f"--{name.replace('_', '-')}"
        command.add_argument(option, type=int, metavar="N", help=f"{what} (default {default})")
    command.add_argument("--quiet", action="store_true", help="no progress and no sizes")


def run(arguments: argparse.Namespace) -> int:
    """Writes the copy, and prints its size."""
    from jaxinfer.checkpoint.quantized_copy import require_copyable, write_quantized

    numbers = {name: getattr(arguments, name) for name in NUMBERS}
    given = [name for name in ("calibration", *NUMBERS) if getattr(arguments, name) is not None]
    if arguments.method == "round" and given:
        option = f"--{given[0].replace('_', '-')}"
        raise ValueError(f"{option} is for --method gptq, for rounding reads no texts; leave it out, or add the method")
    numbers = {name: NUMBERS[name][0] if value is None else value for name, value in numbers.items()}
    require_int("num_texts", numbers["num_texts"], 1, MAX_TEXTS)
    require_int("text_length", numbers["text_length"], 2)
    require_int("seed", numbers["seed"], 0)
    checkpoint, target = require_copyable(arguments.source, arguments.target, arguments.scheme)
    source = checkpoint.path
    calibration = None
    if arguments.method == "gptq":
        options = {**numbers, "show_progress": not arguments.quiet}
        calibration = _calibration(checkpoint, target, arguments.calibration, **options)
    options = {"calibration": calibration, "show_progress": not arguments.quiet}
    write_quantized(checkpoint, target, arguments.scheme, **options)
    if not arguments.quiet:
        before, after = (
            sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6 for folder in (source, target)
        )
        show(f"{target}: {after:,.1f} MB of weights, {after / before:.2f} of the {before:,.1f} MB of {source}")
    return 0


def _calibration(
    checkpoint: Checkpoint,
    target: Path,
    file: Path | None,
    *,
    num_texts: int,
    text_length: int,
    seed: int,
    show_progress: bool,
) -> np.ndarray:
    """Returns the token ids i32[B, T] of calibration texts: those of a file, or the model's own."""
    from jaxinfer.checkpoint.quantized_copy import MAX_CALIBRATION_TOKENS

    require_int("text_length", text_length, 2, checkpoint.config.max_position)
    limit = f"at most {MAX_CALIBRATION_TOKENS // text_length:,} for texts of {text_length} tokens"
    require(num_texts * text_length <= MAX_CALIBRATION_TOKENS, "num_texts", num_texts, limit)
    if file is not None:
        return _choose_texts(_read_tokens(checkpoint.path, file), file, num_texts, text_length, seed)
    return _own_texts(checkpoint, target, num_texts, text_length, seed, show_progress=show_progress)


def _read_tokens(source: Path, file: Path) -> list[int]:
    """Returns the token ids of a file's texts, one text after another."""
    from jaxinfer.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_path(source)
    if tokenizer is None:
        raise ValueError(f"{source} has no tokenizer, so it cannot read {file}; leave --calibration out")
    try:
        if file.suffix != ".jsonl":
            return tokenizer.encode(file.read_text(encoding="utf-8"))
        with file.open("rb") as lines:
            records = [parse_line(line) for line in lines_of(lines) if line.strip()]
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error}); give a file of text, or of JSON lines") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return [token for record in records for token in tokenizer.encode(_text_of(record, file))]


def _text_of(record: Any, file: Path) -> str:
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'{file} has a line without a text; give lines of {{"text": "..."}}')
    return text


def _choose_texts(tokens: list[int], file: Path, num_texts: int, length: int, seed: int) -> np.ndarray:
    """Returns windows i32[B, length] of tokens, chosen at random if they are more than `num_texts`."""
    import numpy as np

    windows = np.array(tokens[: len(tokens) // length * length], np.int32).reshape(-1, length)
    if not len(windows):
        way_out = "give more text, or a shorter --text-length"
        raise ValueError(f"{file} has {len(tokens)} tokens, and --text-length is {length}; {way_out}")
    if len(windows) < num_texts:
        logger.warning("%s has %d texts of %d tokens, not %d: takes them all", file, len(windows), length, num_texts)
    return windows[np.sort(np.random.default_rng(seed).permutation(len(windows))[:num_texts])]


def _own_texts(
    checkpoint: Checkpoint, target: Path, num_texts: int, length: int, seed: int, *, show_progress: bool
) -> np.ndarray:
    """Returns texts i32[B, length] that the model samples at temperature 1.

    They are kept for a call that goes on, and for one that finds the copy finished. A text begins with the
    tokens that begin each text of its tokenizer, or else with a random token.
    """
    import numpy as np

    from jaxinfer import LLM, EngineConfig, SamplingParams
    from jaxinfer.checkpoint.quantized_copy import CALIBRATED
    from jaxinfer.text.tokenizer import Tokenizer

    kept = target / CALIBRATED / f"texts-{checkpoint.digest()}-{num_texts}-{length}-{seed}.npy"
    if kept.is_file():
        return np.load(kept)
    tokenizer = Tokenizer.from_path(checkpoint.path)
    begin = [] if tokenizer is None else tokenizer.encode("")
    require_int("text_length", length, max(len(begin), 1) + 1)
    generator = np.random.default_rng(seed)
    with LLM(checkpoint.path, config=EngineConfig(max_model_len=length), show_progress=show_progress) as llm:
        firsts = generator.integers(llm.model_config.vocab_size, size=num_texts)
        prompts = [begin or [int(first)] for first in firsts]
        params = [
            SamplingParams(temperature=1.0, max_tokens=length - len(prompt), ignore_eos=True, seed=int(own))
            for prompt, own in zip(prompts, generator.integers(2**31, size=num_texts), strict=True)
        ]
        completions = llm.generate(prompts, params, show_progress=show_progress)
    pairs = zip(prompts, completions, strict=True)
    texts = np.array([[*prompt, *completion.token_ids] for prompt, completion in pairs], np.int32)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with replacing(kept) as file:
        np.save(file, texts)
    return texts
