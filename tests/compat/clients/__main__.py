"""The command line of `compat.clients`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from compat.clients import BY_NAME, PACKAGE, PROGRAMS, verdict


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Programs made for BackPACK, with it and with curvopt.")
    parser.add_argument("programs", nargs="*", help=f"some of {', '.join(BY_NAME)}; else all")
    names = parser.parse_args(arguments).programs
    print("| of | program | numbers |", "|---|---|---|", sep="\n")
    for program in PROGRAMS:
        if program.installed and (program.name in names or not names):
            of = "BackPACK's gallery" if program.needs == PACKAGE else program.needs
            print(f"| {of} | {program.about} | {verdict(program)} |", flush=True)


if __name__ == "__main__":
    main()
