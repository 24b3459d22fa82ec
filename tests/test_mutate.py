"""The script that mutates the package makes other programs, one change each."""

from __future__ import annotations

import ast

import mutate


def test_each_mutation_is_another_program():
    found = mutate.mutations("core/samples/layout.py")
    original = ast.dump(ast.parse((mutate.PACKAGE / found[0].file).read_text()))
    for mutation in found:
        changed = ast.dump(ast.parse(mutation.text()))
        assert changed != original, mutation
    replaced = {tuple(str(mutation).partition(": ")[2].partition("    in  ")[0].split("  ->  ")) for mutation in found}
    assert {("+", "-"), ("and", "or"), ("==", "!="), ("is", "is not")} <= replaced
    probed = mutate.with_probes(found[0].file, dict(enumerate(found)))
    assert ast.parse(probed) and all(mutate.REACHED.format(number) in probed for number in range(len(found)))
