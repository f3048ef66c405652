"""The records of static reports: parsing of machine code, and the contents of a record and its page."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks.compilers import cuda_launches, static
from benchmarks.compilers.machine_code import (
    DEVICES,
    Flow,
    Loop,
    bytes_in_flight,
    in_flight,
    loops_of,
    programs_of,
    shaped,
)
from transformer_kernels import cli
from transformer_kernels.backends import cuda as _extension


def test_figures_that_grow_are_named():
    record = static.recorded("triton")
    name, before = next(iter(record["launches"].items()))
    figures = json.loads(json.dumps(before))
    figures["registers"] *= 2
    figures["in_flight"] /= 2
    figures["loops"][0]["bound"] /= 2
    launch, _, architecture = name.rpartition(" sm_")
    report = SimpleNamespace(
        **{**figures, "loops": [Loop(**loop) for loop in figures["loops"]]},
        name=launch,
        capability=tuple(map(int, architecture)),
    )
    found = [text.removeprefix(f"{name}: ").rsplit(" ", 3)[0] for text in static.grown([report], record)]
    assert found == ["registers", "1 / bytes in flight", "1 / bound of loop 1"]
    report.registers, report.in_flight = before["registers"], before["in_flight"]
    report.loops = [Loop(**loop) for loop in before["loops"]]
    assert not static.grown([report], record)


def test_the_pages_of_bounds_are_the_records(capsys):
    assert cli.main(["info", "--static"]) == 0
    pages = [(static.FOLDER / f"{backend}.md").read_text() for backend in ("triton", "cuda")]
    assert capsys.readouterr().out.startswith("\n".join(pages))


def test_only_what_changed_is_compiled_anew(tmp_path, monkeypatch):
    hashes = {"softmax": "1", "gelu": "1"}
    loop = Loop(100, {"float": 100}, 0.5)
    compiled: list[str] = []

    def reports(backend, wanted):
        compiled.extend(wanted)
        return [
            SimpleNamespace(
                name=f"{part} bf16 64: {part}_forward", capability=(8, 0), registers=len(compiled), spills=0, shared=0,
                programs=8, in_flight=0, loops=(loop,),
            )
            for part in wanted
        ]  # fmt: skip

    monkeypatch.setattr(static, "FOLDER", tmp_path)
    monkeypatch.setattr(static, "parts", lambda backend: hashes)
    monkeypatch.setattr(static, "release", lambda backend: "nvcc 13.0")
    monkeypatch.setattr(static, "reports", reports)
    assert static.update("cuda")[1] == ["softmax", "gelu"] and static.update("cuda")[1] == []
    assert "## softmax\n" in static.page("cuda") and "| bf16 64: gelu_forward | sm_80 | 2 |" in static.page("cuda")
    hashes["softmax"] = "2"
    assert static.changed("cuda", static.recorded("cuda")) == ["softmax"] == static.update("cuda")[1]
    registers = {name: found["registers"] for name, found in static.recorded("cuda")["launches"].items()}
    assert registers == {"softmax bf16 64: softmax_forward sm_80": 3, "gelu bf16 64: gelu_forward sm_80": 2}
    hashes.pop("gelu")
    assert static.update("cuda")[1] == [] and len(static.recorded("cuda")["launches"]) == 1
    monkeypatch.setattr(static, "release", lambda backend: "nvcc 13.1")
    assert static.update("cuda")[1] == ["softmax"]


LOOP = """
LDGSTS.E.BYPASS.128 [R20], [R2.64]
LDGDEPBAR
LDG.E.128 R4, [R2]
@P1 BRA 0x60
FADD R30, R30, R30
BRA 0x60
@!P0 LDSM.16.M88.4 R8, [R9]
HMMA.16816.F32.BF16 R12, R8, R4, R12
DEPBAR.LE SB0, 0x0
MUFU.EX2 R3, R3
@P2 BRA 0xd0
FMUL R3, R3, R3
FMUL R3, R3, R3
@P1 BRA 0x60
@P3 BRA 0x20
EXIT
"""


def code_of(text):
    return [(0x10 * number, line) for number, line in enumerate(text.strip().splitlines())]


def test_the_innermost_loop_is_classified_and_bound():
    flow = Flow(code_of(LOOP))
    (loop,) = loops_of(flow, (8, 0), 4)
    assert loop.classes == {"branch": 2, "matrix": 1, "shared": 1, "special": 1, "wait": 1} and loop.instructions == 6
    assert loop.bound == 1.0  # 4 * 4096 / 2048 = 8 clocks of products, and 8 of a special function
    assert loops_of(flow, (9, 0), 4)[0].bound == 0.5
    assert bytes_in_flight(flow) == 32 and in_flight(flow, 1000, 4, 2) == 2 * 4 * 32 * 32
    with_tma = Flow(code_of(LOOP.replace("LDGSTS.E.BYPASS.128 [R20], [R2.64]", "UTMALDG.4D [UR8], [UR6]")))
    assert in_flight(with_tma, 1000, 4, 2) == 2000


def test_a_kernel_without_a_loop_is_judged_whole():
    straight = "LDG.E.128 R4, [R2]\n@P0 EXIT\n" + 300 * "FADD R1, R1, R1\n" + "STG.E.64 [R2], R6\nEXIT"
    (whole,) = loops_of(Flow(code_of(straight)), (9, 0), 4)
    assert whole.instructions == 304 and whole.classes["float"] == 300  # 32 lanes move 16 and 8 bytes each
    assert whole.bound == pytest.approx(32 * 24 / (3.35e12 / (4 * 132 * 1.83e9)) / 304, abs=1e-3)


def test_calls_are_branches_and_subroutines_no_part_of_a_loop():
    code = (
        "LDG.E.128 R4, [R2]\n@P0 CALL.REL.NOINC 0x50\nCALL.REL.NOINC 0xa0\nBRA.CONV ~URZ, 0x40\nFADD R1, R1, R1\n"
        "IADD3 R2, R2, R2, RZ\n@P0 LDG.E.U16 R7, [R2]\n@P1 BRA 0x60\n@P2 BRA 0x0\nEXIT\n"
        "MUFU.RCP R3, R3\nRET.REL.NODEC R22 0x0"
    )
    (loop,) = loops_of(Flow(code_of(code)), (9, 0), 4)  # and not the one over 16 bits
    assert loop.classes == {"global": 2, "branch": 3, "integer": 1} and loop.instructions == 6


def test_integers_take_two_clocks():
    code = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24\n" + 30 * "IADD3 R1, R1, R1, RZ\n" + "@P0 BRA 0x0\nEXIT"
    (loop,) = loops_of(Flow(code_of(code)), (9, 0), 4)
    assert loop.bound == pytest.approx(32 / 60, abs=1e-3)  # 2 * 16 * 64 * 16 / 1024 clocks of products


def test_products_in_tensor_memory_have_their_shape_in_a_descriptor():
    code = (
        "UMOV UR31, 0x8110490\nUTCHMMA gdesc[UR6], gdesc[UR8], tmem[UR15], tmem[UR30], idesc[UR31], !UPT\n"
        "@!UP0 UMOV UR31, 0x8100910\n@P1 UTCHMMA tmem[UR6], gdesc[UR8], tmem[UR15], tmem[UR30], idesc[UR31], UPT\n"
        + 100 * "FADD2 R1, R1, R1\n"
        + "LDTM.x64 R4, tmem[UR14]\n@P0 BRA 0x0\nEXIT"
    )
    shapes = [text.partition(" ")[0] for _, text in shaped(code_of(code)) if "MMA" in text]
    assert shapes[0] == "UTCHMMA.128x64x16" and "UTCHMMA.128x64x8.TF32 " in shaped(code_of(code))[3][1]
    (loop,) = loops_of(Flow(shaped(code_of(code))), (10, 0), 8)
    assert loop.classes["matrix"] == 2 and loop.classes["tensor memory"] == 1 and loop.instructions == 106
    assert loop.bound == pytest.approx(2 * 4 * 2 * 128 * 64 * 16 / 8 / 8192 / 106, abs=1e-3)


def test_programs_are_those_that_the_architecture_holds():
    for capability, programs in (((8, 0), 3), ((8, 6), 2), ((9, 0), 4), ((10, 0), 4), ((12, 0), 2)):
        assert programs_of(64, 48 << 10, 8, capability) == programs  # by shared memory, or registers
    assert [programs_of(16, 0, 1, capability) for capability in DEVICES] == [32, 16, 32, 32, 24]
    assert [programs_of(16, 0, 8, capability) for capability in DEVICES] == [8, 6, 8, 8, 6]  # by warps


def test_the_emulation_knows_what_a_call_launches():
    if not _extension.emulating():
        pytest.skip("with a GPU the kernels are not emulated")
    assert cuda_launches.launches("rotary", "80") == [
        cuda_launches.Launch("rotary bf16 64", "rotary_kernel", "false,bfloat16,8", 8, 0)
    ]
