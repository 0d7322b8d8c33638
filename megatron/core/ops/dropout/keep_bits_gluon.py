"""Dropout of the results of matrix products in registers, for attention kernels in Gluon.

A warp group of Hopper holds a product of 64 rows: a thread has two of the rows, and of each every fourth pair of
columns. `KeepBits` has the bits of these columns in one word, so that a thread loads two words for a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megatron.core.ops.dropout.keep_bits_triton import bit_of


@gluon.jit
def load_words(bits, row_stride, word_stride, COLUMNS: gl.constexpr, PRODUCT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns words of a block for the rows of a product [64, COLUMNS] in layout PRODUCT: [64, 4]. Each thread loads
    the two of its own numbers. `bits` are those of the first row."""
    LAYOUT: gl.constexpr = _groups(COLUMNS, PRODUCT).type.layout
    WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, LAYOUT)))
    row = gl.arange(0, 64, gl.SliceLayout(1, WORDS))[:, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, WORDS))[None, :]
    return gl.load(bits + row * row_stride + word * word_stride)


@gluon.jit
def find_kept(words, COLUMNS: gl.constexpr, PRODUCT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns which numbers of a product [64, COLUMNS] are kept. `words` are those of `load_words`."""
    return (_of_columns(words, COLUMNS, PRODUCT) & (1 << bit_of(_column(COLUMNS, PRODUCT)))) != 0


@gluon.jit
def drop_pairs(numbers, words, COLUMNS: gl.constexpr, PRODUCT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns numbers of 16 bits [64, COLUMNS] in layout PRODUCT, with 0 for those that are not kept. `words` are those
    of `load_words`. Two instructions drop a pair: one copies the highest bits of two bytes to 16 bits each."""
    column = _column(COLUMNS, PRODUCT)
    words = _of_columns(words, COLUMNS, PRODUCT)
    bytes_ = words * 0 + gl.where((column & 8) == 0, 0xAA88, 0xBB99)
    return gl.inline_asm_elementwise(
        "{.reg .b32 kept; prmt.b32 kept, $2, 0, $4; and.b32 $0, $1, kept;}", "=r,r,r,r,r,r",
        [numbers, words << (7 - (column >> 4 & 7)), bytes_], numbers.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _groups(COLUMNS: gl.constexpr, PRODUCT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns zeros whose dimensions are those of a column 16 i + 8 j + 2 word + k: row, i, j, word, k."""
    return gl.zeros([64, COLUMNS], gl.int32, PRODUCT).reshape([64, COLUMNS // 16, 2, 4, 2])


@gluon.jit
def _column(COLUMNS: gl.constexpr, PRODUCT: gl.constexpr):  # type: ignore[no-untyped-def]
    return gl.arange(0, COLUMNS, gl.SliceLayout(0, PRODUCT))[None, :]


@gluon.jit
def _of_columns(words, COLUMNS: gl.constexpr, PRODUCT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the word of each number of a product. A thread has it in a register already."""
    words = (_groups(COLUMNS, PRODUCT) + words[:, None, None, :, None]).reshape([64, COLUMNS])
    return gl.convert_layout(words, PRODUCT)
