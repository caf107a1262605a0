"""graphcap trains drafters for speculative decoding at fixed shapes.

Tensor names carry their shape as a suffix. One legend for the whole package:
    B rows             S row length (tokens)    T = B·S tokens          L tapped target layers
    N anchor slots     K block size (tokens)    Q = N·K draft tokens    D hidden size    U = N + 1: first tokens, and MASK
    V vocabulary       H heads                  C head size             P parameters
So `token_ids_T` is [T] and `features_TF` is [T, L·D] (F = L·D). Documents and rows live on the host as NumPy arrays.
"""

__version__ = "0.1.0"
