"""Products with the matrices of experts that have many rows on average, by the matrix unit.

The rows of each expert are written as tiles, in blocks of their own; each matrix then goes over the
blocks of its expert as in `jaxshare.cpu.matrices.many_rows`.
"""

from collections.abc import Sequence

from jaxshare.cpu.amx import TILE_BYTES
from jaxshare.cpu.experts.work import WORK, Way, begin, matrix_of
from jaxshare.cpu.ir import BF16, BYTES, FORMATS, I64, PTR, VOID, Code, Val, ir
from jaxshare.cpu.matrices.many_rows import (
    PIECE,
    ROW_BLOCKS,
    SIDE,
    Rows,
    TileProduct,
    blocks_of,
    pack_block,
    parts_of,
)
from jaxshare.cpu.quantised.many_rows import Strips
from jaxshare.cpu.quantised.work import MATRIX
from jaxshare.cpu.runtime import Call, begin_task


def write_many_rows(ways: Sequence[Way], dtype: str, result: str, call: Call) -> None:
    """Writes a call with matrices of these ways, and results of a dtype."""
    assert FORMATS[dtype] == BF16
    code = call.code
    work, allocated = begin(call, ways, None, BYTES[BF16], code.constant(PIECE))
    w = WORK.read_all(code, work)
    count, blocks = _write_blocks(call, work)
    packed = code.external("aligned_alloc", PTR, 64, count * parts_of(w.width) * TILE_BYTES)
    WORK.write(code, work, packed=packed)
    call.parallel(_write_packing(call), work, count)
    task = _write_piece(call, ways, FORMATS[result])
    call.parallel(task, work, w.used * w.parts * len(ways))
    for each in (*allocated, blocks, packed):
        code.external("free", VOID, each)


def _write_blocks(call: Call, work: Val) -> tuple[Val, Val]:
    """Cuts the slots of each expert into blocks.

    Returns:
      The number of blocks, and what is to be freed.
    """
    code, experts, slots = call.code, call.size(2, 0), call.size(1, 0) * call.size(1, 1)
    w = WORK.read_all(code, work)
    blocks = code.external("malloc", PTR, (2 * slots + experts) * 8)
    firsts = blocks + slots * 16
    WORK.write(code, work, blocks=blocks, firsts=firsts)
    count = code.var(0)
    with code.loop(0, w.used) as i:
        expert = code.load_int(w.active + i * 8, I64)
        code.store(count.get(), firsts + expert * 8)
        end = code.load_int(w.ends + (expert + 1) * 8, I64)
        with code.loop(code.load_int(w.ends + expert * 8, I64), end, SIDE) as at:
            place = blocks + count.get() * 16
            code.store(at, place)
            code.store(code.min(at + SIDE, end), place + 8)
            count.set(count.get() + 1)
    return count.get(), blocks


def _write_packing(call: Call) -> Code:
    """packing(work, i): writes a block of rows of one expert. Those after the last are copies."""
    code = begin_task(call, "packing")
    work, block = code.args
    w = WORK.read_all(code, work)
    first, end = (code.load_int(w.blocks + block * 16 + at, I64) for at in (0, 8))
    slots = [code.load_int(w.slots + code.min(first + i, end - 1) * 8, I64) for i in range(SIDE)]
    rows = [w.x + slot // w.share * w.width * 2 for slot in slots]
    pack_block(code, rows, w.packed + block * parts_of(w.width) * TILE_BYTES, w.width)
    code.give()
    return code


def _write_piece(call: Call, ways: Sequence[Way], result: ir.Type) -> Code:
    """piece(work, i): some outputs of one matrix of one expert, for all of its rows."""
    functions = {way: _write_outputs(call, way, result) for way in dict.fromkeys(ways)}
    code = begin_task(call, "piece")
    work, index = code.args
    w = WORK.read_all(code, work)
    expert = code.load_int(w.active + index // (w.parts * len(ways)) * 8, I64)
    matrix, first = index // w.parts % len(ways), index % w.parts * w.piece
    for i, way in enumerate(ways):
        with code.where(matrix.equals(i)):
            code.call(functions[way], work, w.matrices + i * MATRIX.bytes, expert, first)
    code.give()
    return code


def _write_outputs(call: Call, way: Way, result: ir.Type) -> Code:
    """outputs(work, matrix, expert, first): the results of an expert's rows at a piece of outputs."""
    name = f"outputs_{way.name if way else ''}"
    code = Code(call.module, call.machine, name, [PTR, PTR, I64, I64])
    work, place, expert, first = code.args
    w, matrix = WORK.read_all(code, work), matrix_of(code, place, way, expert)
    start = code.load_int(w.ends + expert * 8, I64)
    count = code.load_int(w.ends + (expert + 1) * 8, I64) - start
    block = code.load_int(w.firsts + expert * 8, I64)

    def results_of(row: Val) -> Val:
        slot = code.load_int(w.slots + (start + row) * 8, I64)
        return matrix.y + slot * w.out * BYTES[result]

    rows = Rows(w.packed + block * parts_of(w.width) * TILE_BYTES, count, results_of)
    product = (
        Strips(code, way, w.width, result, same_order=True)
        if way
        else TileProduct(code, w.width, result, same_order=True)
    )
    number, blocks = code.min(w.out - first, w.piece), blocks_of(count)
    with code.loop(0, blocks, ROW_BLOCKS) as at:
        some = at, code.min(at + ROW_BLOCKS, blocks)
        product.write(matrix, (first, number), rows, some)
    product.unit.release()
    code.give()
    return code
