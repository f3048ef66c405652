"""Every form of instruction that the kernels contain is known: tests/ptx/opcodes.ptx has one of each."""

import re

import pytest

from tests.support.ptx.census import FILE, decode, forms, module, read
from tests.support.ptx.syntax import parse
from tests.support.ptx.types import Refused


def test_every_form_is_decoded():
    found = read()
    assert decode(FILE.read_text()) == len(found) > 300
    assert FILE.read_text() == module(found)


def test_an_unknown_form_is_refused():
    with pytest.raises(Refused, match="no such instruction"):
        decode(re.sub(r"\nfma\.", "\nfmb.", FILE.read_text()))


def test_a_form_has_the_types_of_its_registers():
    ptx = module([])
    body = ".reg .b32 %value<9>; .reg .b64 %at<9>; ld.global.v2.b32 {%value7, %value3}, [%at4 + 16];"
    assert forms(parse(ptx.replace("$END:", f"{body} $END:"))) == {"ld.global.v2.b32 {%r0, %r1}, [%rd0];"}
