"""Listings of compiled code: loops, spills and hazards are found in them."""

from __future__ import annotations

from ringray_kernels.inspect.listing import (
    GCN,
    SASS,
    gcn_instructions,
    inner_loops,
    sass_instructions,
    spilled_bytes,
)
from tests.kernels.sass import Loop, described, live_operand_writes

LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   STL.64 [R1], R2 ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0030*/                   MUFU.EX2 R3, R3 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   MUFU.EX2 R3, R3 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/                   MUFU.EX2 R3, R3 ;
        /*0080*/                   LDL R3, [R1] ;
        /*0090*/              @P0  BRA 0x20 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*00c0*/                   BRA 0x40 ;
"""


def test_listings_are_read_by_loop() -> None:
    code = sass_instructions(LISTING)
    (loop,) = inner_loops(code, SASS.product)
    assert len(loop) == 8
    assert described(loop) == Loop(8, 4, 2, 3, 4)
    assert spilled_bytes(code, SASS.spill) == 12
    assert spilled_bytes(loop, SASS.spill) == 4


LIVE = """
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0 ;
        /*0010*/                   FADD R8, R9, R10 ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0030*/                   F2FP.BF16.F32.PACK_AB R7, R9, R10 ;
        /*0040*/              @P0  BRA 0x0 ;
        /*0050*/                   EXIT ;
"""


def test_writes_to_operands_of_products_under_way_are_found() -> None:
    assert live_operand_writes(sass_instructions(LIVE)) == []
    (found,) = live_operand_writes(sass_instructions(LIVE.replace("FADD R8", "FADD R7")))
    assert found.startswith("FADD R7")
    (found,) = live_operand_writes(sass_instructions(LIVE.replace("gsb0, 0x0", "gsb0, 0x1")))
    assert found.startswith("F2FP")
    wide = LIVE.replace("FADD R8, R9, R10", "LDS.128 R0, [R9]")
    assert live_operand_writes(sass_instructions(wide)) == []
    (found,) = live_operand_writes(sass_instructions(wide.replace("R0, [", "R4, [")))
    assert found.startswith("LDS.128")


def test_listings_of_amd_are_read_by_loop() -> None:
    text = """
        scratch_store_dwordx4 off, v[0:3], s32 ; 16-byte Folded Spill
    .LBB0_1:
        v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
        scratch_load_dword v1, off, s32
        s_cbranch_scc1 .LBB0_1
        s_endpgm
    """
    code = gcn_instructions(text)
    (loop,) = inner_loops(code, GCN.product)
    assert len(loop) == 3
    assert spilled_bytes(code, GCN.spill) == 20
    assert spilled_bytes(loop, GCN.spill) == 4
