"""Dropout of numbers in registers. Triton's interpreter does not run it; tests/gpu/test_attention_on_gpu.py compares
the kernels that use it with their definition."""

from megatron.core.ops.dropout.keep_bits_triton import bit_of


def test_a_thread_has_all_numbers_of_a_word() -> None:
    for thread in range(32):
        # Hopper's layout of the results of matrix products (PTX ISA, wgmma): pairs of every fourth pair of columns.
        pairs = [(8 * group + thread % 4 * 2, 8 * group + thread % 4 * 2 + 1) for group in range(16)]
        assert {column >> 1 & 3 for pair in pairs for column in pair} == {thread % 4}  # the word: see `KeepBits`
        assert sorted(bit_of.fn(column) for pair in pairs for column in pair) == list(range(32))
        assert all(bit_of.fn(second) == bit_of.fn(first) + 16 for first, second in pairs)
