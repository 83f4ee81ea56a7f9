"""A kernel of Gluon, Triton's language of layouts, for tests/test_triton.py: a pipeline of one stage."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Of newer Triton, and of older.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def copy_tiles(x, out, layout: gl.constexpr, BLOCK: gl.constexpr):
    tile = gl.allocate_shared_memory(gl.float32, [BLOCK], layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    mbarrier.expect(arrived, x.block_type.nbytes)
    load(x, [gl.program_id(0) * BLOCK], arrived, tile)
    mbarrier.wait(arrived, phase=0)  # the copy has arrived
    mbarrier.invalidate(arrived)
    store(out, [gl.program_id(0) * BLOCK], tile)
    tma.store_wait(pendings=0)
