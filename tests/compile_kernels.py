"""Compile every kernel, in the settings used in production, for four targets; needs no GPU.

    python tests/compile_kernels.py [--every | --first | --largest] [--on TARGETS] [--listing FILE.json] [stem ...]

Reads CASES from tests/compile_cases/<stem>.py: tuples (name, kernel, signature, constexprs, options) as
triton.compiler.ASTSource takes them. `launches` of compile_cases/_launches.py makes them of a call of a launcher.
`options` may hold:

    targets         the architectures to which a case is limited
    aligned         integer arguments that are multiples of 16, as pointers always are; "cache.row" is a field of a
                    view, whose fields may be None
    unaligned       pointers that may be no multiples of 16
    without         words that must not stand in its PTX
    without_behind  a word, and another that must not stand behind it there
    local           the bytes of local memory that it may use on sm_90
    distinct        numbers choose its code, so --largest compiles it as well

All cases are compiled for sm_90, for the other targets the first of each kernel; with --every all, with --first the
first of each kernel for all. With --largest, of those for sm_90 that differ in numbers alone (blocks, splits, heads)
with as many warps and the same limit of registers, only the one with the largest, and the distinct ones. --on names
some of the targets, with commas. Prints one line per case and target, with the kernel at its end; the exit status is 1
if a case fails to compile or uses more local memory on sm_90, which is none unless a case says so. With --listing, how
often each instruction stands in the PTX of each case is kept in a file; where there is such a file already, cases that
differ from it fail: other names and arguments change none.

Runs in a process of its own because the interpreter, once chosen, stays.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

os.environ.pop("TRITON_INTERPRET", None)
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from eagle_triton.runtime.fallback import reason_of, triton_version  # noqa: E402
from eagle_triton.runtime.launch import FUSED  # noqa: E402

CASES = Path(__file__).parent / "compile_cases"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

OF_CASES = {"targets", "aligned", "unaligned", "without", "without_behind", "local", "distinct"}
"""Options that Triton does not take."""

NEWER_PTXAS = 64 if triton_version() >= (3, 8) else 0
"""Bytes of local memory that the assembler of newer versions may use beyond what a case allows, which is what that of
Triton 3.6 and 3.7 uses: it keeps a few addresses there in a few kernels."""


class Usage(NamedTuple):
    """What one compiled kernel takes: registers per thread, local memory per thread and shared memory, in bytes."""

    registers: int
    local: int
    shared: int
    instructions: dict[str, int]  # of its PTX; none on AMD


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("stems", nargs="*", help="case files to compile, without .py; all if left out")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--every", action="store_true", help="all cases for all targets")
    which.add_argument("--first", action="store_true", help="the first case of each kernel for all targets")
    which.add_argument("--largest", action="store_true", help="of cases that differ in numbers alone, the largest")
    parser.add_argument("--on", type=lambda text: text.split(","), default=[*TARGETS], metavar="TARGETS")
    parser.add_argument("--listing", type=Path, metavar="FILE.json", help="where instructions are kept, or compared")
    options = parser.parse_args(argv)
    if unknown := set(options.on) - TARGETS.keys():
        parser.error(f"--on must be of {', '.join(TARGETS)}, got {', '.join(sorted(unknown))}")
    stems = options.stems or sorted(path.stem for path in CASES.glob("[!_]*.py"))
    before = json.loads(options.listing.read_text()) if options.listing and options.listing.exists() else None
    jobs, listing = [], {}
    for stem in stems:
        compiled, largest = set(), _largest(_cases(stem))
        for index, (_, kernel, *_, case_options) in enumerate(_cases(stem)):
            for arch in (target for target in case_options.get("targets", TARGETS) if target in options.on):
                if arch == "sm_90" and not options.first:
                    wanted = index in largest or not options.largest
                else:
                    wanted = options.every or (kernel, arch) not in compiled
                if wanted:
                    jobs.append((stem, index, arch))
                compiled.add((kernel, arch))
    failed = 0
    with ProcessPoolExecutor(max_workers=min(len(jobs), os.cpu_count() or 1)) as pool:
        for (stem, index, arch), result in zip(jobs, pool.map(_compile, jobs), strict=True):
            name = f"{stem:14} {_cases(stem)[index][0]:44} {arch:7}"
            if isinstance(result, str):
                failed += 1
                print(f"FAILED  {name} {result}", flush=True)
                continue
            listing[name] = result.instructions
            if before is not None and name in before and before[name] != result.instructions:
                failed += 1
                print(f"DIFFERS {name} {_difference(before[name], result.instructions)}", flush=True)
                continue
            kernel, case_options = _cases(stem)[index][1].fn, _cases(stem)[index][4]
            spilled = arch == "sm_90" and result.local > case_options.get("local", 0) + NEWER_PTXAS
            failed += spilled
            print(
                f"{'LOCAL ' if spilled else 'ok    '}  {name} {result.registers:4} registers {result.local:5} B local "
                f"{result.shared:7} B shared  {kernel.__module__}.{kernel.__name__}",
                flush=True,
            )
    if options.listing and before is None:
        options.listing.write_text(json.dumps(listing, indent=1))
    print(f"{len(jobs)} compiled, {failed} failed")
    return int(failed > 0)


def _largest(cases: list[tuple]) -> set[int]:
    """The places of the cases for sm_90 that --largest leaves."""
    found: dict[tuple, tuple[list[int], int]] = {}
    for index, (_, kernel, signature, constexprs, options) in enumerate(cases):
        if "sm_90" in options.get("targets", TARGETS):
            numbers: list[int] = []
            code = kernel, _without_numbers((signature, constexprs), numbers)
            alike = *code, options.get("maxnreg"), options.get("num_warps"), options.get("distinct") and index
            size = sorted(numbers, reverse=True)
            if alike not in found or size > found[alike][0]:
                found[alike] = size, index
    return {index for _, index in found.values()}


def _without_numbers(value, numbers: list[int]):
    """What is left of a signature or of constexprs, as something to compare. Numbers above 0 are kept in `numbers`."""
    if isinstance(value, dict):
        value = tuple((str(name), part) for name, part in value.items())
    if isinstance(value, tuple):
        return tuple(_without_numbers(part, numbers) for part in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        numbers += [value] if isinstance(value, int) and value > 0 else []
        return int
    return re.sub(r"\[.*", "", value) if isinstance(value, str) else value


def _difference(before: dict[str, int], now: dict[str, int]) -> str:
    """The instructions whose number has changed."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return ", ".join(f"{name} {before.get(name, 0)} -> {now.get(name, 0)}" for name in names)


_loaded: dict[str, list[tuple]] = {}


def _cases(stem: str) -> list[tuple]:
    if stem not in _loaded:
        spec = importlib.util.spec_from_file_location(f"compile_cases_{stem}", CASES / f"{stem}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _loaded[stem] = list({repr(case[1:]): case for case in reversed(module.CASES)}.values())[::-1]
    return _loaded[stem]


def _compile(job: tuple[str, int, str]) -> Usage | str:
    """Compile one case for one target: what it uses, or what went wrong."""
    stem, index, arch = job
    case = _cases(stem)[index]
    try:
        binary = compiled(case, arch)
    except Exception as error:  # whatever the compiler raises is this case's result
        return reason_of(error)
    if TARGETS[arch].backend != "cuda":
        return _amd_usage(binary)
    unwanted, (before, late) = case[4].get("without", ()), case[4].get("without_behind", (None, None))
    found = [word for word in unwanted if word in binary.asm["ptx"]]
    if before is not None and late in binary.asm["ptx"].partition(before)[2]:
        found.append(f"{late} behind {before}")
    return f"its PTX has {', '.join(found)}" if found else _cuda_usage(binary)


def compiled(case: tuple, arch: str):
    """A case as Triton compiles it for a target."""
    _, kernel, signature, constexprs, options = case
    if signature.get("PDL", "constexpr") != "constexpr":  # launched early where that can be
        signature, constexprs = {**signature, "PDL": "constexpr"}, {**constexprs, "PDL": arch in ("sm_90", "sm_100")}
    if missing := set(kernel.arg_names) ^ set(signature):
        raise ValueError(f"signature and kernel differ in {sorted(missing)}")
    signature = {name: signature[name] for name in kernel.arg_names}
    parts = [part for place, argument in enumerate(signature.items()) for part in _parts((place,), *argument)]
    constexprs = {**constexprs, **{path: None for path, _, kind in parts if kind is None}}
    aligned, unaligned = options.get("aligned", ()), options.get("unaligned", ())
    attributes = {
        path: [["tt.divisibility", 16]]
        for path, field, kind in parts
        if kind is not None and ((kind.startswith("*") and field not in unaligned) or field in aligned)
    }
    signature = {name: _without_none(kind) for name, kind in signature.items()}
    target = TARGETS[arch]
    of_case = OF_CASES if target.backend == "cuda" else OF_CASES | {"launch_pdl"}
    options = {name: value for name, value in {**FUSED, **options}.items() if name not in of_case}
    return triton.compile(_source(kernel)(kernel, signature, constexprs, attributes), target=target, options=options)


def _parts(path: tuple[int, ...], name: str, kind):
    """The paths, names and types of what an argument consists of: itself, or the parts of a view or tuple."""
    if not isinstance(kind, tuple):
        yield path, name, kind
        return
    for place, (field, part) in enumerate(zip(getattr(kind, "_fields", range(len(kind))), kind, strict=True)):
        yield from _parts((*path, place), f"{name}.{field}", part)


def _without_none(kind):
    """A type whose parts that are None are constexprs."""
    if not isinstance(kind, tuple):
        return "constexpr" if kind is None else kind
    parts = map(_without_none, kind)
    return type(kind)(*parts) if hasattr(kind, "_fields") else tuple(parts)


def _source(kernel) -> type[ASTSource]:
    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _cuda_usage(compiled) -> Usage:
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        listing = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", listing)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage:\n{listing}")
    registers, stack, local = map(int, found.groups())
    words = (line.split() for line in compiled.asm["ptx"].splitlines())
    kinds = Counter(
        line[1] if line[0].startswith("@") else line[0] for line in words if line and line[-1].endswith(";")
    )
    instructions = {name: count for name, count in sorted(kinds.items()) if not name.startswith(".")}
    return Usage(registers, stack + local, compiled.metadata.shared, instructions)


def _amd_usage(compiled) -> Usage:
    def read(field: str) -> int:
        return int(re.search(rf"\.{field}:\s*(\d+)", compiled.asm["amdgcn"]).group(1))

    return Usage(read("vgpr_count"), read("private_segment_fixed_size"), compiled.metadata.shared, {})


if __name__ == "__main__":
    sys.exit(main())
