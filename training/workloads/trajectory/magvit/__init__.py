"""A small MAGVIT: clips become tokens, which a masked Transformer classifies.

It follows Yu et al. 2023 (arXiv:2212.05199), with finite scalar quantization instead of a learned
codebook (Mentzer et al. 2023, arXiv:2309.15505).
"""
