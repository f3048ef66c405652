"""All instructions with a handler. The machine itself executes branches, exits and barriers of the CTA."""

from __future__ import annotations

from tests.support.ptx import arithmetic, barriers, bitwise, conversions, tensor_cores, transfers, warps
from tests.support.ptx.form import Form, Step, Table
from tests.support.ptx.syntax import Symbol
from tests.support.ptx.types import Mask, Refused

HANDLERS = Table()
for _module in (arithmetic, bitwise, conversions, transfers, warps, barriers, tensor_cores):
    assert not HANDLERS.keys() & _module.TABLE.keys()
    HANDLERS.update(_module.TABLE)

CONTROL = Table()


def _nothing(mask: Mask) -> None:
    """What the machine does instead."""


@CONTROL.add("bra")
def _branch(form: Form) -> Step:
    form.take("uni")
    form.count(1)
    if not isinstance(form.operands[0], Symbol):
        raise Refused("not a label")
    return _nothing


@CONTROL.add("ret", "exit")
def _return(form: Form) -> Step:
    form.take("uni")
    form.count(0)
    return _nothing


@CONTROL.add("bar", "barrier")
def _barrier(form: Form) -> Step:
    if barriers.meets_in_parts(form.instruction, form.machine.threads):
        return barriers.named(form)
    form.need("sync")
    form.take("cta")
    form.take("aligned")
    form.count(1, 2)
    return _nothing
