"""The instruction set of the fused decode step: what one token needs, as rows of a structured array.

Every thread walks all instructions. Those that every thread needs the result of (norms, quantization) are
done by each thread in its own memory; those that are worth sharing (weights, attention) are split among the
threads, write to shared memory and end with a barrier. ``step.py`` executes the rows.
"""

import numpy as np

# residual = scale * (row of each sequence's token + second row, of its position)
EMBED = 0
# residual += scale * norm(source)
ADD = 1
# activations = norm(residual), and in a prompt pass target as well, where there is one
NORM = 2
# activations = source, of each of ``used`` experts where there are any
LOAD = 3
# target[rows] = weight · activations + bias; scaled, then softly capped
LINEAR = 4
# target[rows] = act(weight · activations + bias) * (second_weight · activations + second_bias)
GATED = 5
# source = norm(source)
NORM_ROW = 6
# per-head norm and rotary embedding of queries and keys in place; keys and values into the cache
ROTATE = 7
# target = softmax(scale q·kᵀ, softly capped) v over the cache
ATTEND = 8
# experts and shares of a sequence: those of the ``used`` largest of ``experts`` scores at source
ROUTE = 9
# GATED by the matrices of each of a sequence's experts: target [used][rows]
GATED_EXPERTS = 10
# target = Σ share · (the expert's weight · its activations), plus what was there times the last share
MIX_EXPERTS = 11
# prompt pass: target = weight · source in fp32; columns in the order of their experts, for all that follows
SCORE = 12
GROUP = 13

# Activations of GATED; the last is for soft caps, cap * tanh(x / cap).
SILU, GELU_TANH, GELU, TANH = 0, 1, 2, 3

# One tile counter per instruction, each on its own cache line.
COUNTER_BYTES = 64

# Addresses and sizes in bytes are int64; a stride is the distance between sequences. 0 stands for "none": an
# address of 0 leaves out what it is an operand of, a gamma of 0 the whole norm.
INSTRUCTION = np.dtype(
    [
        ("opcode", np.int64),
        ("barrier", np.int64),
        ("source", np.int64),
        ("source_stride", np.int64),
        ("target", np.int64),
        ("target_stride", np.int64),
        ("width", np.int64),
        # values of the activations that an instruction writes, zeros behind ``width`` or ``rows``
        ("padded", np.int64),
        ("rows", np.int64),
        # a function of row_kernels.py: of the weight's format and the step's numerics
        ("kernel", np.int64),
        # 1: the kernel, or some reader of these activations, takes int8 ones; 0: fp32
        ("int8", np.int64),
        ("weight", np.int64),
        ("row_bytes", np.int64),
        ("bias", np.int64),
        ("second_kernel", np.int64),
        ("second_int8", np.int64),
        ("second_weight", np.int64),
        ("second_row_bytes", np.int64),
        ("second_bias", np.int64),
        ("activation", np.int64),
        # mixtures: how many experts there are and each token uses; 1: shares of those add up to 1; 1: a
        # shared expert's output stands at target, its score and share behind the others
        ("experts", np.int64),
        ("used", np.int64),
        ("normalized", np.int64),
        ("shared", np.int64),
        # prompt pass: the panel a linear reads, and the kinds of sums that readers of what this writes need
        ("panel", np.int64),
        ("kinds", np.int64),
        # norms: of queries and of keys in ROTATE, where each head may have a weight of its own
        ("gamma", np.int64),
        ("second_gamma", np.int64),
        ("gamma_stride", np.int64),
        # 1: LayerNorm, whose bias is ``bias``; 0: RMSNorm
        ("centre", np.int64),
        ("keys", np.int64),
        ("values", np.int64),
        # which frequencies, from 1 on
        ("rope", np.int64),
        ("window", np.int64),
        ("epsilon", np.float32),
        ("scale", np.float32),
        ("softcap", np.float32),
    ],
    align=True,
)

# Sizes and constants of the model.
_SHARED = [
    ("heads", np.int64),
    ("kv_heads", np.int64),
    ("head_dim", np.int64),
    ("hidden", np.int64),
    ("max_positions", np.int64),
    # rotated elements of a head; rotary frequencies fp32 [ropes, rotary / 2], factors on cos and sin [ropes]
    ("rotary", np.int64),
    ("ropes", np.int64),
    ("frequencies", np.int64),
    ("magnitudes", np.int64),
    # queries at position p grow by 1 + temperature * ln(1 + p // period)
    ("temperature", np.float32),
    ("period", np.int64),
]

# What is the same for all instructions of a step: sizes of the model, where a thread's own memory keeps what.
CONTEXT = np.dtype(
    [
        # shared memory; int64 [batch]: token, slot of the cache it goes to, first slot behind the padding
        ("tokens", np.int64),
        ("positions", np.int64),
        ("starts", np.int64),
        ("tiles", np.int64),
        ("barrier", np.int64),
        *_SHARED,
        # a thread's own memory: base of thread 0, distance between threads, offsets inside
        ("arena", np.int64),
        ("arena_stride", np.int64),
        ("residual", np.int64),
        ("row", np.int64),
        ("activations", np.int64),
        ("activations_stride", np.int64),
        ("q", np.int64),
        ("q_stride", np.int64),
        ("scales", np.int64),
        ("sums", np.int64),
        ("cos", np.int64),
        ("sin", np.int64),
        ("scores", np.int64),
        ("tile", np.int64),
        # mixtures: softmax of scores; experts int64 [batch][used], shares fp32 [batch][used + 1], one for the
        # shared expert; rows of each one's product
        ("probabilities", np.int64),
        ("chosen", np.int64),
        ("shares", np.int64),
        ("products", np.int64),
    ],
    align=True,
)

# The same for a prompt pass, whose memory is shared by all threads but for a thread's tiles and scores.
PROMPT_CONTEXT = np.dtype(
    [
        # columns in this pass, and room for them: a multiple of activation_panel.COLUMNS
        ("used", np.int64),
        ("columns", np.int64),
        # int64 [columns]: token, sequence, slot of the cache; int64 [n_blocks][2]: first column, columns
        ("tokens", np.int64),
        ("sequences", np.int64),
        ("slots", np.int64),
        ("blocks", np.int64),
        ("n_blocks", np.int64),
        ("starts", np.int64),
        ("counters", np.int64),
        ("barrier", np.int64),
        *_SHARED,
        # 1: activations are bf16 panels; 0: int8 ones
        ("bf16", np.int64),
        # fp32 [columns][hidden] and [columns][ropes][rotary / 2]
        ("residual", np.int64),
        ("cos", np.int64),
        ("sin", np.int64),
        # two activation panels; offsets of scales and sums in a panel
        ("panels", np.int64),
        ("panel_bytes", np.int64),
        ("scales", np.int64),
        ("sums", np.int64),
        # mixtures: experts int64 [columns][used], shares fp32 [columns][used + 1], one for the shared expert;
        # two panels of a column for each choice, those of an expert behind each other
        ("chosen", np.int64),
        ("shares", np.int64),
        ("expert_panels", np.int64),
        ("expert_panel_bytes", np.int64),
        ("expert_scales", np.int64),
        ("expert_sums", np.int64),
        ("expert_columns", np.int64),
        # a thread's own memory
        ("arena", np.int64),
        ("arena_stride", np.int64),
        ("row", np.int64),
        ("tile", np.int64),
        ("second_tile", np.int64),
        ("scores", np.int64),
        ("transposed", np.int64),
        ("last_rows", np.int64),
        # mixtures: softmax of scores; where each expert's columns end, int64 [experts], and each choice's
        # column, int64 [columns][used]; rows of each choice's product
        ("probabilities", np.int64),
        ("ends", np.int64),
        ("places", np.int64),
        ("products", np.int64),
    ],
    align=True,
)
