# mypy: ignore-errors
"""What the attention kernels share: reading tiles, and which tiles need a mask.

Letters of the shape suffixes: B batch, H query heads, G key/value heads, M queries, N keys, D width
of one head. Every kernel works on tiles of BLOCK_M queries and BLOCK_N keys, and of BLOCK_D >= D
columns (a power of two; the columns past D read as zero and are never written).

A tile of the M x N score matrix is *full* when each of its pairs is visible, *partial* when some
are, and otherwise skipped. The tiles that one block of queries must read are a run of keys

    lo ......... full_lo .................. full_hi ......... hi
     |  partial   |          full            |    partial   |

so a kernel walks up to three loops, and only the outer two pay for a mask. `keys_of` gives the four
bounds for a block of queries, `queries_of` those for a block of keys.

A source is a pointer, or with TMA a tensor descriptor: Hopper's copy engine then computes the
addresses, and rows outside the tensor read as zero and are not written. (mypy skips this file and
the other kernels: their bodies are Triton's language, not Python's.)
"""

import math

import triton
import triton.language as tl

LN2 = tl.constexpr(math.log(2))
LOG2E = tl.constexpr(math.log2(math.e))

# Triton compiles a kernel anew when one of its integers turns into 1 or a multiple of 16. For these
# that gains nothing, and every sequence length would be compiled for.
ANY_INTEGER = [
    "heads", "H", "M", "N", "window", "section", "line_stride",
    "head_lo", "chunk_lo", "chunk_hi",
]  # fmt: skip

# Triton's interpreter multiplies bf16 as the integers in which it stores them.
WIDEN_BF16 = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _round_to_tf32(x):
    """The nearest number of 10 bits. The tensor cores cut the rest off: twice to four times the
    error, all in one direction."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """a @ b, plus `acc` unless that is None; PRECISION says how fp32 is multiplied.

    "three parts": a and b are three bf16 parts each, the largest first. Of their nine products six
    matter to 24 bits. The small ones are added first, and `acc` outside the tensor cores: those cut
    sums off instead of rounding them, which over a long sequence costs more than a digit.
    "two parts": of their four products three matter to 16 bits, and the cut stays below them.
    """
    if PRECISION == "three parts":
        part = _dot(a[2], b[0], None, "ieee")
        part = _dot(a[1], b[1], part, "ieee")
        part = _dot(a[0], b[2], part, "ieee")
        part = _dot(a[1], b[0], part, "ieee")
        part = _dot(a[0], b[1], part, "ieee")
        part = _dot(a[0], b[0], part, "ieee")
        acc = part if acc is None else acc + part
    elif PRECISION == "two parts":
        acc = _dot(a[1], b[0], acc, "ieee")
        acc = _dot(a[0], b[1], acc, "ieee")
        acc = _dot(a[0], b[0], acc, "ieee")
    elif PRECISION == "tf32" and a.dtype == tl.float32:
        acc = _dot(_round_to_tf32(a), _round_to_tf32(b), acc, PRECISION)
    else:
        acc = _dot(a, b, acc, PRECISION)
    return acc


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    if WIDEN_BF16 and a.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def turned(x, PRECISION: tl.constexpr):
    """x transposed, or each of its parts."""
    if PRECISION == "three parts":
        x_T = (x[0].T, x[1].T, x[2].T)
    elif PRECISION == "two parts":
        x_T = (x[0].T, x[1].T)
    else:
        x_T = x.T
    return x_T


@triton.jit
def factor(x, other, PRECISION: tl.constexpr):
    """Computed fp32 numbers as a factor of a product with `other`."""
    if PRECISION == "three parts":
        made = split(x)
    elif PRECISION == "two parts":
        parts = split(x)
        made = (parts[0], parts[1])
    else:
        made = x.to(other.dtype)
    return made


@triton.jit
def split(x):
    """fp32 as three bf16 numbers that add up to it, the largest first."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return high, middle, low


@triton.jit
def keys_of(
    m0, N, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Bounds of the keys that the queries [m0, m0 + BLOCK_M) see."""
    lo = 0
    hi = N
    full_lo = 0
    full_hi = N // BLOCK_N * BLOCK_N
    if CAUSAL:
        hi = tl.minimum(hi, m0 + BLOCK_M)
        full_hi = tl.minimum(full_hi, (m0 + 1) // BLOCK_N * BLOCK_N)
    if WINDOW:
        lo = tl.maximum(m0 - window + 1, 0) // BLOCK_N * BLOCK_N
        full_lo = tl.cdiv(tl.maximum(m0 + BLOCK_M - window, 0), BLOCK_N) * BLOCK_N
        if not CAUSAL:
            hi = tl.minimum(hi, m0 + BLOCK_M - 1 + window)
            full_hi = tl.minimum(full_hi, (m0 + window) // BLOCK_N * BLOCK_N)
    full_lo = tl.minimum(tl.maximum(full_lo, lo), tl.maximum(hi, lo))
    return lo, full_lo, tl.maximum(full_hi, full_lo), hi


@triton.jit
def queries_of(
    n0, M, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Bounds of the queries that see the keys [n0, n0 + BLOCK_N).

    A last block of fewer queries than BLOCK_M counts as full: the missing rows of do and delta read
    as zero, which makes what they add zero.
    """
    lo = 0
    hi = tl.cdiv(M, BLOCK_M) * BLOCK_M
    full_lo = 0
    full_hi = hi
    if CAUSAL:
        lo = n0 // BLOCK_M * BLOCK_M
        full_lo = tl.cdiv(n0 + BLOCK_N - 1, BLOCK_M) * BLOCK_M
    if WINDOW:
        hi = tl.minimum(hi, n0 + BLOCK_N - 1 + window)
        full_hi = tl.minimum(full_hi, (n0 + window) // BLOCK_M * BLOCK_M)
        if not CAUSAL:
            lo = tl.maximum(n0 - window + 1, 0) // BLOCK_M * BLOCK_M
            full_lo = tl.cdiv(tl.maximum(n0 + BLOCK_N - window, 0), BLOCK_M) * BLOCK_M
    full_lo = tl.minimum(tl.maximum(full_lo, lo), tl.maximum(hi, lo))
    return lo, full_lo, tl.maximum(full_hi, full_lo), hi


@triton.jit
def visible(m, n, N, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether query m sees key n; `m` and `n` are index tensors that broadcast to a tile."""
    seen = n < N
    if CAUSAL:
        seen = seen & (n <= m)
    if WINDOW:
        seen = seen & (m - n < window)
        if not CAUSAL:
            seen = seen & (n - m < window)
    return seen


@triton.jit
def load_rows(
    source, b, h, row, rows, width, strides,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
    EVEN_ROWS: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + BLOCK) of one head; what lies outside the tensor reads as zero."""
    if TMA:
        tile = source.load([b, h, row, 0]).reshape([BLOCK, BLOCK_D])
    else:
        r = row + tl.arange(0, BLOCK)
        d = tl.arange(0, BLOCK_D)
        head = source + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        pointers = head + r[:, None].to(tl.int64) * strides[2] + d[None, :]
        if EVEN_ROWS and EVEN_D:
            tile = tl.load(pointers)
        elif EVEN_D:
            tile = tl.load(pointers, mask=r[:, None] < rows, other=0.0)
        elif EVEN_ROWS:
            tile = tl.load(pointers, mask=d[None, :] < width, other=0.0)
        else:
            tile = tl.load(pointers, mask=(r[:, None] < rows) & (d[None, :] < width), other=0.0)
    return tile


@triton.jit
def load_factor(
    source, b, h, row, rows, width, strides,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
    EVEN_ROWS: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`load_rows` for a product: all parts of a head, where `split_kernel` has made them."""
    if PRECISION == "three parts":
        a = load_rows(
            source, b, 3 * h, row, rows, width, strides, BLOCK, BLOCK_D, TMA, EVEN_ROWS, EVEN_D
        )
        c = load_rows(
            source, b, 3 * h + 1, row, rows, width, strides, BLOCK, BLOCK_D, TMA, EVEN_ROWS, EVEN_D
        )
        e = load_rows(
            source, b, 3 * h + 2, row, rows, width, strides, BLOCK, BLOCK_D, TMA, EVEN_ROWS, EVEN_D
        )
        tile = (a, c, e)
    elif PRECISION == "two parts":
        a = load_rows(
            source, b, 2 * h, row, rows, width, strides, BLOCK, BLOCK_D, TMA, EVEN_ROWS, EVEN_D
        )
        c = load_rows(
            source, b, 2 * h + 1, row, rows, width, strides, BLOCK, BLOCK_D, TMA, EVEN_ROWS, EVEN_D
        )
        tile = (a, c)
    else:
        tile = load_rows(
            source, b, h, row, rows, width, strides, BLOCK, BLOCK_D, TMA, EVEN_ROWS, EVEN_D
        )
    return tile


@triton.jit
def store_rows(
    target, tile, b, h, row, rows, width, strides,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Write rows [row, row + BLOCK) of one head, leaving out what lies outside the tensor."""
    if TMA:
        target.store([b, h, row, 0], tile.to(target.dtype).reshape([1, 1, BLOCK, BLOCK_D]))
    else:
        tile = tile.to(target.dtype.element_ty)
        r = row + tl.arange(0, BLOCK)
        d = tl.arange(0, BLOCK_D)
        head = target + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        pointers = head + r[:, None].to(tl.int64) * strides[2] + d[None, :]
        tl.store(pointers, tile, mask=(r[:, None] < rows) & (d[None, :] < width))


@triton.jit
def load_line(source, head, m0, M, stride, BLOCK_M: tl.constexpr, TMA: tl.constexpr):
    """One number per query (lse or delta) for [m0, m0 + BLOCK_M); past M it reads as zero."""
    if TMA:
        line = source.load([head, m0]).reshape([BLOCK_M])
    else:
        m = m0 + tl.arange(0, BLOCK_M)
        line = tl.load(source + head.to(tl.int64) * stride + m, mask=m < M, other=0.0)
    return line


@triton.jit
def segment_bounds(first, last, index, row, rows, opposite, lo, hi, BLOCK_OPPOSITE: tl.constexpr):
    """Narrow [lo, hi) to what the segments of the rows `index` reach on the opposite side.

    `first` and `last` hold, per row, where its segment starts and ends over there.
    """
    reach_lo = tl.min(tl.load(first + row + index, mask=index < rows, other=opposite), 0)
    reach_hi = tl.max(tl.load(last + row + index, mask=index < rows, other=0), 0)
    lo = tl.maximum(lo, reach_lo // BLOCK_OPPOSITE * BLOCK_OPPOSITE)
    return lo, tl.minimum(hi, reach_hi)
