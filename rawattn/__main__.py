# SPDX-License-Identifier: Apache-2.0
"""``python -m rawattn``: what would run, what is here, and whether it works.

Each command is a module of `rawattn.cli`, whose `run` turns arguments into facts and an exit code;
facts are printed here, for people or as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from rawattn import __version__
from rawattn.cli import INTERRUPTED
from rawattn.cli.text import render
from rawattn.problem import Unsupported

EPILOG = """\
exit codes: 0 done; 1 something failed, or a GPU or compiler is needed that is not here;
2 the arguments are not accepted, or no backend takes the problem; 3 (bench) cases are left;
130 Ctrl+C, 143 SIGTERM"""


class UsageError(Exception):
    """A command line that is not accepted, of `program`."""

    def __init__(self, program: str, message: str) -> None:
        super().__init__(message)
        self.program = program


# fmt: off
SHAPE = (
    "--heads", "--head-dim", "--kv-heads", "--value-dim", "--dtype", "--causal", "--window",
    "--softcap", "--alibi", "--sink", "--varlen",
)
# fmt: on
WITHOUT_PREFIX = ("--append", "--rotary", "--tree", "--csr", "--leftpad")
ATTENTION = ("--split", "--prefix", *WITHOUT_PREFIX)
PAGED = ("--page", "--cache-dtype", "--copy-blocks", *ATTENTION)
CALL = ("--backend", "--cache", "--merge", "--output-scale", *PAGED)
SCORES = ("--causal", "--window", "--softcap", "--alibi", "--sink", "--varlen")
# Flags of `plan` and `compile` that say nothing with another flag, or without it.
CALLS = (
    ("without", "--cache", PAGED),
    ("without", "--append", ("--rotary",)),
    ("without", "--merge", ("--output-scale",)),
    ("with", "--merge", ("--k-len", "--kv-heads", "--value-dim", *SCORES, "--cache", *PAGED)),
    ("with", "--copy-blocks", ("--batch", "--q-len", "--k-len", *SCORES, *ATTENTION)),
    ("with", "--leftpad", ("--page", "--csr")),
    ("with", "--csr", ("--append",)),
    ("with", "--prefix", ("--window", "--alibi", *WITHOUT_PREFIX)),
)
# The same of all commands.
UNUSED = (
    *((command, *rule) for command in ("plan", "compile") for rule in CALLS),
    ("roofline", "without", "--model", ("--kv-bits", "--weight-bits")),
    ("roofline", "with", "--model", ("--q-len", *SHAPE, "--tiles")),
    ("roofline", "without", "--plot", ("--rows",)),
    ("compile", "with", "--all", ("--batch", "--q-len", "--k-len", *SHAPE, *CALL)),
)
ROOFS = ("float16", "bfloat16")  # of FLOATS those that have a peak: neither module is read here
LARGEST = 2**31 - 1  # of sizes: what kernels count in


class Parser(argparse.ArgumentParser):
    """One that raises `UsageError` where argparse would exit, and takes flags in full alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(self.prog, message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code. Facts go to stdout, errors and progress to stderr."""
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            print(end="", flush=True)  # here, where it can still be said that it fails
    except OSError as error:
        # A reader that has gone needs no word. What is still held back goes nowhere.
        if not isinstance(error, BrokenPipeError):
            _say(f"rawattn: cannot write the output: {error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _run(argv: Sequence[str]) -> int:
    try:
        args = parser().parse_args(argv)
        check_used(args.command, {text.split("=")[0] for text in argv})
    except UsageError as error:
        named = error.program.removeprefix("python -m ")
        facts = _explain(named, error, hint=f". See {error.program} --help")
        if "--json" in argv:
            print(json.dumps(facts, indent=2))
        return 2
    try:
        facts, code = importlib.import_module(f"rawattn.cli.{args.command}").run(args)
    except (Unsupported, ValueError, TypeError) as error:
        facts, code = _explain(f"rawattn {args.command}", error), 2
    except (RuntimeError, OSError) as error:
        facts, code = _explain(f"rawattn {args.command}", error), 1
    except KeyboardInterrupt:
        facts = _explain(f"rawattn {args.command}", KeyboardInterrupt("interrupted"))
        code = INTERRUPTED
    if args.json:
        print(json.dumps(facts, indent=2))
    elif "error" not in facts:
        print(render(facts))
    return code


def check_used(command: str, given: Collection[str]) -> None:
    """UsageError for a flag that another one, `given` or not, leaves without effect."""
    for of, word, switch, flags in UNUSED:
        if of == command and (switch in given) == (word == "with"):
            for flag in flags:
                if flag in given:
                    why = f"argument {flag}: says nothing {word} {switch}"
                    raise UsageError(f"python -m rawattn {command}", why)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _explain(what: str, error: BaseException, hint: str = "") -> dict[str, str]:
    _say(f"{what}: {error}{hint}")
    return {"error": type(error).__name__, "message": str(error)}


def parser() -> Parser:
    """The command line. Builds nothing that needs NumPy, so that `info` runs without it."""
    common = Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON document on stdout")
    whole = Parser(
        prog="python -m rawattn",
        description="What would run, what is here, and whether it works.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"rawattn {__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, *parents: Parser) -> Parser:
        return commands.add_parser(name, help=text, description=text, parents=[common, *parents])

    add("info", "GPU, compiler, cache and backends of this machine")
    _call_flags(add("plan", "which backend and tiles a problem gets, and why", problem_flags()))
    roofs = add("roofline", "least time of a problem or a model", problem_flags(roofs=True))
    _roofline_flags(roofs)
    fill = add("compile", "fill the kernel cache ahead of time", problem_flags(ahead=True))
    _call_flags(fill)
    fill.add_argument("--all", action="store_true", help="all kernels, not those of some calls")
    fill.add_argument("--jobs", type=positive, help="processes (default: one a core)")
    kernels = add("cache", "compiled kernels on this machine; not the objects of the emulator")
    kernels.add_argument("action", choices=("list", "size", "clear"), nargs="?", default="list")
    add("selftest", "a few problems through the public functions, held to float64")
    _bench_flags(add("bench", "measure beside other libraries (from a clone, with a GPU)"))
    return whole


def _call_flags(flags: Parser) -> None:
    """What a call says beside its problem: a backend, and a cache."""
    flags.add_argument("--backend", help="take this one, or say why not")
    cache = flags.add_argument_group("paged cache")
    cache.add_argument("--cache", choices=("NHD", "HND", "x-major"), help="keys lie in pages")
    cache.add_argument("--page", type=positive, default=16, help="tokens a page, default 16")
    cache.add_argument("--cache-dtype", default="auto", help="auto (default), fp8, fp8_e5m2, int8")
    cache.add_argument("--split", type=count, default=0, help="tokens of a part, default balanced")
    cache.add_argument(
        "--append", action="store_true", help="store the tokens of the queries first"
    )
    cache.add_argument(
        "--rotary", type=positive, metavar="DIM", help="with --append: columns turned"
    )
    cache.add_argument("--tree", action="store_true", help="with a tree_mask, in place of --causal")
    cache.add_argument("--csr", action="store_true", help="with kv_indptr, not a block table")
    cache.add_argument(
        "--leftpad",
        action="store_true",
        help="cache_leftpad: in place of pages, rows of --k-len tokens",
    )
    cache.add_argument(
        "--prefix", type=count, metavar="TOKENS", help="cascade_attention: tokens that all share"
    )
    cache.add_argument(
        "--copy-blocks", type=positive, metavar="PAIRS", help="copy_blocks, in caches of one layer"
    )
    others = flags.add_argument_group("merging")
    others.add_argument(
        "--merge", type=positive, metavar="STATES", help="merge_states of --batch x --q-len rows"
    )
    others.add_argument("--output-scale", action="store_true", help="with --merge: to fp8")


def _roofline_flags(roofs: Parser) -> None:
    roofs.add_argument(
        "--tiles", nargs=2, type=positive, default=(128, 64), metavar=("QUERIES", "KEYS")
    )
    roofs.add_argument("--model", help="a step of decoding this model, as llama-3-8b")
    roofs.add_argument("--kv-bits", type=int, choices=(16, 8), default=16, help="with --model")
    roofs.add_argument("--weight-bits", type=int, choices=(16, 8, 4), default=16, help="likewise")
    roofs.add_argument("--plot", metavar="FILE.png", help="draw the roofs (needs matplotlib)")
    roofs.add_argument("--rows", metavar="FILE.csv", help="and these rows of the bench under them")


def _bench_flags(flags: Parser) -> None:
    flags.add_argument("--suite", help="one suite (default: all)")
    flags.add_argument("--case", metavar="PATTERN", help="cases that match a shell pattern")
    flags.add_argument("--peers", metavar="NAMES", help="some peers, by commas (default: all)")
    flags.add_argument("--quick", action="store_true", help="few cases and rounds, four minutes")
    flags.add_argument("--again", action="store_true", help="also cases that have rows already")
    flags.add_argument("--out", metavar="DIR", help="folder of rows (default: bench/results)")


def problem_flags(*, ahead: bool = False, roofs: bool = False) -> Parser:
    """The flags that `rawattn.cli.flags` reads: a problem and a device.

    `ahead` is for what compiles: batch and lengths are lists then, and an `arch` may stand for the
    device. `roofs` is for peaks of GPUs: dtypes are those that have one, devices never the host.
    """
    flags = Parser(add_help=False)
    sizes = flags.add_argument_group("problem")

    def add(name: str, default: int | None, text: str) -> None:
        several = ahead and name in ("batch", "q-len", "k-len")
        sizes.add_argument(
            f"--{name}",
            type=positive if name.endswith("dim") else count,
            nargs="+" if several else None,
            default=[default] if several else default,
            help=text + "; several: all combinations" * several,
        )

    for name, default in (("batch", 1), ("q-len", 4096), ("heads", 16), ("head-dim", 128)):
        add(name, default, f"default {default}")
    for name, other in (("k-len", "q-len"), ("kv-heads", "heads"), ("value-dim", "head-dim")):
        add(name, None, f"default: as --{other}")
    sizes.add_argument(
        "--dtype",
        default="bfloat16",
        choices=ROOFS if roofs else None,
        metavar="DTYPE",
        help=f"float16, bfloat16 (default){'' if roofs else ', float32'}",
    )
    sizes.add_argument(
        "--causal", nargs="?", const=True, default=False, choices=("bottom_right", "top_left")
    )
    sizes.add_argument(
        "--window",
        nargs=2,
        type=window_side,
        default=(-1, -1),
        metavar=("LEFT", "RIGHT"),
        help="-1: open",
    )
    sizes.add_argument("--softcap", type=float, default=0.0, help="default: none")
    sizes.add_argument("--alibi", action="store_true", help="with ALiBi slopes")
    sizes.add_argument("--sink", action="store_true", help="with a sink for each head")
    sizes.add_argument("--varlen", action="store_true", help="packed sequences; lengths are bounds")
    target = flags.add_mutually_exclusive_group()
    names = (
        "a GPU as H200, or all" if roofs else "a GPU as H200" if ahead else "host, or a GPU as H200"
    )
    target.add_argument("--device", default="current", help=f"current (default), {names}")
    if ahead:
        target.add_argument("--arch", help="in place of --device: sm_80, sm_90a, ...")
    return flags


def count(text: str, least: int = 0) -> int:
    """A size from 0."""
    digits = text.removeprefix("-")
    readable = digits.isascii() and digits.isdecimal()
    number = int(text) if readable and len(text) < 100 else least - 1  # int() is slow for more
    if not least <= number <= LARGEST:
        accepted = f"accepted are integers from {least} to {LARGEST}"
        raise argparse.ArgumentTypeError(f"{text!r}: {accepted}")
    return number


def positive(text: str) -> int:
    """A size from 1."""
    return count(text, 1)


def window_side(text: str) -> int:
    """Keys on a side of a window, from -1: all."""
    return count(text, -1)


if __name__ == "__main__":
    sys.exit(main())
