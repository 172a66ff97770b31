"""A small MAGVIT: clips become tokens, and a masked Transformer over the tokens tells them apart.

After Yu et al. 2023 (arXiv:2212.05199), with finite scalar quantisation in place of a codebook that
is learned (Mentzer et al. 2023, arXiv:2309.15505).
"""
