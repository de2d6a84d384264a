"""State-space duality, serial over the chunks of a sequence, parallel over heads and rows of the state.

With S the state before the chunk and dS the gradient of the state after it, the two scans are one kernel:

    S' = exp(b_L) S + (exp(b_L - b) dt B)^T X            dS_before = exp(b_L) dS + (exp(b) C)^T dY   (REVERSE)

The factor of a row is put on its key, whose rounding to the operands' type is the only one: keys go through registers
into the product, x (or dy) stays where it was loaded. A decay is a number per head, so that where a long sequence is
cut into segments that run side by side, a segment maps its first state by exp(total decay) S + (what it writes from
zero): a first pass over the segments finds the latter, `ssd_merge_kernel` joins them, and the scan proper starts every
segment from its own first state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.launch.tiles import load_rows, load_tile, matrix, sequence_span, store_rows


@triton.jit(do_not_specialize=["T", "segments", "chunks_per_segment"])
def ssd_scan_kernel(
    x,  # [B, T, H, P]; REVERSE: dy
    keys,  # B [B, T, G, N]; REVERSE: C
    table,  # [chunks, H, 2, L]
    outer,  # [sequences, segments, H, N, P] fp32: S before the segment (REVERSE: dS after it); OUTER
    cu_seqlens,
    first_chunk,
    states,  # out [chunks, H, N, P]: S before each chunk (REVERSE: dS after it); STORE
    left_over,  # out [sequences, (segments,) H, N, P] fp32: S at the end (REVERSE: dS at the start); LEFT_OVER
    totals,  # out [sequences, segments, H] fp32: the segment's decay, as a power of two; not STORE
    T,
    segments,
    chunks_per_segment,
    x_token,
    x_head,
    key_token,
    key_group,
    H: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    L: tl.constexpr,
    REVERSE: tl.constexpr,
    OUTER: tl.constexpr,
    LEFT_OVER: tl.constexpr,
    STORE: tl.constexpr,  # False: the first pass over segments, one left-over each
    PACKED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    blocks: tl.constexpr = (N + BN - 1) // BN
    row = tl.program_id(0) // blocks
    n0 = tl.program_id(0) % blocks * BN
    h = row % H
    segment = row // H % segments
    n = row // H // segments
    first, length, chunk0 = sequence_span(n, T, cu_seqlens, first_chunk, PACKED, L)
    all_chunks = tl.cdiv(length, L)
    start = segment * chunks_per_segment
    chunks = tl.maximum(tl.minimum(all_chunks - start, chunks_per_segment), 0)
    if PACKED:
        chunks = all_chunks
    index = ((n * segments + segment).to(tl.int64) * H + h) * N * P + n0 * P
    S = tl.zeros([BN, BP], tl.float32)
    if OUTER:
        S = load_rows(outer + index, P, N - n0, P, BP, 0, tl.float32, BN)
    total = tl.zeros([], tl.float32)
    x_rows = matrix(x + first * x_token + h * x_head, length, x_token, P, BP, TMA, L)
    key_rows = matrix(keys + first * key_token + h // (H // G) * key_group, length, key_token, N, BN, TMA, L)
    rows = tl.arange(0, L)
    if STORE:
        slots = all_chunks * H  # of this sequence
        if TMA:
            base = states + chunk0 * H * N * P
            S_rows = tl.make_tensor_descriptor(base, [tl.maximum(slots * N, 1), P], [P, 1], [BN, BP])
    for step in tl.range(0, chunks, num_stages=STAGES):
        c = start + step
        if REVERSE:
            c = start + chunks - 1 - step
        slot = c * H + h
        value = load_tile(x_rows, length, x_token, c * L, 0, P, BP, TMA, L).to(DTYPE)
        key = tl.trans(load_tile(key_rows, length, key_token, c * L, n0, N, BN, TMA, L)).to(tl.float32)
        at = table + (chunk0 * H + slot) * 2 * L
        b = tl.load(at + L + rows)
        b_end = tl.load(at + 2 * L - 1)
        if STORE:
            if TMA:
                S_rows.store([slot * N + n0, 0], S.to(states.dtype.element_ty))
            else:
                out = states + (chunk0 * H + slot) * N * P + n0 * P
                store_rows(out, P, N - n0, P, BP, 0, S, BN)
        factor = tl.exp2(b) if REVERSE else tl.exp2(b_end - b) * tl.load(at + rows)
        S *= tl.exp2(b_end)
        total += b_end
        S += tl.dot((key * factor[None, :]).to(DTYPE), value, input_precision=PRECISION)
    if LEFT_OVER:
        if STORE:  # of the sequence: its last segment has it (REVERSE: its first); an empty one hands on what it got
            at_edge = segment == 0 if REVERSE else start + chunks_per_segment >= all_chunks
            if at_edge:
                end = (n.to(tl.int64) * H + h) * N * P + n0 * P
                store_rows(left_over + end, P, N - n0, P, BP, 0, S, BN)
        else:
            store_rows(left_over + index, P, N - n0, P, BP, 0, S, BN)
            tl.store(totals + (n * segments + segment) * H + h, total)


@triton.jit(do_not_specialize=["segments"])
def ssd_merge_kernel(
    local,  # [sequences, segments, H, N, P] fp32: what each segment leaves, started from zero
    totals,  # [sequences, segments, H] fp32
    outer,  # [sequences, H, N, P] fp32; OUTER
    carried,  # out [sequences, segments, H, N, P] fp32: where each segment starts (REVERSE: ends)
    segments,
    H: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
    OUTER: tl.constexpr,
):
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // blocks
    h = row % H
    n = (row // H).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    S = tl.zeros([BLOCK], tl.float32)
    if OUTER:
        S = tl.load(outer + (n * H + h) * SIZE + at, mask=inside, other=0.0)
    for step in range(0, segments):
        segment = step
        if REVERSE:
            segment = segments - 1 - step
        index = (n * segments + segment) * H + h
        tl.store(carried + index * SIZE + at, S, mask=inside)
        S = S * tl.exp2(tl.load(totals + index)) + tl.load(local + index * SIZE + at, mask=inside, other=0.0)
